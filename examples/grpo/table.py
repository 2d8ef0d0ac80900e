"""The demo's result as text."""

from __future__ import annotations

from typing import Any

from examples.grpo.arms import ARMS, SHOWN
from examples.grpo.results import readable
from foremoe.cli.tables import Column, Table, number, percent, plural, seconds

_WHAT = {"s": "wall", "cpu_s": "MoE CPU"}
TOO_NOISY = "too noisy"
_COLUMNS = {
    "stage": Column("stage", left=True, rank=0),
    "measured": Column("seconds", left=True, rank=0),
    **{arm: Column(SHOWN[arm], rank=1) for arm in ARMS},
    "of_balanced": Column("of balanced", rank=2),
}


def report(figures: dict[str, Any]) -> list[str | Table]:
    """The table and what stands below it; a share that noise hides is not shown, and why is said."""
    rows: list[dict[str, Any]] = []
    noisy = []
    for stage, of_stage in figures["stages"].items():
        for name, what in _WHAT.items():
            cells = {arm: _with_spread(of_stage, f"{arm}_{name}") for arm in ARMS}
            share = TOO_NOISY
            if readable(of_stage, name):
                share = percent(of_stage[f"balanced_{name}"] / of_stage[f"foremoe_{name}"])
            else:
                noisy.append(f"{stage}, {what}: {_why_noisy(of_stage, name)}")
            rows.append({"stage": stage, "measured": what, **cells, "of_balanced": share})
    lines: list[str | Table] = [
        f"{figures['steps']} GRPO steps on {plural(figures['ranks'], 'rank')}, {plural(figures['redundant'], 'redundant slot')}"
        f" per rank; {figures['hardware']['processor']}, {plural(figures['hardware']['cores'], 'core')}",
        "Same recorded rollouts and parameters in every arm; medians over steps, ± half the distance of the quartiles.",
        "",
        Table(_COLUMNS, rows),
        "",
        "MoE CPU: CPU seconds of expert compute, summed over the slowest rank of every micro-step, layer and direction.",
        "of balanced: share of the throughput with even routing; force-balanced replaces the recorded experts by equal loads: a"
        " limit, not training.",
    ]
    if noisy:
        lines += [
            "This run is too noisy to be read where it says so; end other programs, or give more --steps.",
            *(f"  {line}" for line in noisy),
        ]
    lines.append("")
    for stage, of_stage in figures["stages"].items():
        moved = (
            ", ".join(f"{name} {num_bytes / 1e6:.1f} MB" for name, num_bytes in of_stage["bytes_per_step"].items()) or "nothing"
        )
        lines.append(
            f"{stage}: skew {of_stage['skew_before']:.2f} -> {of_stage['skew_after']:.2f}; moved per step: {moved};"
            f" exposed transfer {seconds(of_stage['exposed_s'])}; drift {plural(of_stage['drift'], 'pair')}"
        )
    lines += [
        f"planning: {seconds(figures['plan_s'])} per step, {figures['plan_hidden_fraction']:.0%} of it hidden behind rewards",
        f"losses with and without foremoe differ by at most {figures['max_rel_diff_loss']:.1e} (relative)",
        "reward: " + " ".join(map(number(2), figures["reward"])),
        "",
        _in_short(figures["stages"]["update"], figures["max_rel_diff_loss"]),
    ]
    return lines


def _in_short(update: dict[str, Any], loss_differs: float) -> str:
    """The run in one sentence."""
    gains = []
    for name, what in (("s", "wall clock"), ("cpu_s", "expert compute")):
        static_s, foremoe_s = update[f"static_{name}"], update[f"foremoe_{name}"]
        gain = f"{seconds(static_s)} -> {seconds(foremoe_s)} ({static_s / foremoe_s:.2f}x)"
        gains.append(f"{what} {gain if readable(update, name) else f'was {TOO_NOISY} to be compared'}")
    skew = f"skew {update['skew_before']:.2f} -> {update['skew_after']:.2f}"
    return f"In short, the update with foremoe: {', '.join(gains)}; {skew}; losses the same to {loss_differs:.0e}."


def _why_noisy(figures: dict[str, Any], name: str) -> str:
    gain = figures[f"static_{name}"] - figures[f"balanced_{name}"]
    if figures[f"noise_{name}"] is None:
        return "fewer than three steps"
    gains = f"even routing gains {seconds(gain)}" if gain > 0 else "even routing gains nothing"
    return f"{gains}, measured to ± {seconds(figures[f'noise_{name}'])}"


def _with_spread(figures: dict[str, Any], name: str) -> str:
    low, high = figures[f"{name}_quartiles"]
    return f"{figures[name]:.3f} ± {(high - low) / 2:.3f}"
