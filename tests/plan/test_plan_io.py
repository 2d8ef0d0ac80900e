"""Plan files: identity, determinism, and one clear sentence for every fault."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from safetensors.numpy import save

import foremoe
from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = foremoe.Model.preset("gpt-oss-20b")
    rng = np.random.default_rng(0)
    load_MLGE = rng.poisson(rng.lognormal(2.0, 1.0, (2, 24, 1, 32)), (2, 24, 4, 32)).astype(np.int32)
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=4, model=model.name)
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=4), redundant=1)
    return foremoe.Planner().plan(problem)[0]


def arrays_of(value):
    """Every array in a value and the values in it."""
    for held in (getattr(value, field.name) for field in dataclasses.fields(value)):
        if isinstance(held, np.ndarray):
            yield held
        elif dataclasses.is_dataclass(held):
            yield from arrays_of(held)


def test_no_array_of_a_plan_can_be_made_writable(plan, tmp_path):
    plan.save(tmp_path / "plan.safetensors")
    plan.check()
    for one in (plan, Plan.load(tmp_path / "plan.safetensors"), copy.deepcopy(plan)):
        arrays = list(arrays_of(one))
        assert len(arrays) > 25
        for array in (*arrays, one.quota_NGS, one.expert_MLGS[:1]):
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True


def test_every_cut_is_refused(plan, tmp_path):
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    payload = path.read_bytes()
    for keep in (0, 4, 8, 100, len(payload) // 2, len(payload) - 1):
        path.write_bytes(payload[:keep])
        with pytest.raises(InputError, match=r"plan\.safetensors"):
            Plan.load(path)


def test_every_flipped_byte_is_refused(plan, tmp_path):
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    payload = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(payload), 60):
        changed = bytearray(payload)
        changed[at] ^= 0x10
        path.write_bytes(bytes(changed))
        with pytest.raises(InputError):
            Plan.load(path)


def test_missing_and_foreign_files(plan, tmp_path):
    path = tmp_path / "plan.safetensors"
    path.write_bytes(save({"a": np.zeros(3)}))
    with pytest.raises(InputError, match="is not a plan"):
        Plan.load(path)
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(3))
    with pytest.raises(InputError, match=r"is not a plan .*it is a zip archive, as \.npz files are"):
        Plan.load(path)
    with pytest.raises(InputError, match="there is no file"):
        Plan.load(tmp_path / "absent.safetensors")
    with pytest.raises(InputError, match="is not a file"):
        Plan.load(tmp_path)
    with pytest.raises(InputError, match="cannot write"):
        plan.save(tmp_path / "no" / "such" / "folder.safetensors")
