"""NodeChain: replicas across nodes only, node totals settled, and what Chain makes of it."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from solver_util import make_problem, num_replicas_N, problems, require_valid

from foremoe.base.parallel import row_runner
from foremoe.machine.cluster import Cluster
from foremoe.planner.parsing import parse
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.solvers.rank.chain import Chain
from foremoe.solvers.rank.node import NodeChain
from foremoe.synthetic.counts import synthetic_workload
from foremoe.testing import placements

BALANCE = CostModel(objective="balance")


def balance(problem):
    return dataclasses.replace(problem, cost=BALANCE)


def nodes_over(problem, placement):
    """int64 [N]: pairs by which nodes exceed their share of the mean, summed over nodes."""
    node_G, load_NG = problem.cluster.node_of_rank_G, placement.load_NG()
    share_N = -(-load_NG.sum(axis=1) // problem.G)
    return sum(
        np.maximum(0, load_NG[:, node_G == node].sum(axis=1) - share_N * (node_G == node).sum())
        for node in range(problem.cluster.num_nodes)
    )


@given(st.data())
def test_valid_no_worse_and_only_across_nodes(data):
    problem = balance(data.draw(problems()))
    start = data.draw(st.sampled_from((problem.static(), data.draw(placements(problem)))))
    placement = NodeChain().solve(problem, start)
    if problem.replicas == "node" or problem.cluster.num_nodes == 1:
        assert placement is start
        return
    require_valid(problem, placement)
    assert (placement.load_NG().max(axis=1) <= start.load_NG().max(axis=1)).all()
    assert (nodes_over(problem, placement) <= nodes_over(problem, start)).all()
    node_G = problem.cluster.node_of_rank_G
    for n, g, s in np.argwhere(placement.expert_NGS[:, :, problem.B :] >= 0):
        e = placement.expert_NGS[n, g, problem.B + s]
        home = problem.home_LE[n % problem.L, e] // problem.B
        assert node_G[home] != node_G[g] or e in start.expert_NGS[n, g]


@given(problem=problems())
def test_chain_after_it_is_no_worse_than_chain_alone(problem):
    problem = balance(problem)
    alone = Chain(tries=3).solve(problem, problem.static())
    both = Chain(tries=3).solve(problem, NodeChain().solve(problem, problem.static()))
    require_valid(problem, both)
    assert (both.load_NG().max(axis=1) <= alone.load_NG().max(axis=1)).all()


def test_settles_two_nodes_with_one_replica():
    """Node 0 has 40 too many; rank 3 takes them, though it lacks only 10 itself."""
    problem = balance(make_problem([[[90, 30, 60, 60, 40, 40, 50, 30]]], [0, 0, 1, 1], 1))
    placement = NodeChain().solve(problem, problem.static())
    assert num_replicas_N(problem, placement).tolist() == [1]
    assert nodes_over(problem, placement).tolist() == [0]


def test_few_replicas_settle_most_of_what_nodes_have_too_much():
    work = synthetic_workload("qwen3-30b-a3b", num_ranks=32, tokens_per_rank=8192, micro_steps=2, num_layers=12, seed=1)
    problem = Problem.of(work, Cluster.preset("8xh100", num_ranks=32), cost=BALANCE)
    placement = NodeChain().solve(problem, problem.static())
    assert num_replicas_N(problem, placement).mean() < 10
    assert nodes_over(problem, placement).sum() < 0.1 * nodes_over(problem, problem.static()).sum()
    with row_runner(2):
        assert placement.same_as(NodeChain().solve(problem, problem.static()))


def test_reads_back_from_its_repr():
    assert parse(repr(NodeChain())) == NodeChain()
