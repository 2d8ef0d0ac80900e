"""Chain: its laws, how even the loads it leaves are, and what it costs under time."""

import dataclasses
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import BALANCE, balance, make_problem, num_replicas_N, problems, require_valid

from foremoe.base.errors import InputError
from foremoe.base.parallel import row_runner
from foremoe.machine.cluster import Cluster
from foremoe.planner.parsing import parse
from foremoe.problem.bounds import load_bound, loose_row_bound
from foremoe.problem.cost import CostModel
from foremoe.problem.objective import price_rows, row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers import Greedy, LeastLoaded, Lplb, NodeChain, Quota, Static
from foremoe.solvers.kernels.chain import Options, level_goal, plain_rule, search_row
from foremoe.solvers.kernels.rows import bare_homes, clean_row
from foremoe.solvers.rank.chain import GAP, Chain
from foremoe.synthetic.counts import synthetic_workload
from foremoe.testing import placements


def replicas(problem, expert_GS):
    """(home rank, rank) of every replica."""
    G, S = expert_GS.shape
    home = {int(expert_GS[g, b]): g for g in range(G) for b in range(problem.B)}
    return [(home[int(expert_GS[g, s])], g) for g in range(G) for s in range(problem.B, S) if expert_GS[g, s] >= 0]


def crossing(problem, placement):
    node_G = problem.cluster.node_of_rank_G
    return sum(node_G[home] != node_G[g] for expert_GS in placement.expert_NGS for home, g in replicas(problem, expert_GS))


@given(st.data())
def test_valid_and_no_worse_than_the_start_on_maximum_load(data):
    problem = balance(data.draw(problems()))
    for start in (problem.static(), data.draw(placements(problem))):
        placement = Chain(tries=3).solve(problem, start)
        require_valid(problem, placement)
        assert (placement.load_NG().max(axis=1) <= start.load_NG().max(axis=1)).all()
        assert (placement.load_NG().max(axis=1) >= load_bound(problem)).all()
        if problem.replicas == "node":
            assert crossing(problem, placement) == 0


@given(st.data())
def test_costs_no_more_than_the_start(data):
    problem = data.draw(problems())
    problem = dataclasses.replace(problem, cost=CostModel(overlap=data.draw(st.sampled_from((0.0, 1.0)))))
    start = data.draw(placements(problem))
    placement = Chain(tries=2).solve(problem, start)
    require_valid(problem, placement)
    assert (row_objective(problem, placement) <= row_objective(problem, start)).all()


@given(problem=problems(), near=st.integers(1, 3), far=st.integers(1, 3), tries=st.integers(1, 6))
def test_limits_on_copies_hold(problem, near, far, tries):
    static, node_G = problem.static(), problem.cluster.node_of_rank_G
    options = Options(problem.replicas == "node", tries, 0.6, 0.0, True)
    rule = plain_rule(node_G, problem.B, options.node_only, False)
    for load_E, expert_GS in zip(problem.load_NE, static.expert_NGS, strict=True):
        placed = bare_homes(load_E, problem.B, expert_GS.copy())
        goal = level_goal(0.0, options.node_only, node_G, placed.load_G)
        search_row(goal, placed.load_G.max(), rule, (near, far), options, placed.quota_GS.copy(), placed)
        clean_row(problem.B, placed)
        out = replicas(problem, placed.expert_GS)
        for g in range(problem.G):
            assert sum(home == g and node_G[to] == node_G[g] for home, to in out) <= near
            assert sum(home == g and node_G[to] != node_G[g] for home, to in out) <= far


def workload_problem(num_ranks, redundant=1, cost=BALANCE, tokens_per_rank=8192, model="qwen3-30b-a3b"):
    work = synthetic_workload(model, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, micro_steps=2, num_layers=12, seed=1)
    return Problem.of(work, Cluster.preset("8xh100", num_ranks=num_ranks), redundant=redundant, cost=cost)


def mean_skew(placement):
    load_NG = placement.load_NG()
    return float((load_NG.max(axis=1) / load_NG.mean(axis=1)).mean())


@pytest.mark.parametrize(
    ("num_ranks", "redundant", "most"),
    [(8, 1, 1.012), (16, 1, 1.004), (32, 1, 1.001), (64, 1, 1.0005), (8, 2, 1.001), (64, 2, 1.0005)],
)
def test_mid_loads_are_balanced(num_ranks, redundant, most):
    problem = workload_problem(num_ranks, redundant)
    placement = Chain().solve(problem, problem.static())
    assert mean_skew(problem.static()) > 1.3
    assert mean_skew(placement) <= most
    assert (num_replicas_N(problem, placement) < num_ranks * redundant).all()
    with row_runner(2):
        assert placement.same_as(Chain().solve(problem, problem.static()))


def test_relays_save_replicas_across_nodes():
    problem = workload_problem(32)
    relayed, plain = (Chain(relay=relay).solve(problem, problem.static()) for relay in (True, False))
    assert mean_skew(relayed) <= mean_skew(plain) + 1e-4
    assert crossing(problem, relayed) < 0.6 * crossing(problem, plain)


@given(st.data())
def test_inside_adds_no_replica_across_nodes(data):
    problem = balance(data.draw(problems()))
    start = data.draw(placements(problem))
    placement = Chain(inside=True, tries=3).solve(problem, start)
    require_valid(problem, placement)
    assert (placement.load_NG().max(axis=1) <= start.load_NG().max(axis=1)).all()
    node_G = problem.cluster.node_of_rank_G
    for before_GS, after_GS in zip(start.expert_NGS, placement.expert_NGS, strict=True):
        before, after = (
            {(home, to) for home, to in replicas(problem, expert_GS) if node_G[home] != node_G[to]}
            for expert_GS in (before_GS, after_GS)
        )
        assert after <= before


def test_few_replicas_across_nodes_then_inside():
    problem = workload_problem(64)
    few = Chain(inside=True).solve(problem, NodeChain(0.2).solve(problem, problem.static()))
    assert crossing(problem, few) <= 0.2 * 64 * problem.N and mean_skew(few) < 1.05


def test_slack_takes_fewer_replicas():
    problem = workload_problem(16)
    exact, loose = (Chain(slack=slack).solve(problem, problem.static()) for slack in (0.0, 0.1))
    assert num_replicas_N(problem, loose).sum() < 0.8 * num_replicas_N(problem, exact).sum()
    assert mean_skew(loose) <= 1.1001


def test_slack_takes_fewer_replicas_than_quota_at_less_skew():
    problem = workload_problem(64)
    loose, quota = (solver.solve(problem, problem.static()) for solver in (Chain(slack=0.05), Quota()))
    assert mean_skew(loose) < mean_skew(quota)
    assert num_replicas_N(problem, loose).sum() < num_replicas_N(problem, quota).sum()


def test_under_time_copies_that_show_are_few():
    problem = workload_problem(32, cost=CostModel(overlap=0.0), tokens_per_rank=2048, model="qwen3-235b-a22b")
    level = Chain().solve(dataclasses.replace(problem, cost=BALANCE), problem.static())
    timed = Chain().solve(problem, problem.static())
    level_s, timed_s = (row_objective(problem, placement).mean() for placement in (level, timed))
    assert timed_s < 0.9 * level_s and num_replicas_N(problem, timed).mean() < num_replicas_N(problem, level).mean()


def test_under_time_replicas_bring_tokens_nearer():
    problem = workload_problem(64, cost=CostModel())
    level = Chain().solve(dataclasses.replace(problem, cost=BALANCE), problem.static())
    timed = Chain().solve(problem, problem.static())
    level_s, timed_s = (price_rows(problem, placement).dispatch_s.sum() for placement in (level, timed))
    assert timed_s < 0.96 * level_s and mean_skew(timed) < 1.005


@given(problem=problems())
def test_under_time_no_baseline_costs_less(problem):
    mine_N = row_objective(problem, Chain().solve(problem, problem.static()))
    good_N = (1.0 + GAP) * loose_row_bound(problem)
    for solver in (Static(), Quota(), LeastLoaded(min_pairs=0, threshold=1.0), Greedy(), Lplb()):
        theirs_N = row_objective(problem, solver.solve(problem, problem.static()))
        assert (mine_N <= np.maximum(theirs_N * (1 + 1e-12), good_N)).all(), solver


@pytest.mark.parametrize("tokens_per_rank", [256, 1024, 8192])
def test_being_allowed_to_leave_the_node_never_costs_time(tokens_per_rank):
    anywhere = workload_problem(16, cost=CostModel(), tokens_per_rank=tokens_per_rank, model="gpt-oss-20b")
    inside = dataclasses.replace(anywhere, replicas="node")
    any_s, node_s = (
        float(row_objective(problem, Chain().solve(problem, problem.static())).sum()) for problem in (anywhere, inside)
    )
    assert any_s <= node_s * (1 + 1e-9)


def test_a_chain_where_no_star_will_do():
    """Rank 2 lacks 60; only rank 0's expert covers that, and rank 1 fills rank 0 in turn."""
    problem = balance(make_problem([[[70, 20, 80, 90, 20, 20]]], [0, 0, 0], 1))
    placement = Chain().solve(problem, problem.static())
    assert placement.load_NG().tolist() == [[100, 100, 100]]


@pytest.mark.parametrize("node_G", ([0, 0], [0, 1]))
def test_small_and_empty_rows(node_G):
    problem = balance(make_problem([[[0, 0], [7, 0], [1, 1], [0, 1]]], node_G, 2))
    placement = Chain().solve(problem, problem.static())
    require_valid(problem, placement)
    assert placement.load_NG().max(axis=1).tolist() == [0, 4, 1, 1]
    assert num_replicas_N(problem, placement).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"tries": 0}, {"tries": 1.5}, {"tries": True}, {"spread": 2.0}, {"spread": float("nan")}, {"slack": -0.1}, {"relay": 1},
        {"inside": 1}, {"portfolio": -1}, {"portfolio": 1.5}, {"portfolio": True},
    ],
)  # fmt: skip
def test_refuses_options_that_make_no_sense(options):
    with pytest.raises(InputError, match=f"{next(iter(options))} of Chain must"):
        Chain(**options)


def test_reads_back_from_its_repr():
    chain = Chain(tries=4, portfolio=0, relay=False)
    assert parse(repr(chain)) == chain


@pytest.mark.shared
@pytest.mark.parametrize("name", ("gpt_oss_20b_decode", "esft_law"))
def test_recorded_routing_is_balanced(name):
    path = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "data" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"the recorded trace {path.name} is not here")
    with np.load(path, allow_pickle=False) as trace:
        topk_TLK, num_experts = trace["topk_ids"][:8192], int(trace["num_experts"])
    load_LE = np.array([np.bincount(topk_TLK[:, i].ravel(), minlength=num_experts) for i in range(topk_TLK.shape[1])])
    for num_ranks in (8, 16, 32):
        problem = balance(make_problem(load_LE[None], np.arange(num_ranks) // 8, 1))
        assert mean_skew(Chain().solve(problem, problem.static())) <= 1.004
