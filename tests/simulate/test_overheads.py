"""Overheads of the presets follow from the program that fits them; a change of prices has to fit them again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foremoe.machine.cluster import Cluster

sys.path.insert(0, str(Path(__file__).parents[2]))  # programs of bench are not installed
from bench import overheads


def test_the_presets_carry_what_the_fit_gives() -> None:
    preset = Cluster.preset(overheads.GPU)
    for name, seconds in overheads.fitted().items():
        assert getattr(preset, name) == pytest.approx(seconds, rel=0.05), f"{name}: run python -m bench.overheads"


def test_the_fit_holds_on_runs_that_it_has_not_seen() -> None:
    preset = Cluster.preset(overheads.GPU)
    constants = {name: getattr(preset, name) for name in ("layer_overhead_s", "pair_overhead_s")}
    for run in overheads.CHECKED[:2]:  # by node; the third overlaps its exchange, the fourth is another stack
        simulated_s = overheads.step_seconds(run, overheads.cluster_of(run, **constants))[0]
        assert simulated_s == pytest.approx(overheads.published_seconds(run), rel=0.05), run


def test_published_seconds_and_micro_steps_by_hand() -> None:
    qwen = overheads.CHECKED[1]
    assert qwen.micro_steps == 512  # 8192 sequences over 256 / (2 * 8) data-parallel ranks
    assert overheads.published_seconds(qwen) == pytest.approx(4096 / (16 * 1712))
    problem = overheads.posed(qwen, overheads.cluster_of(qwen))
    assert problem.tokens_MG is not None and problem.tokens_MG.tolist() == [[2048] * 32]
    assert problem.static().load_NG().tolist() == [[2048 * 8] * 32] * 12
