"""Lplb: a fixed replica graph and the best split over it."""

from hypothesis import given
from hypothesis import strategies as st
from solver_util import (
    make_problem,
    problems,
    require_no_worse_than_static,
    require_relabelling,
    require_start_ignored,
    require_valid,
)

from foremoe.solvers.published.lplb import Lplb
from foremoe.solvers.split.exact import ExactSplit


def graph(problem):
    """All replicas of the fixed graph, unused ones too, from the description."""
    expert_NGS = problem.static().expert_NGS.copy()
    node_G = problem.cluster.node_of_rank_G
    for n, (load_E, base_GB) in enumerate(zip(problem.load_NE, problem.base_NGB, strict=True)):
        for g in range(problem.G):
            ring = [r for r in range(problem.G) if problem.replicas == "any" or node_G[r] == node_G[g]]
            for r in range(problem.R):
                other = ring[(ring.index(g) + 2**r) % len(ring)]
                hottest = max(base_GB[other], key=lambda e: load_E[e])
                if hottest not in expert_NGS[n, g]:
                    expert_NGS[n, g, problem.B + r] = hottest
    return expert_NGS


@given(problem=problems())
def test_is_the_best_split_over_the_fixed_graph(problem):
    placement = Lplb().solve(problem, problem.static())
    require_valid(problem, placement)
    require_no_worse_than_static(problem, placement)
    expert_NGS = graph(problem)
    quota_NGS = ExactSplit().solve(problem, expert_NGS)
    expert_NGS[:, :, problem.B :][quota_NGS[:, :, problem.B :] == 0] = -1
    assert (placement.expert_NGS == expert_NGS).all() and (placement.quotas_NGS == quota_NGS).all()


@given(problem=problems(), seed=st.integers(0, 9))
def test_start_does_not_matter(problem, seed):
    require_start_ignored(Lplb(), problem)


@given(problem=problems(distinct=True), seed=st.integers(0, 9))
def test_names_do_not_matter_to_the_balance(problem, seed):
    require_relabelling(Lplb(), problem, seed)


@given(problem=problems())
def test_rows_one_by_one_give_the_same(problem):
    placement, start = Lplb().solve(problem, problem.static()), problem.static()
    options = Lplb().options(problem.replicas == "node", problem)
    for n in range(problem.N):
        expert_GS, quota_GS = start.expert_NGS[n].copy(), start.quotas_NGS[n].copy()
        Lplb.edit(problem.load_NE[n], problem.cluster.node_of_rank_G, problem.B, options, expert_GS, quota_GS)
        assert (expert_GS == placement.expert_NGS[n]).all() and (quota_GS == placement.quotas_NGS[n]).all()


def test_a_ring_levels_its_neighbours():
    problem = make_problem([[[70, 50, 30, 50]]], [0, 0, 0, 0], 1)
    assert Lplb().solve(problem, problem.static()).load_NG().tolist() == [[50, 50, 50, 50]]
