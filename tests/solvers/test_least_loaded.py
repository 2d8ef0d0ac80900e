"""LeastLoaded: spill to the least loaded rank."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import (
    make_problem,
    problems,
    require_no_worse_than_static,
    require_relabelling,
    require_start_ignored,
    require_valid,
    rows_by_hand,
    served,
)

from foremoe.base.errors import InputError
from foremoe.planner.strategies import STRATEGIES
from foremoe.solvers.rank.least_loaded import LeastLoaded

solvers = st.builds(
    LeastLoaded,
    alpha=st.sampled_from((1.0, 1.1, 1.5)),
    min_pairs=st.sampled_from((0, 3, 40)),
    threshold=st.sampled_from((1.0, 1.3)),
)


def by_hand(load_of, base_GB, node_G, redundant, solver):
    """The rule from its description: {(rank, expert): pairs}."""
    ranks = range(len(base_GB))
    now, free = [sum(load_of[e] for e in base_B) for base_B in base_GB], [redundant] * len(base_GB)
    mean = sum(now) / len(now)
    pairs = {(g, e): load_of[e] for g in ranks for e in base_GB[g]}
    capacity, floor = math.ceil(solver.alpha * mean), max(1, solver.min_pairs)
    if max(now) >= solver.threshold * mean:
        for home, e in sorted(pairs, key=lambda place: (-load_of[place[1]], place[1])):
            spill = min(load_of[e], now[home] - capacity)
            takers = [r for r in ranks if r != home and free[r] and node_G[r] == node_G[home]]
            while spill >= floor and takers:
                taker = min(takers, key=lambda r: now[r])
                amount = min(spill, capacity - now[taker])
                if amount < floor:
                    break
                pairs[taker, e] = amount
                pairs[home, e] -= amount
                now[home] -= amount
                now[taker] += amount
                free[taker] -= 1
                spill -= amount
                takers.remove(taker)
    return {place: amount for place, amount in pairs.items() if amount}


@given(problem=problems(), solver=solvers)
def test_equals_the_rule_written_plainly(problem, solver):
    placement = solver.solve(problem, problem.static())
    require_valid(problem, placement)
    require_no_worse_than_static(problem, placement)
    assert served(placement) == rows_by_hand(problem, lambda *row: by_hand(*row, solver))


@given(problem=problems(), solver=solvers)
def test_start_does_not_matter(problem, solver):
    require_start_ignored(solver, problem)


@given(problem=problems(distinct=True), solver=solvers, seed=st.integers(0, 9))
def test_names_do_not_matter(problem, solver, seed):
    require_relabelling(solver, problem, seed)


def test_published_rule_leaves_mild_rows_alone_and_fills_to_alpha():
    mild = make_problem([[[1200, 800]]], [0, 0], 1)
    assert LeastLoaded(min_pairs=0).solve(mild, mild.static()).load_NG().tolist() == [[1200, 800]]
    skewed = make_problem([[[4000, 0]]], [0, 0], 1)
    assert LeastLoaded().solve(skewed, skewed.static()).load_NG().tolist() == [[2200, 1800]]
    assert LeastLoaded(min_pairs=1801).solve(skewed, skewed.static()).load_NG().tolist() == [[4000, 0]]


def test_the_published_strategy_is_off_below_its_threshold_and_its_chunk():
    llep = STRATEGIES["llep"]
    assert llep.rank == (LeastLoaded(alpha=1.1, min_pairs=1024, threshold=1.3),)
    for load_E, expected in (([12_900, 7100], [12_900, 7100]), ([13_100, 6900], [11_000, 9000]), ([1400, 600], [1400, 600])):
        problem = make_problem([[load_E]], [0, 0], 1)
        assert llep.plan(problem)[0].load_NG.tolist() == [expected]


@pytest.mark.parametrize(
    "options",
    [{"alpha": 0.9}, {"alpha": float("nan")}, {"alpha": float("inf")}, {"min_pairs": -1}, {"threshold": -1}],
    ids=repr,
)
def test_bad_options_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        LeastLoaded(**options)
