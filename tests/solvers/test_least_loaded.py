"""LeastLoaded: spill to the least loaded rank."""

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
from foremoe.solvers.published.least_loaded import LeastLoaded

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
    capacity = max(int(solver.alpha * (sum(now) // len(now))), 1)
    if max(now) >= solver.threshold * mean:
        for home, e in sorted(pairs, key=lambda place: (-load_of[place[1]], place[1])):
            spill = min(load_of[e], now[home] - capacity)
            while spill > 0:
                takers = [r for r in ranks if r != home and (free[r] or (r, e) in pairs) and node_G[r] == node_G[home]]
                taker = min(takers, key=lambda r: now[r], default=home)
                if now[taker] >= capacity:
                    break
                amount = min(spill, capacity - now[taker])
                amount = amount if amount >= solver.min_pairs else spill
                free[taker] -= (taker, e) not in pairs
                pairs[taker, e] = pairs.get((taker, e), 0) + amount
                pairs[home, e] -= amount
                now[home] -= amount
                now[taker] += amount
                spill -= amount
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


def published(load_E, num_ranks):
    """The placement of one row by the published planner, with slots to spare."""
    problem = make_problem([[load_E]], [0] * num_ranks, num_ranks)
    return STRATEGIES["llep"].rank[0].solve(problem, problem.static())


def test_the_published_planner_on_cases_by_hand():
    """Worked from its code: capacity 1.1 x mean, chunks of 1024, off below a skew of 1.3."""
    assert STRATEGIES["llep"].rank == (LeastLoaded(alpha=1.1, min_pairs=1024, threshold=1.3),)
    for load_E, expected in (
        ([12_900, 7100], [12_900, 7100]),  # skew 1.29: off
        ([13_100, 6900], [11_000, 9000]),
        ([1400, 600], [1100, 900]),  # the last chunk may be below the least
        # Capacity 5500: 6400 leave rank 0 and rank 1 takes 5000. 900 would be less than a chunk, so rank 2 takes all 1400 that
        # are left; its own expert comes later, finds 4100 of room and spills 500.
        ([11_900, 500, *[4600] * 6], [5500, 5500, 5500, 5100, *[4600] * 4]),
    ):
        assert published(load_E, len(load_E)).load_NG().tolist() == [expected]
    # Without its hottest expert rank 0 is full, so all of that expert leaves; the next one keeps what fits.
    found = published([7000, 6000, 6000, 1000, 0, 0], 2)
    assert found.load_NG().tolist() == [[11_000, 9000]]
    assert served(found)[0] == {(0, 1): 5000, (0, 2): 6000, (1, 3): 1000, (1, 0): 7000, (1, 1): 1000}


@pytest.mark.parametrize(
    "options",
    [{"alpha": 0.9}, {"alpha": float("nan")}, {"alpha": float("inf")}, {"min_pairs": -1}, {"threshold": -1}],
    ids=repr,
)
def test_bad_options_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        LeastLoaded(**options)
