"""Bounds against brute force on tiny cases, and their kernels against plain versions."""

import dataclasses
import itertools

import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st

from foremoe.bounds import _capped_fill, _top_sum, offset_fill_bound
from foremoe.problem import Problem
from foremoe.testing.pasteable import describe
from foremoe.testing.strategies import problems

# Letters: G ranks, E experts.

TINY = {"max_ranks": 3, "max_base": 2, "max_redundant": 2, "max_micro_steps": 1, "max_layers": 1, "max_pairs": 9}


def best_load(problem: Problem, n: int) -> int:
    """The smallest possible largest rank load of one row: every choice of replicas, and for each the split's closed form.

    A split with maximum T exists iff no set of ranks must serve more than T each: the experts that live only inside it.
    """
    G, node_G = problem.G, problem.cluster.node_of_rank_G
    home_E = problem.home_LE[n % problem.L] // problem.B
    choices_G = []
    for g in range(G):
        allowed = [
            e for e in range(problem.E) if home_E[e] != g and (problem.replicas == "any" or node_G[home_E[e]] == node_G[g])
        ]
        # More replicas never hurt, so every slot that can be filled is.
        choices_G.append(list(itertools.combinations(allowed, min(problem.R, len(allowed)))))
    sets = [s for size in range(1, G + 1) for s in itertools.combinations(range(G), size)]
    best = None
    for replicas_G in itertools.product(*choices_G):
        ranks_E = [{int(home_E[e])} | {g for g in range(G) if e in replicas_G[g]} for e in range(problem.E)]
        worst = 0
        for members in sets:
            confined = sum(int(problem.load_NE[n, e]) for e in range(problem.E) if ranks_E[e] <= set(members))
            worst = max(worst, -(-confined // len(members)))
        best = worst if best is None else min(best, worst)
    assert best is not None
    return best


@given(st.data())
def test_the_load_bound_is_below_the_best_of_all_placements(data: st.DataObject) -> None:
    problem = data.draw(problems(**TINY))
    note(describe(problem))
    bound_N = problem.cost.load_bound_N(problem)
    for n in range(problem.N):
        assert bound_N[n] <= best_load(problem, n)
        assert bound_N[n] >= -(-problem.load_NE[n].sum() // problem.G)


def test_the_load_bound_is_often_tight() -> None:
    rng = np.random.default_rng(0)
    from foremoe.testing.samples import many_row_problem

    problem = many_row_problem(32)
    load_MLE = (30 * rng.random(problem.load_MLE.shape) ** 3).astype(np.int32)
    problem = dataclasses.replace(problem, load_MLE=load_MLE)[:2]
    met = [problem.cost.load_bound_N(problem)[n] == best_load(problem, n) for n in range(problem.N)]
    assert sum(met) > len(met) / 2


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_top_sum_is_the_sum_of_the_largest(values: list[int], data: st.DataObject) -> None:
    excluded = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    num = data.draw(st.integers(0, 9))
    left = sorted((v for v, out in zip(values, excluded, strict=True) if not out), reverse=True)
    assert _top_sum(np.array(values), np.array(excluded), num) == sum(left[:num])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.data())
def test_capped_fill_is_the_first_level_that_holds_all(caps: list[int], data: st.DataObject) -> None:
    member = data.draw(st.lists(st.booleans(), min_size=len(caps), max_size=len(caps)))
    inside = [cap for cap, m in zip(caps, member, strict=True) if m]
    total = data.draw(st.integers(0, sum(inside)))
    level = next(t for t in range(total + 1) if sum(min(t, cap) for cap in inside) >= total)
    assert _capped_fill(total, np.array(caps), np.array(member)) == level


@given(
    st.floats(0, 1e6),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from([1e-9, 1e-6]),
    st.sampled_from([0.0, 1e-6, 1e-3]),
)
def test_offset_fill_pours_all_pairs_over_the_floors(pairs: float, active: list[int], pair_s: float, slot_s: float) -> None:
    level = float(offset_fill_bound(np.array([pairs]), np.array([active]), pair_s, slot_s)[0])
    floors = slot_s * np.array(active)
    assert level >= floors.max()
    poured = np.maximum(level - floors, 0.0).sum()
    # Everything fits at this level, and not below it unless a floor holds the level up.
    np.testing.assert_array_less(pair_s * pairs, poured * (1 + 1e-9) + 1e-15)
    if level > floors.max() * (1 + 1e-9):
        np.testing.assert_allclose(poured, pair_s * pairs, rtol=1e-9)
