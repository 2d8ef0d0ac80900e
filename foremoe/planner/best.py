"""The best placement of every row so far, while the levels of a planner run."""

import numpy as np

from foremoe.levels import RankSolver
from foremoe.planner.summary import LevelSummary, level_summary
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem

# Letters: N rows.


class BestRows:
    """State of planning while rank solvers run, with the best placement of every row and a summary of every finished level."""

    def __init__(self, problem: Problem, start: Placement, static: Placement | None = None) -> None:
        self._problem = problem
        self.placement = start
        self.objective_N = self.start_N = row_objective(problem, start)  # objective of the best placement, and of the start
        if static is not None:
            static_N = row_objective(problem, static)
            self.placement = start.where(self.start_N <= static_N, static)
            self.objective_N = np.minimum(self.start_N, static_N)
        self.stop_N = np.full(problem.N, Stop.DONE, np.uint8)
        self.kept_N = np.ones(problem.N, bool)  # rows in which no level improved on the start
        self.proven_N = np.full(problem.N, -np.inf)  # lower bounds that solvers have proven
        self.levels: list[LevelSummary] = [level_summary("start", (0.0, 0.0), problem, start, self.start_N, 0)]

    def take(self, solver: RankSolver, placement: Placement, spent: tuple[float, float], *, guard: bool) -> None:
        """Takes the rows of a solver's valid placement. With `guard`, takes only rows that beat the best placement so far."""
        problem = self._problem
        objective_N = row_objective(problem, placement)
        level_stop_N = np.full(problem.N, Stop.DONE, np.uint8) if placement.stop_N is None else placement.stop_N
        better_N, self.stop_N = np.ones(problem.N, bool), level_stop_N
        if guard:
            better_N = objective_N < self.objective_N
            self.stop_N = np.where(objective_N > self.objective_N, Stop.FELL_BACK, level_stop_N)
        self.stop_N = np.where(level_stop_N == Stop.CANCELLED, Stop.CANCELLED, self.stop_N)
        if placement.bound_N is not None and solver.keeps_homes:
            self.proven_N = np.maximum(self.proven_N, placement.bound_N)
        # If a heuristic runs after a search that proved a bound, the row still counts as one in which a search stopped.
        self.stop_N = np.where((self.stop_N == Stop.DONE) & (self.proven_N > -np.inf), Stop.LIMIT, self.stop_N)
        self.placement = placement.where(better_N, self.placement)
        self.objective_N = np.where(better_N, objective_N, self.objective_N)
        self.kept_N &= ~better_N
        improved = int((objective_N < self.start_N).sum())
        self.levels.append(level_summary(repr(solver), spent, problem, self.placement, self.objective_N, improved))
