"""Samples of a stage, which are small enough that many cases can be simulated quickly."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.trainer import Trainer
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase, Schedule
from foremoe.simulate.pipeline import message_s, run_passes
from foremoe.simulate.result import Simulation
from foremoe.simulate.step import head_seconds, optimizer_seconds, reduction_seconds

# Letters: M micro-steps, L layers.

MICRO_STEPS, LAYERS = 6, 12


def sample(problem: Problem, micro_steps: int = MICRO_STEPS, layers: int = LAYERS, *, skewed: Problem | None = None) -> Problem:
    """Returns a problem with at most `micro_steps` micro-steps and `layers` layers, spread evenly over the skews of `skewed`.

    A small problem is returned unchanged. `skewed` defaults to `problem`.
    """
    if micro_steps >= problem.M and layers >= problem.L:
        return problem
    # The time of a row depends mostly on the load of the busiest rank, so rows are sampled evenly over the range of this load.
    busiest_ML = (skewed or problem).static().load_NG().max(axis=1).reshape(problem.M, problem.L)
    steps_M, layer_L = _spread(busiest_ML.sum(axis=1), micro_steps), _spread(busiest_ML.sum(axis=0), layers)
    cut = problem.cut_arrays(M=steps_M, L=layer_L)
    schedule = Schedule.plain(problem.stage, len(steps_M), problem.schedule.reforward)
    return dataclasses.replace(problem, **cut, schedule=schedule, routed=None)


class Whole(NamedTuple):
    """Estimated time of a whole stage, as a part that is spent once and a part per micro-step, both in seconds."""

    once_s: float
    each_s: float

    def seconds(self, micro_steps: float) -> float:
        """Returns the estimated time in seconds of a stage with this number of micro-steps."""
        return self.once_s + micro_steps * self.each_s


def whole_stage(problem: Problem, part: Problem, run: Simulation, trainer: Trainer, ranks: Sequence[Problem] = ()) -> Whole:
    """Estimates the whole stage of a problem from the timeline of `part`, which is a `sample` of the problem.

    Exposed copies of the first micro-step and exposed gradient returns of the last micro-step count once. If the layers are split
    over pipeline `ranks`, every micro-step takes as long as on the slowest rank. Filling and draining the pipeline counts once.
    """
    begin_s, end_s = (float(run.end_U[run.micro_step_U == m].max()) for m in (0, part.M - 1))
    steady_s = (end_s - begin_s) / (part.M - 1) if part.M > 1 else end_s
    once_s = begin_s - steady_s + run.total_s - end_s
    head_s = float(head_seconds(problem).max(axis=1).mean())
    trains = problem.schedule.trains
    ranks = ranks or [problem]
    ends_s = max(reduction_seconds(rank, trainer) + optimizer_seconds(rank, trainer) for rank in ranks)
    use_U = run.end_U - run.start_U
    all_s = float(use_U.sum())
    forward_s = steady_s * float(use_U[run.phase_U == Phase.FORWARD].sum()) / all_s if all_s else 0.0
    passes_S2 = np.outer([rank.L / part.L for rank in ranks], (forward_s, steady_s - forward_s))
    passes_S2[-1] += head_s, head_s * problem.cluster.window_backward_ratio * trains
    each_s = float(passes_S2.sum(axis=1).max())
    fill_s = _pipeline_seconds(ranks, passes_S2, message_s(problem, 0)) - problem.M * each_s if len(ranks) > 1 else 0.0
    return Whole(once_s + ends_s + fill_s, each_s)


def _pipeline_seconds(ranks: Sequence[Problem], passes_S2: Array, message_s: float) -> float:
    """Returns the time of a pipeline in seconds, if the passes of every micro-step take `passes_S2` (forward, backward)."""
    at_S = [0.0] * len(ranks)

    def run_pass(s: int, x: int, _: int, awaited_s: float | None) -> float:
        ready_s = 0.0 if awaited_s is None else awaited_s + message_s
        backward = int(ranks[s].schedule.phase_X[x] != Phase.FORWARD)
        at_S[s] = max(at_S[s], ready_s) + float(passes_S2[s, backward])
        return at_S[s]

    run_passes([rank.schedule for rank in ranks], run_pass)
    return max(at_S)


def _spread(value_X: Array, most: int) -> list[int]:
    """Splits the sorted values into `most` equal parts and returns the position of each part's middle value, ascending."""
    num = min(len(value_X), most)
    middle = (2 * np.arange(num) + 1) * len(value_X) // (2 * num)
    return sorted(np.argsort(value_X, kind="stable")[middle].tolist())
