"""Even: equal shares."""

import threading

import numpy as np
import pytest
from hypothesis import given
from solver_util import make_problem, placed_rows, require_split, row_problem

from foremoe.base.errors import InputError
from foremoe.base.parallel import row_runner
from foremoe.solvers.split.even import Even
from foremoe.solvers.split.exact import ExactSplit

SPLITS = [Even(), ExactSplit()]


@given(row=placed_rows())
def test_shares_differ_by_at_most_one_pair_and_low_slots_get_more(row):
    load_E, expert_GS = row
    quota_GS = Even().solve(row_problem(load_E, expert_GS), expert_GS[None])[0]
    require_split(load_E, expert_GS, quota_GS)
    for e in range(len(load_E)):
        shares = quota_GS[expert_GS == e].tolist()
        assert shares == sorted(shares, reverse=True) and shares[0] - shares[-1] <= 1


@pytest.mark.parametrize("split", SPLITS, ids=repr)
def test_experts_without_a_slot_are_refused_only_if_they_have_load(split):
    expert_NGS = np.array([[[0, -1], [1, -1]], [[-1, -1], [1, -1]]], np.int16)
    quota_NGS = split.solve(make_problem([[[5, 5]], [[0, 3]]], [0, 0], 1), expert_NGS)
    assert quota_NGS[1].tolist() == [[0, 0], [3, 0]]
    with pytest.raises(InputError, match="row 1 serve 3 of 4 pairs"):
        split.solve(make_problem([[[5, 5]], [[1, 3]]], [0, 0], 1), expert_NGS)


@pytest.mark.parametrize("split", SPLITS, ids=repr)
def test_cancelled_rows_are_served_at_home(split):
    cancel = threading.Event()
    cancel.set()
    expert_NGS = np.array([[[0, 1], [1, -1]]], np.int16)
    with row_runner(1, cancel=cancel):
        quota_NGS = split.solve(make_problem([[[2, 8]]], [0, 0], 1), expert_NGS)
    assert quota_NGS.tolist() == [[[2, 0], [8, 0]]]
