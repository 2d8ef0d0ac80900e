"""The demo's result as text."""

from __future__ import annotations

from typing import Any

from examples.grpo.arms import ARMS
from foremoe.cli.tables import Column, number, percent, plural, render

_WHAT = {"s": "wall s", "cpu_s": "MoE CPU s"}


def report(figures: dict[str, Any]) -> str:
    """The table and what stands below it."""
    columns = [
        Column("stage", left=True),
        Column("measured", left=True),
        *(Column(arm) for arm in ARMS),
        Column("recovered", percent),
    ]
    rows = []
    for stage, of_stage in figures["stages"].items():
        for name, what in _WHAT.items():
            cells = [_with_spread(of_stage, f"{arm}_{name}") for arm in ARMS]
            rows.append([stage, what, *cells, of_stage[f"recovery_{name}"]])
    lines = [
        f"{figures['steps']} GRPO steps on {plural(figures['ranks'], 'rank')}, {plural(figures['redundant'], 'redundant slot')}"
        f" per rank; {figures['hardware']['processor']}, {plural(figures['hardware']['cores'], 'core')}",
        "Same recorded rollouts and parameters in every arm; medians over steps with quartiles.",
        "",
        render(columns, rows),
        "",
        "MoE CPU s: CPU seconds of expert compute, summed over the slowest rank of every micro-step, layer and direction.",
        "recovered: (static - foremoe) / (static - balanced); balanced replaces the recorded experts by equal loads: a limit, not"
        " training.",
        "",
    ]
    for stage, of_stage in figures["stages"].items():
        moved = (
            ", ".join(f"{name} {num_bytes / 1e6:.1f} MB" for name, num_bytes in of_stage["bytes_per_step"].items()) or "nothing"
        )
        lines.append(
            f"{stage}: skew {of_stage['skew_before']:.2f} -> {of_stage['skew_after']:.2f}; moved per step: {moved};"
            f" exposed transfer {of_stage['exposed_s'] * 1e3:.1f} ms; drift {plural(of_stage['drift'], 'pair')}"
        )
    lines += [
        f"planning: {figures['plan_s'] * 1e3:.1f} ms per step, {figures['plan_hidden_fraction']:.0%} of it hidden behind rewards",
        f"losses with and without foremoe differ by at most {figures['max_rel_diff_loss']:.1e} (relative)",
        "reward: " + " ".join(map(number(2), figures["reward"])),
    ]
    return "\n".join(lines)


def _with_spread(figures: dict[str, Any], name: str) -> str:
    low, high = figures[f"{name}_quartiles"]
    return f"{figures[name]:.3f} ({low:.3f}-{high:.3f})"
