"""The last word of planning by simulation: of the plans of a few planners, the one that is over first on the timeline."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES
from foremoe.planner.summary import PlanSummary
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.simulate.stage import simulate
from foremoe.solvers.rank.chain import Chain
from foremoe.solvers.rank.overlapped import Overlapped
from foremoe.solvers.rank.prune import Prune

FEWER = Planner(rank=(Chain(), Prune()), guard=False)
HIDING = tuple(Planner(rank=(Overlapped(times),), guard=False) for times in (0.7, 1.5, 2.0))
CANDIDATES = (FEWER, *HIDING, *(STRATEGIES[name] for name in ("quota", "least_loaded", "static")))


def plan_judged(
    problem: Problem, planner: Planner | None = None, candidates: Sequence[Planner] = CANDIDATES, **options: Any
) -> tuple[Plan, PlanSummary]:
    """The plan that the simulator finds shortest: of `planner` under either objective and of `candidates`.

    The closed form, which solvers minimise, prices rows one by one; it misses links that rows share and ranks whose pairs come
    from farther away than others'. Takes several times as long as `Planner.plan`. Of equal plans the first stays, `planner`'s own
    before all others.

    Args:
        problem: With counts by source rank.
        planner: Default: the hierarchical one.
        candidates: Other planners, which keep homes.
        options: As for `Planner.plan`.

    Raises:
        InputError: As `Planner.plan` and `simulate`, or a planner that moves homes within the plan.
    """
    planner = Planner() if planner is None else planner
    other = "balance" if problem.cost.objective == "time" else "time"
    posed = dataclasses.replace(problem, cost=CostModel(objective=other, overlap=problem.cost.overlap))
    # Sequences are dealt and homes decided already, by `planner`'s own levels.
    others = [dataclasses.replace(candidate, pack=planner.pack, home=planner.home) for candidate in candidates]
    tried = [(planner, problem), (planner, posed), *((candidate, problem) for candidate in others)]
    for candidate, _ in tried:
        if not candidate.keeps_homes:
            raise InputError(f"{candidate!r} moves homes within a plan, which no engine runs; leave it out of the candidates.")
    made = [candidate.plan(seen, **options) for candidate, seen in tried]
    return min(made, key=lambda outcome: simulate(problem, outcome[0]).total_s)
