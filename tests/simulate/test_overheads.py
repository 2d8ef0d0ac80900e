"""Constants of the presets follow from the program that fits them; a change of prices has to fit them again."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from foremoe.machine.cluster import Cluster

sys.path.insert(0, str(Path(__file__).parents[2]))  # programs of bench are not installed
from bench import overheads, published_runs

# What the presets carry, by constant.
HELD = {
    "compute_efficiency": 0.70, "exchange_bytes_per_s over NVLink": 0.69, "plain_bytes_per_s over NVLink": 0.73,
    "return_bytes_per_s over NVLink": 0.19, "element_overhead_s, bf16": 9.1e-11, "element_overhead_s, FP8 of Blackwell": 7.1e-11,
    "element_overhead_s, FP8 of Hopper": 2.4e-10, "launch_s": published_runs.LAUNCH_S,
}  # fmt: skip


@pytest.mark.parametrize("constant", overheads.CONSTANTS, ids=lambda c: c.name)
def test_the_presets_carry_what_fits_best(constant: overheads.Constant) -> None:
    rows = [row for row in overheads.fit_rows() if constant.rows(row)]
    assert len(rows) >= 2

    def loss(value: float | None) -> float:
        return float((np.log1p(overheads.errors(constant, rows, value)) ** 2).sum())

    held = HELD[constant.name]
    assert loss(None) == pytest.approx(loss(held), rel=0.02, abs=1e-4), "the preset holds another value"
    assert min(loss(0.93 * held), loss(1.07 * held)) > loss(held), "run python -m bench.overheads"


def test_every_preset_of_nvlink_has_the_shares() -> None:
    for gpu, preset in published_runs.PRESETS.items():
        cluster, nvlink = Cluster.preset(preset), {**overheads.NVLINK, "H200": 450e9, "B300": 900e9, "GB300": 900e9}[gpu]
        for field, share in (("exchange_bytes_per_s", 0.69), ("plain_bytes_per_s", 0.73), ("return_bytes_per_s", 0.19)):
            assert getattr(cluster, field) == pytest.approx(share * nvlink, rel=0.02)


def test_every_fit_row_is_of_one_constant_at_most() -> None:
    times = Counter(row.id for row in overheads.fit_rows() for constant in overheads.CONSTANTS if constant.rows(row))
    assert max(times.values()) == 1
