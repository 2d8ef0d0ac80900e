"""ExactSplit: the least maximum rank load, proven by subsets of ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from solver_util import least_maximum, placed_rows, require_split, row_problem

from foremoe.solvers.split.exact import ExactSplit
from foremoe.solvers.split.kernels import split_row


@given(row=placed_rows())
def test_reaches_the_least_possible_maximum(row):
    load_E, expert_GS = row
    quota_GS = ExactSplit().solve(row_problem(load_E, expert_GS), expert_GS[None])[0]
    require_split(load_E, expert_GS, quota_GS)
    again_GS = np.full_like(quota_GS, 7)
    assert (
        split_row(load_E, expert_GS, again_GS) == least_maximum(load_E, expert_GS) == quota_GS.sum(axis=1, dtype=np.int64).max()
    )
    assert (again_GS == quota_GS).all()


@given(row=placed_rows(max_ranks=6), data=st.data())
def test_homes_may_be_anywhere_and_relabelling_keeps_the_maximum(row, data):
    """Slots of a rank in any order: no slot is special, so the maximum stays."""
    load_E, expert_GS = row
    G, S = expert_GS.shape
    mixed_GS = np.array([data.draw(st.permutations(row_S.tolist())) for row_S in expert_GS], np.int16).reshape(G, S)
    name_E = np.array(data.draw(st.permutations(range(len(load_E)))))
    renamed_E = np.empty_like(load_E)
    renamed_E[name_E] = load_E
    mixed_GS = np.where(mixed_GS < 0, -1, name_E[mixed_GS])[data.draw(st.permutations(range(G)))].astype(np.int16)
    quota_GS = np.zeros((G, S), np.int32)
    top = split_row(renamed_E, mixed_GS, quota_GS)
    require_split(renamed_E, mixed_GS, quota_GS)
    assert top == split_row(load_E, expert_GS, np.zeros((G, S), np.int32))


@given(row=placed_rows())
def test_python_and_compiled_kernel_agree(row):
    load_E, expert_GS = row
    compiled_GS, plain_GS = np.zeros((2, *expert_GS.shape), np.int32)
    with np.errstate(over="raise"):
        assert split_row(load_E, expert_GS, compiled_GS) == split_row.py_func(load_E, expert_GS, plain_GS)
    assert (compiled_GS == plain_GS).all()


def test_load_stays_home_where_that_costs_nothing():
    # Rank 2 holds more than anyone can take from it, so ranks 0 and 1 need not be levelled.
    expert_GS = np.array([[0, 1], [1, 0], [2, -1]], np.int16)
    quota_GS = np.zeros((3, 2), np.int32)
    assert split_row(np.array([60, 20, 90], np.int32), expert_GS, quota_GS) == 90
    assert quota_GS.tolist() == [[60, 0], [20, 0], [90, 0]]


def test_a_rank_passes_on_what_it_receives():
    # 0 -> 1 -> 2 -> 3: the excess of rank 0 reaches rank 3 only through the others.
    expert_GS = np.array([[0, -1], [1, 0], [2, 1], [3, 2]], np.int16)
    quota_GS = np.zeros((4, 2), np.int32)
    assert split_row(np.array([130, 110, 100, 60], np.int32), expert_GS, quota_GS) == 100
    assert quota_GS.tolist() == [[100, 0], [70, 30], [60, 40], [60, 40]]


def test_what_a_lower_target_pushed_away_comes_back():
    # Rank 0 is levelled to the mean of 70 before rank 2, which can give nothing away, raises the target to 90.
    expert_GS = np.array([[0, -1], [1, 0], [2, -1]], np.int16)
    quota_GS = np.zeros((3, 2), np.int32)
    assert split_row(np.array([100, 20, 90], np.int32), expert_GS, quota_GS) == 90
    assert quota_GS.tolist() == [[90, 0], [20, 10], [90, 0]]


def test_ranks_may_serve_more_pairs_than_int32_holds():
    """Two experts of 2^31 - 1 pairs on one rank beside one of three; a replica on another rank takes all of one of them."""
    most = 2**31 - 1
    load_E = np.array([0] * 12 + [3, most, most], np.int32)
    expert_GS = np.array(
        [[0, 1, 2, -1, -1], [3, 4, 5, 0, -1], [6, 7, 8, 0, -1], [9, 10, 11, 0, 13], [12, 13, 14, 0, -1]], np.int16
    )
    quota_GS = ExactSplit().solve(row_problem(load_E, expert_GS), expert_GS[None])[0].astype(np.int64)
    assert quota_GS.sum(axis=1).max() == most + 3
