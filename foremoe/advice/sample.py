"""A part of a stage that is simulated in place of the whole, where many cases are tried."""

import dataclasses

import numpy as np

from foremoe.machine.trainer import Trainer
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.simulate.step import head_seconds, optimizer_seconds, reduction_seconds

# Letters: M micro-steps, L layers.

MICRO_STEPS, LAYERS = 4, 4


def sample(problem: Problem, micro_steps: int = MICRO_STEPS, layers: int = LAYERS) -> Problem:
    """At most so many micro-steps and layers, spread evenly, one micro-step after the other; a small problem as it is.

    Single tokens (`Problem.routed`) and what slots hold at the start are left out.
    """
    if micro_steps >= problem.M and layers >= problem.L:
        return problem
    steps_M, layer_L = _spread(problem.M, micro_steps), _spread(problem.L, layers)
    cut = problem.cut_arrays(M=steps_M, L=layer_L)
    cut["resident_LGS"] = None
    schedule = Schedule.plain(problem.stage, len(steps_M), problem.schedule.reforward)
    return dataclasses.replace(problem, **cut, schedule=schedule, routed=None)


def whole_seconds(problem: Problem, part: Problem, seconds: float, trainer: Trainer) -> float:
    """Seconds of the whole simulated stage, if those of `part`, a `sample` of it, are typical of its rows."""
    head_s = head_seconds(problem).max(axis=1).sum()
    passes = 1.0 + problem.cluster.window_backward_ratio if problem.stage == "update" else 1.0
    ends_s = reduction_seconds(problem, trainer) + optimizer_seconds(problem, trainer)
    return seconds * problem.N / part.N + float(head_s) * passes + ends_s


def _spread(length: int, most: int) -> list[int]:
    """Positions in the middle of as many equal parts."""
    num = min(length, most)
    return ((2 * np.arange(num) + 1) * length // (2 * num)).tolist()
