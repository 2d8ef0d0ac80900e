"""Figures of a demo run: medians over steps, by stage and arm."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import foremoe
from examples.grpo.arms import ARMS, StageRun
from examples.grpo.step import StepRecord
from foremoe.base.hardware import hardware
from foremoe.workload.workload import STAGES

# Letters: M micro-steps, L layers, G ranks; 2: forward, backward.

_TINY = float(np.finfo(np.float32).tiny)
Records = Sequence[Sequence[StepRecord]]  # by step, by rank


def summary(records: Records, last_reward: float, *, redundant: int) -> dict[str, Any]:
    """All figures of a run, as plain values.

    Args:
        records: Records of every step and rank.
        last_reward: Reward of the rollout after the last step.
        redundant: Redundant slots per rank.
    """
    first = [by_rank[0] for by_rank in records]
    median = lambda values: float(np.median(list(values)))  # noqa: E731
    skew = np.array([[record.skew[stage] for stage in STAGES] for record in first])
    return {
        "stages": {stage: _stage(records, stage) for stage in STAGES},
        "redundant": redundant,
        "skew_before": float(skew[..., 0].mean()),
        "skew_after": float(skew[..., 1].mean()),
        "plan_s": median(record.plan_s for record in first),
        "plan_hidden_fraction": median(record.plan_hidden_fraction for record in first),
        "rollout_s": median(record.rollout_s for record in first),
        "reward": [*(record.reward for record in first), last_reward],
        "max_rel_diff_loss": max(_loss_difference(by_rank, stage) for by_rank in records for stage in STAGES),
        "max_rel_diff_grad_norm": max(map(_norm_difference, records)),
        "replicas_per_step": float(np.mean([record.num_replicas for record in first])),
        "steps": len(records),
        "ranks": len(records[0]),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "foremoe": foremoe.__version__},
    }


def _stage(records: Records, stage: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    measures: dict[str, Callable[[list[StageRun]], float]] = {
        "s": lambda runs: max(run.wall_s for run in runs),
        "cpu_s": slowest_cpu_s,
        "rank_cpu_s": largest_cpu_s,
    }
    for name, measure in measures.items():
        values_of = {arm: [measure([record.runs[stage, arm] for record in by_rank]) for by_rank in records] for arm in ARMS}
        for arm, values in values_of.items():
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
            out[f"{arm}_{name}"] = float(middle)
            out[f"{arm}_{name}_quartiles"] = [float(low), float(high)]
        out[f"noise_{name}"] = noise(values_of)
        out[f"recovery_{name}"] = recovery(out[f"static_{name}"], out[f"foremoe_{name}"], out[f"balanced_{name}"])
    skew = np.array([by_rank[0].skew[stage] for by_rank in records])
    timelines = [[record.runs[stage, "foremoe"].report["timeline"] for record in by_rank] for by_rank in records]
    reports = [[record.runs[stage, "foremoe"].report for record in by_rank] for by_rank in records]
    names = sorted({name for by_rank in timelines for t in by_rank for name in t["bytes_by_backend"]})
    return out | {
        "skew_before": float(skew[:, 0].mean()),
        "skew_after": float(skew[:, 1].mean()),
        "bytes_per_step": {
            name: float(np.mean([sum(t["bytes_by_backend"].get(name, 0) for t in by_rank) for by_rank in timelines]))
            for name in names
        },
        "exposed_s": float(np.median([max(t["exposed_s"] for t in by_rank) for by_rank in timelines])),
        "drift": sum(report["drift"] for by_rank in reports for report in by_rank),
        "fell_back": sum(report["fell_back"] for by_rank in reports for report in by_rank),
    }


def slowest_cpu_s(runs: Sequence[StageRun]) -> float:
    """CPU seconds of expert compute that a stage waits for: in every row and direction its slowest rank, summed."""
    return float(np.stack([run.cpu_s_ML2 for run in runs]).max(axis=0).sum())


def largest_cpu_s(runs: Sequence[StageRun]) -> float:
    """CPU seconds of expert compute in a stage, of the rank with most."""
    return max(float(run.cpu_s_ML2.sum()) for run in runs)


def recovery(static: float, foremoe: float, balanced: float) -> float | None:
    """(static - foremoe) / (static - balanced); None where even loads gain less than a fiftieth, which measuring cannot tell."""
    gain = static - balanced
    return (static - foremoe) / gain if gain > 0.02 * static else None


def noise(values_of: Mapping[str, Sequence[float]]) -> float | None:
    """Standard error of the median gain of an arm over static; None for fewer steps than three, which say nothing of it.

    Steps differ in size, so gains are taken step by step. The larger of both arms' errors, from the quartiles: a normal
    distribution has its quartiles 1.35 standard deviations apart, and the median's error is 1.25 of the mean's.
    """
    num_steps = len(values_of["static"])
    if num_steps < 3:
        return None
    gains = [np.subtract(values_of["static"], values_of[arm]) for arm in values_of if arm != "static"]
    spread = max(float(np.subtract(*np.quantile(gain, (0.75, 0.25)))) for gain in gains)
    return 1.25 * spread / 1.35 / num_steps**0.5


def readable(figures: Mapping[str, Any], name: str) -> bool:
    """True if a measure's noise is at most a quarter of what even routing gains, so that arms can be told apart."""
    gain, noise_s = figures[f"static_{name}"] - figures[f"balanced_{name}"], figures[f"noise_{name}"]
    return noise_s is not None and figures[f"recovery_{name}"] is not None and noise_s <= gain / 4


def _loss_difference(by_rank: Sequence[StepRecord], stage: str) -> float:
    """Largest difference between the losses of a micro-step with foremoe and without, over all ranks' tokens.

    It is relative to the sum of absolute values: a policy-gradient loss itself is close to zero.
    """
    runs = {arm: [record.runs[stage, arm] for record in by_rank] for arm in ("static", "foremoe")}
    loss_M = {arm: np.sum([run.loss_M for run in of_arm], axis=0) for arm, of_arm in runs.items()}
    scale_M = np.sum([run.scale_M for run in runs["static"]], axis=0)
    return float((np.abs(loss_M["foremoe"] - loss_M["static"]) / np.maximum(scale_M, _TINY)).max())


def _norm_difference(by_rank: Sequence[StepRecord]) -> float:
    """Relative difference of the norm of all experts' gradients with foremoe and without."""
    norm = {
        arm: float(np.sqrt(sum(record.runs["update", arm].grad_square for record in by_rank))) for arm in ("static", "foremoe")
    }
    return abs(norm["foremoe"] - norm["static"]) / max(norm["static"], _TINY)
