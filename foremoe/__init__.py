"""foremoe, a library that balances Mixture-of-Experts training with routing that rollout has already recorded.

Data flows one way: `RoutingTrace` -> `Workload` -> `Problem` -> `Planner` -> `Plan`. Names are loaded on first use, so that
importing the package is fast.
"""

from typing import TYPE_CHECKING

from foremoe.base.lazy import lazy
from foremoe.base.version import __version__ as __version__

if TYPE_CHECKING:
    from foremoe import advice, calibrate, distributed, integrations, levels, machine, plan, planner, problem, report, routing

    # isort: split
    from foremoe import runtime, simulate, solvers, synthetic, testing, transfer, workload
    from foremoe.advice import SlotChoice, advise, choose_slots
    from foremoe.base.errors import Error, InputError, PlanError, StaleWeights, TransferError
    from foremoe.machine import Cluster, Model, Trainer
    from foremoe.plan import Link, Plan, PlanKey, TransferList
    from foremoe.planner import STRATEGIES, LevelSummary, Planner, PlanSummary

    # isort: split
    from foremoe.planner import ablate, compare, parse, resolve, row_solver
    from foremoe.problem import Cost, CostModel, Noisy, Phase, Placement, Problem, Rerouted, Schedule, Stop

    # isort: split
    from foremoe.problem import price
    from foremoe.routing import RoutingTrace
    from foremoe.simulate import Gain, gain
    from foremoe.synthetic import Regime, synthetic_trace, synthetic_workload
    from foremoe.warm import warm_up
    from foremoe.workload import RoutedTokens, Workload, count_workload, from_routed_experts, skew_statistics

_NAMES = {
    "advice": ("SlotChoice", "advise", "choose_slots"),
    "base.errors": ("Error", "InputError", "PlanError", "StaleWeights", "TransferError"),
    "machine": ("Cluster", "Model", "Trainer"),
    "plan": ("Link", "Plan", "PlanKey", "TransferList"),
    "planner": (
        "STRATEGIES", "LevelSummary", "PlanSummary", "Planner", "ablate", "compare", "parse", "resolve",
        "row_solver",
    ),
    "problem": (
        "Cost", "CostModel", "Noisy", "Phase", "Placement", "Problem", "Rerouted", "Schedule",
        "Stop", "price",
    ),
    "routing": ("RoutingTrace",),
    "synthetic": ("Regime", "synthetic_trace", "synthetic_workload"),
    "warm": ("warm_up",),
    "workload": ("RoutedTokens", "Workload", "count_workload", "from_routed_experts", "skew_statistics"),
    "calibrate": (), "distributed": (), "integrations": (), "levels": (), "report": (), "runtime": (),
    "simulate": ("Gain", "gain"),
    "solvers": (), "testing": (), "transfer": (),
}  # fmt: skip
__all__ = [
    "STRATEGIES", "Cluster", "Cost", "CostModel", "Error", "Gain", "InputError", "LevelSummary", "Link", "Model",
    "Noisy", "Phase", "Placement", "Plan", "PlanError", "PlanKey", "PlanSummary", "Planner", "Problem",
    "Regime", "Rerouted", "RoutedTokens", "RoutingTrace", "Schedule", "SlotChoice",
    "StaleWeights", "Stop", "Trainer", "TransferError", "TransferList", "Workload", "ablate", "advice", "advise",
    "calibrate", "choose_slots", "compare", "count_workload", "distributed", "from_routed_experts", "gain",
    "integrations", "levels", "machine", "parse", "plan", "planner", "price", "problem", "report", "resolve", "routing",
    "row_solver", "runtime", "simulate", "skew_statistics", "solvers", "synthetic", "synthetic_trace",
    "synthetic_workload", "testing", "transfer", "warm_up", "workload",
]  # fmt: skip

__getattr__, __dir__ = lazy(__name__, _NAMES)
