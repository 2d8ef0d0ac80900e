"""The demo's table: words of the README, and no share where noise hides it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples.grpo.results import noise, readable, recovery
from examples.grpo.table import report
from foremoe.cli.tables import Look, Table, render

NAMES = ("s", "cpu_s")


def stage(static: list[float], foremoe: list[float], balanced: list[float]) -> dict[str, Any]:
    values_of = {"static": static, "foremoe": foremoe, "balanced": balanced}
    out: dict[str, Any] = {
        "skew_before": 1.5, "skew_after": 1.0, "bytes_per_step": {"local": 2e6}, "exposed_s": 0.001, "drift": 0,
    }  # fmt: skip
    for name in NAMES:
        for arm, values in values_of.items():
            low, out[f"{arm}_{name}"], high = np.quantile(values, (0.25, 0.5, 0.75))
            out[f"{arm}_{name}_quartiles"] = [low, high]
        out[f"noise_{name}"] = noise(values_of)
        out[f"recovery_{name}"] = recovery(*(out[f"{arm}_{name}"] for arm in values_of))
    return out


def figures(of_stage: dict[str, Any]) -> dict[str, Any]:
    return {
        "stages": {"update": of_stage}, "steps": 12, "ranks": 2, "redundant": 1, "plan_s": 0.01, "plan_hidden_fraction": 1.0,
        "max_rel_diff_loss": 1e-7, "reward": [0.1, 0.2], "hardware": {"processor": "a processor", "cores": 2},
    }  # fmt: skip


def text_of(of_stage: dict[str, Any], width: int | None = None) -> str:
    parts = report(figures(of_stage))
    return "\n".join(
        "\n".join(line for line, _ in render(part, Look(), width)) if isinstance(part, Table) else part for part in parts
    )


def test_a_quiet_run_has_shares_in_the_readmes_words() -> None:
    quiet = stage([2.0, 2.01, 1.99, 2.0], [1.25, 1.26, 1.24, 1.25], [1.0, 1.01, 0.99, 1.0])
    assert all(readable(quiet, name) for name in NAMES)
    text = text_of(quiet)
    assert "80.00%" in text and "too noisy" not in text and "force-balanced" in text and "of balanced" in text
    assert "recovered" not in text
    assert "expert compute 2.00 s -> 1.25 s (1.60x); skew 1.50 -> 1.00" in text and text.endswith("losses the same to 1e-07.")


def test_a_noisy_run_says_so_instead_of_a_share() -> None:
    """What a busy machine measures: even routing gains less than steps differ by."""
    noisy = stage([2.0, 3.1, 1.4, 2.6], [2.9, 1.2, 3.5, 2.2], [1.9, 2.8, 1.7, 2.2])
    assert noisy["recovery_s"] is not None and not 0 <= noisy["recovery_s"] <= 1 and not readable(noisy, "s")
    text = text_of(noisy)
    assert "%" not in text.split("MoE CPU: CPU seconds")[0] and text.count("too noisy") == 5
    assert "wall clock was too noisy to be compared, expert compute was too noisy" in text
    assert "end other programs, or give more --steps" in text and "measured to ±" in text


def test_steps_of_different_size_are_not_noise() -> None:
    """Gains are taken step by step: a stage that doubles in size is as certain as one that does not."""
    size = np.array([1.0, 2.0, 1.5, 3.0, 2.5])
    values_of = {"static": list(2.0 * size), "foremoe": list(2.0 * size - 0.9), "balanced": list(2.0 * size - 1.0)}
    assert noise(values_of) == pytest.approx(0.0, abs=1e-12)


def test_two_steps_tell_nothing() -> None:
    two = stage([2.0, 2.0], [1.0, 1.0], [1.0, 1.0])
    assert two["noise_s"] is None and not readable(two, "s") and "fewer than three steps" in text_of(two)


def test_the_table_fits_80_columns() -> None:
    lines = render(
        next(part for part in report(figures(stage([2.0] * 3, [1.2] * 3, [1.0] * 3))) if isinstance(part, Table)), Look(), 80
    )
    assert all(len(line) <= 80 for line, _ in lines) and "of balanced" in lines[0][0]
