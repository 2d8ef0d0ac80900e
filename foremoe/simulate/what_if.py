"""What if: closed forms of two ideas that nothing here executes, for comparison in `foremoe simulate`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError

# Letters: N rows, G ranks.


def low_precision_speeds(load_NG: Array, speedup: float) -> Array:
    """Returns each rank's GEMM speed if overloaded ranks compute in lower precision; this **changes numerics**.

    ReaLB (arXiv 2604.19503) does so in inference. Here a rank whose load is above its row's mean computes all its pairs of this
    row `speedup` times as fast, forward and backward; others compute as ever. Time per pair and slot besides GEMMs stays, and so
    do exchanges. Left out: what conversion of weights costs, and what lower precision does to training.

    Args:
        load_NG: Pairs per rank.
        speedup: At least 1.

    Returns:
        float64 [N, G]: `speedup` or 1.

    Raises:
        InputError: A speed-up below 1.
    """
    if not 1.0 <= speedup < np.inf:
        raise InputError(f"low precision must make ranks faster, by a factor of at least 1; got {speedup}.")
    return np.where(load_NG > load_NG.mean(axis=1, keepdims=True), speedup, 1.0)


def round_seconds(jobs: int, outside_s: float, plan_s: float, stage_s: float) -> float:
    """Returns the seconds in which each of `jobs` equal jobs makes one step if they take turns on the same GPUs.

    RollMux (arXiv 2512.11306) interleaves phases of several jobs. A job's step is `outside_s` on the GPUs of rollout, then
    `plan_s` on its CPUs, then `stage_s` on the GPUs of training; either set of GPUs serves one job at a time, in turn. A round
    is as long as one job's step without waits, or as the turns of all jobs on the busier GPUs.
    """
    return max(outside_s + plan_s + stage_s, jobs * outside_s, jobs * stage_s)


def multiplexed(row: Mapping[str, Any], jobs: int, outside_s: float) -> dict[str, float]:
    """Returns what `jobs` equal jobs gain by taking turns, and the cost of planning and of filling host stores.

    Alone, both are exposed between rollout and stage. In turns, planning hides while a job waits for GPUs, but filling keeps
    GPUs of training from all other jobs: where these are the busier ones, a round pays for every job's. Left out: loading the
    next job's state, memory for it, and jobs that differ.

    Args:
        row: Of `simulate_systems`, with ``plan_exposed_s``.
        jobs: At least 1.
        outside_s: Seconds of a step outside the stages, on other GPUs; where rollout runs on the GPUs of training, turns gain
            nothing.

    Returns:
        ``alone_s`` (a step of one job), ``round_s``, ``gain`` (steps of all jobs per second over those of one alone),
        ``planning_s`` and ``filling_s`` (what a round takes longer for them), and ``busy`` (share of a round that the GPUs of
        training work or fill).

    Raises:
        InputError: No job.
    """
    if jobs < 1:
        raise InputError(f"multiplexing needs at least 1 job; got {jobs}.")
    stage_s, plan_s, fill_s = row["simulated_stage_s"], row["plan_exposed_s"], row["fill_s"]
    round_s, alone_s = round_seconds(jobs, outside_s, plan_s, stage_s), outside_s + plan_s + stage_s
    return {
        "alone_s": alone_s, "round_s": round_s, "gain": jobs * alone_s / round_s,
        "planning_s": round_s - round_seconds(jobs, outside_s, 0.0, stage_s),
        "filling_s": round_s - round_seconds(jobs, outside_s, plan_s, stage_s - fill_s), "busy": jobs * stage_s / round_s,
    }  # fmt: skip
