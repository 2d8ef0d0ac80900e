"""foremoe: balances Mixture-of-Experts training with routing that rollout has already recorded.

Data flows one way: `RoutingTrace` -> `Workload` -> `Problem` -> `Planner` -> `Plan`. Names are loaded on first use, so that
importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foremoe.base.lazy import lazy
from foremoe.base.version import __version__ as __version__

if TYPE_CHECKING:
    from foremoe import calibrate as calibrate
    from foremoe import distributed as distributed
    from foremoe import integrations as integrations
    from foremoe import levels as levels
    from foremoe import machine as machine
    from foremoe import plan as plan
    from foremoe import planner as planner
    from foremoe import problem as problem
    from foremoe import report as report
    from foremoe import routing as routing
    from foremoe import runtime as runtime
    from foremoe import simulate as simulate
    from foremoe import solvers as solvers
    from foremoe import synthetic as synthetic
    from foremoe import testing as testing
    from foremoe import transfer as transfer
    from foremoe import workload as workload
    from foremoe.base.errors import InputError as InputError
    from foremoe.base.errors import PlanError as PlanError
    from foremoe.base.errors import StaleWeights as StaleWeights
    from foremoe.base.errors import TransferError as TransferError
    from foremoe.machine import Cluster as Cluster
    from foremoe.machine import Model as Model
    from foremoe.plan import Link as Link
    from foremoe.plan import Plan as Plan
    from foremoe.plan import PlanKey as PlanKey
    from foremoe.plan import TransferList as TransferList
    from foremoe.planner import STRATEGIES as STRATEGIES
    from foremoe.planner import LevelSummary as LevelSummary
    from foremoe.planner import Planner as Planner
    from foremoe.planner import PlanStream as PlanStream
    from foremoe.planner import PlanSummary as PlanSummary
    from foremoe.planner import ablate as ablate
    from foremoe.planner import compare as compare
    from foremoe.planner import parse as parse
    from foremoe.planner import resolve as resolve
    from foremoe.planner import row_solver as row_solver
    from foremoe.problem import Cost as Cost
    from foremoe.problem import CostModel as CostModel
    from foremoe.problem import Noisy as Noisy
    from foremoe.problem import Phase as Phase
    from foremoe.problem import Placement as Placement
    from foremoe.problem import Problem as Problem
    from foremoe.problem import ResidentSlots as ResidentSlots
    from foremoe.problem import Schedule as Schedule
    from foremoe.problem import SharedSlots as SharedSlots
    from foremoe.problem import Stop as Stop
    from foremoe.routing import RoutingTrace as RoutingTrace
    from foremoe.synthetic import Regime as Regime
    from foremoe.synthetic import synthetic_trace as synthetic_trace
    from foremoe.synthetic import synthetic_workload as synthetic_workload
    from foremoe.warm import warm_up as warm_up
    from foremoe.workload import Workload as Workload
    from foremoe.workload import count_workload as count_workload
    from foremoe.workload import from_routed_experts as from_routed_experts
    from foremoe.workload import skew_statistics as skew_statistics

_NAMES = {
    "base.errors": ("InputError", "PlanError", "StaleWeights", "TransferError"),
    "machine": ("Cluster", "Model"),
    "plan": ("Link", "Plan", "PlanKey", "TransferList"),
    "planner": (
        "STRATEGIES", "LevelSummary", "PlanStream", "PlanSummary", "Planner", "ablate", "compare", "parse", "resolve",
        "row_solver",
    ),
    "problem": (
        "Cost", "CostModel", "Noisy", "Phase", "Placement", "Problem", "ResidentSlots", "Schedule", "SharedSlots", "Stop",
    ),
    "routing": ("RoutingTrace",),
    "synthetic": ("Regime", "synthetic_trace", "synthetic_workload"),
    "warm": ("warm_up",),
    "workload": ("Workload", "count_workload", "from_routed_experts", "skew_statistics"),
    "calibrate": (), "distributed": (), "integrations": (), "levels": (), "report": (), "runtime": (), "simulate": (),
    "solvers": (), "testing": (), "transfer": (),
}  # fmt: skip
__all__ = [
    "STRATEGIES", "Cluster", "Cost", "CostModel", "InputError", "LevelSummary", "Link", "Model", "Noisy", "Phase", "Placement",
    "Plan", "PlanError", "PlanKey", "PlanStream", "PlanSummary", "Planner", "Problem", "Regime", "ResidentSlots",
    "RoutingTrace", "Schedule", "SharedSlots", "StaleWeights", "Stop", "TransferError", "TransferList", "Workload", "ablate",
    "calibrate", "compare", "count_workload", "distributed", "from_routed_experts", "integrations", "levels", "machine",
    "parse", "plan", "planner", "problem", "report", "resolve", "routing", "row_solver", "runtime", "simulate",
    "skew_statistics", "solvers", "synthetic", "synthetic_trace", "synthetic_workload", "testing", "transfer", "warm_up",
    "workload",
]  # fmt: skip

__getattr__, __dir__ = lazy(__name__, _NAMES)
