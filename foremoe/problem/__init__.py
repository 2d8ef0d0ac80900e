"""The planning problem (load, machine and limits), the predicted time of placements, and proven lower bounds."""

from foremoe.problem.bounds import load_bound, row_bound
from foremoe.problem.cost import Cost, CostModel
from foremoe.problem.foresight import Noisy, Rerouted
from foremoe.problem.memory import Fit, Memory, fit, rank_memory
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.pricing import price, row_objective
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase, Schedule

__all__ = [
    "Cost", "CostModel", "Fit", "Memory", "Noisy", "Phase", "Placement", "Problem", "Rerouted", "Schedule",
    "Stop", "fit", "load_bound", "price", "rank_memory", "row_bound", "row_objective",
]  # fmt: skip
