"""Settings that have no effect say so, once per process; ranks whose splits do not fit together are not packed."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import types

import numpy as np
import pytest
import torch
from logged import logged

from foremoe.base.errors import InputError
from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import Settings


@pytest.fixture(autouse=True)
def caught():
    warn_once.cache_clear()
    with logged() as caught:
        yield caught
    warn_once.cache_clear()


@pytest.mark.parametrize(
    ("known", "replay", "num_ranks", "dynamic", "said"),
    [
        (False, False, 2, False, "rollout.enable_rollout_routing_replay=True"),
        (False, True, 2, False, ""),
        (True, False, 2, False, ""),
        (True, False, 1, False, "expert_model_parallel_size above 1"),
        (True, False, 2, True, "dynamic_context_parallel=False"),
    ],
)
def test_a_pass_that_cannot_be_planned(caught, known, replay, num_ranks, dynamic, said):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from foremoe.integrations.verl.session import Session

    made = Session.__new__(Session)
    made.settings, made.replay, made.attached = (
        Settings(),
        replay,
        types.SimpleNamespace(group=types.SimpleNamespace(size=num_ranks)),
    )
    made.engine = types.SimpleNamespace(engine_config=types.SimpleNamespace(dynamic_context_parallel=dynamic))
    data = TensorDict({"routed_experts": torch.zeros(1, 1)} if known else {}, batch_size=[])
    tu.assign_non_tensor_data(data, "enable_routing_replay", replay)
    for _ in range(2):
        assert made.should_plan(data, forward_only=False) == (known and not said)
    told = [record.getMessage() for record in caught]
    assert len(told) == bool(said) and all(f"; set {said}" in text for text in told)


def test_packing_of_micro_batches_of_fixed_size(caught):
    from foremoe.integrations.verl.packing import Packer

    batches = [object()]
    for _ in range(2):
        packer = Packer.__new__(Packer)
        assert packer.repack_batches(None, batches, None) == (batches, None)
    assert len([record for record in caught if "use_dynamic_bsz" in record.getMessage()]) == 1


def answer(**changed):
    """What a rank of four single samples in two micro-batches tells the others; ranks of an EP group of two."""
    part = {
        "ep": 0, "together": 1, "limit": 100, "M": 2, "G": 2, "len_Q": np.full(4, 10), "attention_Q": np.full(4, 10),
        "micro_step_Q": np.array([0, 0, 1, 1]), "pairs_QC": np.array([[9, 0], [9, 0], [0, 9], [0, 9]], np.int32),
    }  # fmt: skip
    return "", part | changed


def test_ranks_are_packed_together_only_if_their_splits_fit():
    from foremoe.integrations.verl.packing import _split

    for rank in range(2):
        assert sorted(q for samples in _split([answer(), answer()], rank) for q in samples) == [0, 1, 2, 3]
    for changed in ({"M": 3, "micro_step_Q": np.array([0, 1, 1, 2])}, {"together": 2}, {"G": 1}):
        for rank in range(2):
            with pytest.raises(InputError, match="packing needs the same on all"):
                _split([answer(), answer(**changed)], rank)
        # Ranks of another EP group may differ.
        assert len(_split([answer(), answer(ep=2, **changed)], 0)) == 2
