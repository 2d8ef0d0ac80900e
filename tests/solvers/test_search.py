"""Search: cheaper rows by the price that simulation uses, and never dearer ones."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe.base.errors import InputError
from foremoe.problem.laws import placement_violations
from foremoe.problem.pricing import row_objective
from foremoe.simulate import simulate
from foremoe.solvers import Eplb, Search
from foremoe.solvers.search.descend import NODE_MOVE_RANK_S, NODE_MOVE_S, PAIR_MOVE_RANK_S, PAIR_MOVE_S
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
    found_N, start_N, home_N = (row_objective(problem, placed) for placed in (found, start, problem.static()))
    assert (found_N <= np.minimum(start_N, home_N) * (1.0 + 1e-12)).all()
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
    plan, _ = foremoe.Planner(rank=(Search(0),)).plan(problem)
    found, _ = foremoe.Planner(rank=(Search(2000),)).plan(problem)
    assert simulate(problem, found).total_s <= share * simulate(problem, plan).total_s


def test_more_effort_is_no_loss_on_average():
    problem, start = case(), case().static()
    totals = [foremoe.price(problem, Search(effort).solve(problem, start)).total_s.sum() for effort in (0, 200, 2000, 8000)]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] < totals[0]


@pytest.mark.parametrize("effort", [500, None])
def test_what_a_row_becomes_does_not_depend_on_the_rows_around_it(effort):
    problem = case()
    whole, last = Search(effort).solve(problem, problem.static()), problem[1:]
    alone = Search(effort).solve(last, last.static())
    np.testing.assert_array_equal(alone.expert_NGS, whole.expert_NGS[problem.L :])
    np.testing.assert_array_equal(alone.quota_NGS, whole.quota_NGS[problem.L :])


@pytest.mark.parametrize(
    ("dispatch", "move_s"), [("pairs", PAIR_MOVE_S + 16 * PAIR_MOVE_RANK_S), ("node", NODE_MOVE_S + 16 * NODE_MOVE_RANK_S)]
)
def test_a_short_row_is_searched_for_half_a_percent_of_its_time_after_the_start_on_each_rank(dispatch, move_s):
    work = foremoe.synthetic_workload(
        "qwen3-30b-a3b", num_ranks=16, tokens_per_rank=4096, micro_steps=1, num_layers=1, regime="skew", stage="recompute"
    )
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 16, dispatch=dispatch), redundant=2)
    started = Search(effort=0).solve(problem, problem.static())
    started_s, home_s = (foremoe.price(problem, placed).total_s[0] for placed in (started, problem.static()))
    assert started_s < 0.7 * home_s
    limited = Search(effort=int(0.005 * started_s * 16 / move_s)).solve(problem, problem.static())
    found = Search().solve(problem, problem.static())
    assert (found.expert_NGS == limited.expert_NGS).all() and (found.quota_NGS == limited.quota_NGS).all()


def test_by_default_little_is_tried_where_little_is_to_be_had():
    """The same as a handful of moves on one node; as good as a thousand where links are slow and rows are long."""
    easy, hard = case(num_ranks=8), case("8xpcie", num_ranks=32)
    for problem, effort, better in ((easy, 1500, False), (hard, 500, True)):
        found, other = (Search(e).solve(problem, problem.static()) for e in (None, effort))
        default_s, other_s = (foremoe.price(problem, placed).total_s.sum() for placed in (found, other))
        assert (default_s <= other_s) == better


@pytest.mark.parametrize("objective", ["time", "balance"])
def test_refuses_a_start_that_moves_homes(objective):
    """Compiled code would look for homes that are not there."""
    problem = dataclasses.replace(case(), cost=foremoe.CostModel(objective=objective))
    with pytest.raises(InputError, match="Search keeps homes"):
        foremoe.Planner(rank=(Eplb(), Search(effort=10)), guard=False).plan(problem)


@pytest.mark.parametrize(
    "changes",
    [
        {"cost": foremoe.CostModel(objective="balance")}, {"load_MLGE": None},
    ],
    ids=["balance", "unknown sources"],
)  # fmt: skip
def test_what_it_does_not_search_is_started_all_the_same(changes):
    problem = dataclasses.replace(case(), **changes)
    found, start = (Search(effort).solve(problem, problem.static()) for effort in (None, 0))
    assert found.same_as(start) and not found.same_as(problem.static())
