"""Search: cheaper rows by the price that simulation uses, and never dearer ones."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe.problem.laws import placement_violations
from foremoe.simulate import simulate
from foremoe.solvers import Chain, Search
from foremoe.testing import strategies as draws


def case(kind="8xh100", num_ranks=16, dispatch="pairs", redundant=1, **options):
    work = foremoe.synthetic_workload(
        "gpt-oss-20b", num_ranks=num_ranks, tokens_per_rank=2048, micro_steps=2, num_layers=8, regime="mid", seed=5
    )
    return foremoe.Problem.of(work, foremoe.Cluster.preset(kind, num_ranks, dispatch=dispatch), redundant=redundant, **options)


@examples(60)
@given(st.data())
def test_no_row_ends_above_its_start_or_home(data):
    problem = data.draw(draws.problems(min_ranks=2, min_redundant=1, objectives=("time",), sources=True))
    start = data.draw(draws.placements(problem))
    found = Search(effort=60).solve(problem, start)
    assert not placement_violations(problem, found)
    found_N, start_N = foremoe.price(problem, found).total_s, foremoe.price(problem, start).total_s
    assert (found_N <= start_N * (1.0 + 1e-12)).all()
    if isinstance(problem.slots, foremoe.SharedSlots):
        assert (found_N <= foremoe.price(problem, problem.static()).total_s * (1.0 + 1e-12)).all()
    if problem.replicas == "node":
        expert_NGS = Search(effort=60).solve(problem, problem.static()).expert_NGS
        home_NGS = (problem.home_LE // problem.B)[np.arange(problem.N)[:, None, None] % problem.L, expert_NGS]
        node_G = problem.cluster.node_of_rank_G
        assert (node_G[home_NGS] == node_G[:, None])[expert_NGS >= 0].all()


@pytest.mark.parametrize(
    ("kind", "dispatch", "share"), [("8xh100", "pairs", 0.98), ("8xpcie", "pairs", 0.93), ("8xh100", "node", 1.002)]
)
def test_stages_get_shorter_in_the_simulator(kind, dispatch, share):
    problem = case(kind, dispatch=dispatch)
    plan, _ = foremoe.Planner(rank=(Chain(),), guard=False).plan(problem)
    found, _ = foremoe.Planner(rank=(Chain(), Search(2000)), guard=False).plan(problem)
    assert simulate(problem, found).total_s <= share * simulate(problem, plan).total_s


def test_more_effort_is_no_loss_on_average():
    problem, start = case(), case().static()
    totals = [foremoe.price(problem, Search(effort).solve(problem, start)).total_s.sum() for effort in (0, 200, 2000, 8000)]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] < totals[0]


def test_every_row_is_searched_by_itself():
    """Rows of another problem, or in other blocks, do not change what a row becomes; but its number seeds it."""
    problem = case()
    whole = Search(500).solve(problem, problem.static())
    first = problem[:1]
    alone = Search(500).solve(first, first.static())
    np.testing.assert_array_equal(alone.expert_NGS, whole.expert_NGS[: problem.L])
    np.testing.assert_array_equal(alone.quota_NGS, whole.quota_NGS[: problem.L])


@pytest.mark.parametrize(
    "changes",
    [
        {"cost": foremoe.CostModel(objective="balance")}, {"slots": foremoe.ResidentSlots()}, {"load_MLGE": None},
    ],
    ids=["balance", "resident slots", "unknown sources"],
)  # fmt: skip
def test_what_it_does_not_search_stays(changes):
    problem = dataclasses.replace(case(), **changes)
    start = problem.static()
    assert Search().solve(problem, start) is start
