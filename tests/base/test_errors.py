"""Errors cross from one process to another, as a pool's or Ray's do, and stay what they were."""

import pickle

import pytest

from foremoe.base.errors import InputError, PlanError, StaleWeights, TransferError


@pytest.mark.parametrize(
    "error",
    [
        InputError("redundant must be at least 0; got -1."), PlanError("quota", "layer 3", "a slot without an expert has pairs."),
        PlanError("header", "", "no schedule."), TransferError("rank 1 did not answer.", (1,)),
        StaleWeights("weights changed.", (0,)),
    ],
)  # fmt: skip
def test_errors_pickle(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
