"""Costs and savings, in seconds, of a change of homes under the objective ``"time"``."""

import dataclasses

import numpy as np

from foremoe.base.arrays import Array
from foremoe.levels import RankSolver
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem

# Letters: L layers, G ranks, E experts, C experts that move.


def move_seconds(problem: Problem, state_bytes: float) -> tuple[float, float]:
    """Returns the seconds to move one expert, with `state_bytes` in addition per weight, inside its node and between nodes."""
    return problem.cluster.copy_seconds(problem.model.expert_bytes + problem.model.expert_params * state_bytes)[:2]


def price_L(problem: Problem, home_LE: Array, state_bytes: float) -> Array:
    """Returns the exposed seconds to move each layer's experts from the current homes to `home_LE`, float64 [L].

    A layer takes as long as its busiest combination of rank, direction and link class, as in `CostModel`.
    """
    G, node_G = problem.G, problem.cluster.node_of_rank_G
    seconds_L = np.zeros(problem.L)
    for layer in range(problem.L):
        old_E, new_E = problem.home_LE[layer] // problem.B, home_LE[layer] // problem.B
        far_E = node_G[old_E] != node_G[new_E]
        for chosen_E, seconds in zip(((old_E != new_E) & ~far_E, far_E), move_seconds(problem, state_bytes), strict=True):
            most = max(np.bincount(rank_C, minlength=G).max() for rank_C in (old_E[chosen_E], new_E[chosen_E]))
            seconds_L[layer] = max(seconds_L[layer], most * seconds)
    return seconds_L


def row_seconds_L(problem: Problem, home_LE: Array, solver: RankSolver, num_steps: int) -> Array:
    """Returns the estimated seconds of all micro-steps with the homes `home_LE`, float64 [L].

    `solver` plans `num_steps` of the micro-steps. The total is estimated from these.
    """
    num = min(num_steps, problem.M)
    chosen = (2 * np.arange(num) + 1) * problem.M // (2 * num)
    seconds_L = np.zeros(problem.L)
    for m in chosen:
        # Replicas already in slots belong to the present homes, so both plans start from empty slots.
        step = dataclasses.replace(problem[int(m) : int(m) + 1], home_LE=home_LE)
        placement = step.static()
        best_N = row_objective(step, placement)
        if problem.R >= 1 and problem.G >= 2:
            best_N = np.minimum(best_N, row_objective(step, solver.solve(step, placement)))
        seconds_L += best_N
    return seconds_L * (problem.M / len(chosen))
