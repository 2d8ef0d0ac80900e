"""Settings that have no effect say so, once per process; ranks whose splits do not fit together are not packed."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import types
import warnings

import numpy as np
import pytest

from foremoe.base.errors import InputError
from foremoe.integrations.verl.engine import engine_class
from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import Settings


@pytest.fixture(autouse=True)
def caught():
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    warn_once.cache_clear()


def engine(settings, replay):
    """foremoe's over one that stands in for veRL's."""

    class Plain:
        def initialize(self):
            self.engine_config, self.enable_routing_replay = types.SimpleNamespace(foremoe=settings), replay

    made = engine_class(types.SimpleNamespace(MegatronEngineWithLMHead=Plain))()
    made.attached = []
    made.attach_foremoe = made.attached.append
    return made


@pytest.mark.parametrize(
    ("settings", "replay", "num_warnings"), [(Settings(), False, 1), (Settings(), True, 0), (None, False, 0), (None, True, 0)]
)
def test_settings_without_router_replay(caught, settings, replay, num_warnings):
    for _ in range(2):
        made = engine(settings, replay)
        made.initialize()
        assert made.attached == ([settings] if settings and replay else [])
    said = [str(w.message) for w in caught if "router replay is disabled" in str(w.message)]
    assert len(said) == num_warnings


def test_packing_of_micro_batches_of_fixed_size(caught):
    from foremoe.integrations.verl.packing import Packer

    batches = [object()]
    for _ in range(2):
        packer = Packer.__new__(Packer)
        assert packer.repack_batches(None, batches, None, pytest.fail) == (batches, None)
    assert len([w for w in caught if "use_dynamic_bsz" in str(w.message)]) == 1


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
