"""The planner, which composes levels, and named strategies, comparisons and ablations."""

from foremoe.planner.ablation import ablate
from foremoe.planner.comparison import compare
from foremoe.planner.parsing import parse
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES, resolve, row_solver
from foremoe.planner.summary import LevelSummary, PlanSummary

__all__ = [
    "STRATEGIES", "LevelSummary", "PlanSummary", "Planner", "ablate", "compare", "parse", "resolve", "row_solver",
]  # fmt: skip
