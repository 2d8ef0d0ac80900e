"""What a search starts from, and the objective "balance", where the start is all: even loads with few replicas."""

import dataclasses
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import BALANCE, balance, make_problem, num_replicas_N, problems, require_valid

import foremoe
from foremoe.base.parallel import row_runner
from foremoe.machine.cluster import Cluster
from foremoe.problem.bounds import load_bound
from foremoe.problem.cost import CostModel
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers import Search
from foremoe.synthetic.counts import synthetic_workload
from foremoe.testing import placements

START = Search(effort=0)


def crossing(problem, placement):
    """Replicas outside the node of their home."""
    node_G, num = problem.cluster.node_of_rank_G, 0
    home_NGS = (problem.home_LE // problem.B)[np.arange(problem.N)[:, None, None] % problem.L, placement.expert_NGS]
    away_NGS = (placement.expert_NGS >= 0) & (node_G[home_NGS] != node_G[:, None])
    num += int(away_NGS[:, :, problem.B :].sum())
    return num


@given(st.data())
def test_valid_and_no_worse_than_the_start_on_maximum_load(data):
    problem = balance(data.draw(problems()))
    for start in (problem.static(), data.draw(placements(problem))):
        placement = START.solve(problem, start)
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
    placement = START.solve(problem, start)
    require_valid(problem, placement)
    found_N, start_N = (row_objective(problem, placed) for placed in (placement, start))
    assert (found_N <= start_N * (1.0 + 1e-12)).all()


def workload_problem(num_ranks, redundant=1, cost=BALANCE, tokens_per_rank=8192, model="qwen3-30b-a3b"):
    work = synthetic_workload(
        model, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, micro_steps=2, num_layers=12, seed=1, regime="mid"
    )
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
    placement = START.solve(problem, problem.static())
    assert mean_skew(problem.static()) > 1.3
    assert mean_skew(placement) <= most
    assert (num_replicas_N(problem, placement) < num_ranks * redundant).all()
    with row_runner(2):
        assert placement.same_as(Search(effort=10).solve(problem, problem.static()))


def test_under_time_copies_that_show_are_few():
    problem = workload_problem(32, cost=CostModel(overlap=0.0), tokens_per_rank=2048, model="qwen3-235b-a22b")
    level = START.solve(dataclasses.replace(problem, cost=BALANCE), problem.static())
    timed = START.solve(problem, problem.static())
    level_s, timed_s = (foremoe.price(problem, placement).total_s.mean() for placement in (level, timed))
    assert timed_s < 0.97 * level_s and num_replicas_N(problem, timed).mean() < num_replicas_N(problem, level).mean()


def test_under_time_replicas_bring_tokens_nearer():
    problem = workload_problem(64, cost=CostModel())
    level = START.solve(dataclasses.replace(problem, cost=BALANCE), problem.static())
    timed, searched = (solver.solve(problem, problem.static()) for solver in (START, Search(effort=300)))
    level_s, timed_s, searched_s = (foremoe.price(problem, placed).dispatch_s.sum() for placed in (level, timed, searched))
    assert searched_s < 0.94 * timed_s < 0.92 * level_s and mean_skew(timed) < 1.005


@pytest.mark.parametrize(
    ("regime", "redundant", "most"), [("mild", 1, 0.96), ("mild", 2, 0.8), ("mild", 6, 0.69), ("mid", 1, 0.95)]
)
def test_groups_of_nodes_serve_their_own_tokens(regime, redundant, most):
    """With a message per token and node, few nodes hold most experts between them, so that a token reaches few nodes.

    Loads are a little uneven, as tokens would leave their group otherwise. A busy expert has several replicas in its group.
    """
    work = synthetic_workload(
        "qwen3-30b-a3b", num_ranks=64, tokens_per_rank=4096, micro_steps=1, num_layers=2, regime=regime, seed=1
    )
    problem = Problem.of(work, Cluster.preset("8xh100", 64, dispatch="node"), redundant=redundant)
    grouped, single = (Search(effort=1, without=parts).solve(problem, problem.static()) for parts in ((), ("groups",)))
    require_valid(problem, grouped)
    grouped_s, single_s = (foremoe.price(problem, placed) for placed in (grouped, single))
    assert (grouped_s.total_s <= most * single_s.total_s).all()
    started = Search(effort=0).solve(problem, problem.static())
    assert started.same_as(Search(effort=0, without=("groups",)).solve(problem, problem.static()))


def test_replicas_near_tokens_whose_copies_overlap_at_their_homes_are_tried_too():
    """Under pairs dispatch. Without a limit on the copies out of a home, the saving is 5 %."""
    work = synthetic_workload(
        "qwen3-235b-a22b", num_ranks=32, tokens_per_rank=4096, micro_steps=1, num_layers=4, regime="gpt-oss-like", seed=1
    )
    problem = Problem.of(work, Cluster.preset("8xa100", 32, dispatch="pairs"), redundant=2)
    near_s, even_s = (
        foremoe.price(problem, Search(effort=0, without=parts).solve(problem, problem.static())).total_s.sum()
        for parts in ((), ("bring",))
    )
    assert near_s <= 0.94 * even_s


def test_groups_follow_the_order_of_ranks_and_not_the_numbers_of_nodes():
    work = synthetic_workload(
        "qwen3-30b-a3b", num_ranks=64, tokens_per_rank=4096, micro_steps=1, num_layers=1, regime="mild", seed=1
    )
    cluster = Cluster.preset("8xh100", 64, dispatch="node")
    renumbered = dataclasses.replace(cluster, node_of_rank_G=np.array([3, 0, 5, 1, 7, 2, 6, 4], np.int32)[cluster.node_of_rank_G])
    problems = [Problem.of(work, where, redundant=2) for where in (cluster, renumbered)]
    in_order_s, other_s = (
        float(foremoe.price(problem, Search(effort=1).solve(problem, problem.static())).total_s[0]) for problem in problems
    )
    assert other_s == pytest.approx(in_order_s, rel=0.01)


@pytest.mark.parametrize("dispatch", ["node", "pairs"])
@pytest.mark.parametrize(
    "node_of_rank", [[0, 0, 1, 2, 2, 3, 4, 4, 5, 5], [4, 0, 3, 1, 2, 0, 4, 3, 1, 2], range(10), [0] * 8 + [1, 2]]
)
def test_groups_of_uneven_nodes_and_rows_without_load(node_of_rank, dispatch):
    work = synthetic_workload("glm-4.5", num_ranks=10, tokens_per_rank=2048, micro_steps=2, num_layers=2, seed=1, regime="mid")
    cluster = dataclasses.replace(
        Cluster.preset("8xh100", 10, dispatch=dispatch), node_of_rank_G=np.array(node_of_rank, np.int32)
    )
    problem = Problem.of(work, cluster, redundant=2)
    load_MLGE = problem.load_MLGE.copy()
    load_MLGE[0, 1] = 0
    problem = dataclasses.replace(problem, load_MLGE=load_MLGE, load_MLE=load_MLGE.sum(axis=2, dtype=np.int32))
    for effort in (0, 1, 50):
        placed = Search(effort=effort).solve(problem, problem.static())
        require_valid(problem, placed)
        home_s = foremoe.price(problem, problem.static()).total_s
        assert (foremoe.price(problem, placed).total_s <= home_s * (1 + 1e-9)).all()


@pytest.mark.parametrize("dispatch", ["node", "pairs"])
def test_tokens_of_a_level_row_are_served_near(dispatch):
    """Every node's tokens want the experts of the other node."""
    load_MLGE = np.zeros((1, 1, 4, 4), np.int32)
    load_MLGE[0, 0, :2, 2:] = load_MLGE[0, 0, 2:, :2] = 40_000
    problem = make_problem(load_MLGE.sum(axis=2), [0, 0, 1, 1], 2)
    cluster = dataclasses.replace(problem.cluster, dispatch=dispatch)
    problem = dataclasses.replace(problem, load_MLGE=load_MLGE, cluster=cluster)
    home_s, placed_s = (
        float(foremoe.price(problem, placed).total_s[0]) for placed in (problem.static(), START.solve(problem, problem.static()))
    )
    assert placed_s < 0.5 * home_s


@pytest.mark.parametrize("tokens_per_rank", [256, 1024, 8192])
def test_being_allowed_to_leave_the_node_never_costs_time(tokens_per_rank):
    anywhere = workload_problem(16, cost=CostModel(), tokens_per_rank=tokens_per_rank, model="gpt-oss-20b")
    inside = dataclasses.replace(anywhere, replicas="node")
    any_s, node_s = (
        float(foremoe.price(problem, START.solve(problem, problem.static())).total_s.sum()) for problem in (anywhere, inside)
    )
    assert any_s <= node_s * (1 + 1e-9)


def test_a_chain_where_no_star_will_do():
    """Rank 2 lacks 60; only rank 0's expert covers that, and rank 1 fills rank 0 in turn."""
    problem = balance(make_problem([[[70, 20, 80, 90, 20, 20]]], [0, 0, 0], 1))
    placement = START.solve(problem, problem.static())
    assert placement.load_NG().tolist() == [[100, 100, 100]]


@pytest.mark.parametrize("node_G", ([0, 0], [0, 1]))
def test_small_and_empty_rows(node_G):
    problem = balance(make_problem([[[0, 0], [7, 0], [1, 1], [0, 1]]], node_G, 2))
    placement = START.solve(problem, problem.static())
    require_valid(problem, placement)
    assert placement.load_NG().max(axis=1).tolist() == [0, 4, 1, 1]
    assert num_replicas_N(problem, placement).tolist() == [0, 1, 0, 0]


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
        assert mean_skew(START.solve(problem, problem.static())) <= 1.004


@pytest.mark.parametrize("link", ["peer_bytes_per_s", "rdma_bytes_per_s"])
def test_a_start_ends_where_a_link_hardly_carries_anything(link):
    """Only limits on copies that can bind are raised, or the other link's would be raised until it overflows."""
    work = synthetic_workload("gpt-oss-20b", num_ranks=16, tokens_per_rank=512, micro_steps=1, num_layers=2, seed=0, regime="mid")
    cluster = dataclasses.replace(Cluster.preset("8xh100", 16), **{link: 1e-30})
    problem = Problem.of(work, cluster, redundant=1)
    require_valid(problem, START.solve(problem, problem.static()))
