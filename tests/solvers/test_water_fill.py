"""WaterFill: integer water-filling, expert by expert."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import placed_rows, require_split, row_problem

from foremoe.base.errors import InputError
from foremoe.solvers.split.even import Even
from foremoe.solvers.split.exact import ExactSplit
from foremoe.solvers.split.water_fill import WaterFill


def poured(load_E, expert_GS, rounds):
    """The obvious way: pair by pair to the least loaded rank that holds the expert."""
    quota_GS = Even().solve(row_problem(load_E, expert_GS), expert_GS[None])[0].astype(np.int64)
    for _ in range(rounds):
        for e in range(len(load_E)):
            slots = np.argwhere(expert_GS == e)
            for g, s in slots:
                quota_GS[g, s] = 0
            for _ in range(load_E[e]):
                g, s = min(slots, key=lambda slot: quota_GS[slot[0]].sum())
                quota_GS[g, s] += 1
    return quota_GS


@given(row=placed_rows(max_ranks=4, top=12), rounds=st.integers(1, 4))
def test_equals_pouring_pair_by_pair(row, rounds):
    load_E, expert_GS = row
    quota_GS = WaterFill(rounds=rounds).solve(row_problem(load_E, expert_GS), expert_GS[None])[0]
    require_split(load_E, expert_GS, quota_GS)
    assert (quota_GS == poured(load_E, expert_GS, rounds)).all()


@given(row=placed_rows())
def test_lies_between_the_even_and_the_exact_split(row):
    load_E, expert_GS = row
    problem = row_problem(load_E, expert_GS)
    quota = {s: s.solve(problem, expert_GS[None])[0].astype(np.int64) for s in (Even(), WaterFill(), ExactSplit())}
    require_split(load_E, expert_GS, quota[WaterFill()])
    square = {s: float((q.sum(axis=1).astype(np.float64) ** 2).sum()) for s, q in quota.items()}
    assert square[WaterFill()] <= square[Even()] * (1 + 1e-12)
    assert quota[WaterFill()].sum(axis=1).max() >= quota[ExactSplit()].sum(axis=1).max()


def test_many_rounds_reach_the_exact_split():
    rng = np.random.default_rng(1)
    for _ in range(20):
        load_E = rng.integers(0, 1000, 12).astype(np.int32)
        expert_GS = np.concatenate([np.arange(12).reshape(6, 2), np.roll(np.arange(12), 2)[1::2, None]], axis=1).astype(np.int16)
        problem = row_problem(load_E, expert_GS)
        fill_G = WaterFill(rounds=1000).solve(problem, expert_GS[None])[0].sum(axis=1)
        # Single pairs cannot be levelled along a chain, so a few may be left.
        assert fill_G.max() <= ExactSplit().solve(problem, expert_GS[None])[0].sum(axis=1).max() + 6


@pytest.mark.parametrize("rounds", [0, -1, 1.5, None])
def test_bad_rounds_are_refused(rounds):
    with pytest.raises(InputError, match="rounds"):
        WaterFill(rounds=rounds)
