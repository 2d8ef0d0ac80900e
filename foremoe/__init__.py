"""foremoe: balances Mixture-of-Experts training with routing that rollout has already recorded.

Data flows one way: `RoutingTrace` -> `Workload` -> `Problem` -> `Planner` -> `Plan`. Names are loaded on first use, so that
importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foremoe.cluster import Cluster as Cluster
    from foremoe.comparison import ablate as ablate
    from foremoe.comparison import compare as compare
    from foremoe.cost import Cost as Cost
    from foremoe.cost import CostModel as CostModel
    from foremoe.errors import InputError as InputError
    from foremoe.errors import PlanError as PlanError
    from foremoe.foresight import Noisy as Noisy
    from foremoe.model import Model as Model
    from foremoe.parsing import parse as parse
    from foremoe.placement import Placement as Placement
    from foremoe.placement import Stop as Stop
    from foremoe.plan import Plan as Plan
    from foremoe.plan_header import PlanKey as PlanKey
    from foremoe.planner import Planner as Planner
    from foremoe.planner_report import Report as Report
    from foremoe.problem import Problem as Problem
    from foremoe.routing import RoutingTrace as RoutingTrace
    from foremoe.schedule import Phase as Phase
    from foremoe.schedule import Schedule as Schedule
    from foremoe.slots import ResidentSlots as ResidentSlots
    from foremoe.slots import SharedSlots as SharedSlots
    from foremoe.statistics import skew_statistics as skew_statistics
    from foremoe.strategies import STRATEGIES as STRATEGIES
    from foremoe.strategies import resolve as resolve
    from foremoe.strategies import row_solver as row_solver
    from foremoe.streaming import PlanStream as PlanStream
    from foremoe.synthetic import Regime as Regime
    from foremoe.synthetic import synthetic_workload as synthetic_workload
    from foremoe.transfers import Path as Path
    from foremoe.transfers import Transfers as Transfers
    from foremoe.workload import Workload as Workload

_HOME = {
    "Cluster": "cluster", "Cost": "cost", "CostModel": "cost", "InputError": "errors", "Model": "model", "Noisy": "foresight",
    "Path": "transfers", "Phase": "schedule", "Placement": "placement", "Plan": "plan", "PlanError": "errors",
    "PlanKey": "plan_header", "PlanStream": "streaming", "Planner": "planner", "Problem": "problem", "Regime": "synthetic",
    "Report": "planner_report", "ResidentSlots": "slots", "RoutingTrace": "routing", "STRATEGIES": "strategies",
    "Schedule": "schedule", "SharedSlots": "slots", "Stop": "placement", "Transfers": "transfers", "Workload": "workload",
    "ablate": "comparison", "compare": "comparison", "parse": "parsing", "resolve": "strategies", "row_solver": "strategies",
    "skew_statistics": "statistics", "synthetic_workload": "synthetic",
}  # fmt: skip
_MODULES = ("integrations", "solvers", "testing")

__all__ = sorted(_HOME)
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"foremoe.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"foremoe.{name}")
    raise AttributeError(f"module 'foremoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_MODULES])
