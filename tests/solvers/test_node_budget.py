"""NodeChain with a limit: at most so many replicas across nodes, and node totals nearly as even as without it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import BALANCE, balance, make_problem, problems, require_valid

from foremoe.base.errors import InputError
from foremoe.base.parallel import row_runner
from foremoe.machine.cluster import Cluster
from foremoe.planner.parsing import parse
from foremoe.problem.problem import Problem
from foremoe.solvers.home.anneal import Anneal
from foremoe.solvers.kernels.node import _taker
from foremoe.solvers.rank.node import NodeChain
from foremoe.synthetic.counts import synthetic_workload
from foremoe.testing import placements


def num_far_N(problem, placement):
    """int64 [N]: replicas whose home is in another node."""
    node_G = problem.cluster.node_of_rank_G
    expert_NGR = placement.expert_NGS[:, :, problem.B :]
    home_LE = problem.home_LE // problem.B
    far_N = np.zeros(problem.N, np.int64)
    for n, g, r in np.argwhere(expert_NGR >= 0):
        far_N[n] += node_G[home_LE[n % problem.L, expert_NGR[n, g, r]]] != node_G[g]
    return far_N


def largest_node_N(problem, placement):
    """float64 [N]: the largest node load per rank over the mean rank load."""
    node_G, load_NG = problem.cluster.node_of_rank_G, placement.load_NG()
    node_NV = np.stack([load_NG[:, node_G == v].mean(axis=1) for v in range(node_G.max() + 1)], axis=1)
    return node_NV.max(axis=1) / np.maximum(load_NG.mean(axis=1), 1e-9)


@given(data=st.data(), limit=st.floats(0.0, 2.0))
def test_valid_no_worse_and_within_the_limit(data, limit):
    problem = balance(data.draw(problems()))
    start = data.draw(st.sampled_from((problem.static(), data.draw(placements(problem)))))
    placement = NodeChain(limit).solve(problem, start)
    require_valid(problem, placement)
    assert (placement.load_NG().max(axis=1) <= start.load_NG().max(axis=1)).all()
    if problem.replicas == "any":
        allowed = int(np.floor(limit * problem.G + 1e-9))
        assert (num_far_N(problem, placement) <= np.maximum(allowed, num_far_N(problem, start))).all()


def test_a_limit_that_is_not_met_changes_nothing_and_none_allowed_keeps_the_start():
    problem = balance(make_problem([[[90, 30, 60, 60, 40, 40, 50, 30]]], [0, 0, 1, 1], 1))
    free = NodeChain().solve(problem, problem.static())
    assert NodeChain(0.25).solve(problem, problem.static()).same_as(free) and num_far_N(problem, free).tolist() == [1]
    none = NodeChain(0.24).solve(problem, problem.static())
    assert (none.expert_NGS == problem.static().expert_NGS).all()


def test_a_fifth_of_a_replica_per_rank_settles_nodes_of_annealed_homes_and_helps_contiguous_ones():
    work = synthetic_workload("qwen3-30b-a3b", num_ranks=64, tokens_per_rank=8192, micro_steps=4, num_layers=4, seed=2)
    problem = Problem.of(work, Cluster.preset("8xh100", num_ranks=64), cost=BALANCE)
    moved = dataclasses.replace(problem, home_LE=Anneal().solve(problem))
    for where, most in ((problem, 1.02), (moved, 1.005)):
        placement = NodeChain(0.2).solve(where, where.static())
        assert num_far_N(where, placement).max() <= 12
        assert largest_node_N(where, placement).mean() < most
        with row_runner(2):
            assert placement.same_as(NodeChain(0.2).solve(where, where.static()))
    # With fewer, less is settled: the limit binds and the search still finds a use for all of it.
    few, more = (largest_node_N(problem, NodeChain(x).solve(problem, problem.static())).mean() for x in (0.05, 0.1))
    assert largest_node_N(problem, problem.static()).mean() > few + 0.05 > more + 0.1


def test_the_taker_is_filled_by_what_it_takes():
    """Its only slot is used up: the emptiest rank would stay below its share for good."""
    expert_GS = np.array([[0, -1], [1, -1], [2, -1], [3, -1], [4, 9]], np.int16)
    load_G = np.array([50, 20, 95, 88, 91])
    for amount, rank in ((5, 2), (11, 2), (12, 3), (60, 0), (90, 1), (1, 2)):
        assert _taker(0, amount, 100, np.zeros(5, np.int32), 1, expert_GS, load_G) == (rank, 1)
    assert _taker(1, 5, 100, np.zeros(5, np.int32), 1, expert_GS, load_G) == (-1, -1)


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf"), "2", True])
def test_bad_limits_are_refused(limit):
    with pytest.raises(InputError):
        NodeChain(limit)


def test_reads_back_from_its_repr():
    assert parse(repr(NodeChain(0.2))) == NodeChain(0.2)
