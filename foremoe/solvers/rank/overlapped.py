"""Overlapped: `Chain` for a stage whose copies hide longer or shorter than the closed form says."""

import dataclasses
from dataclasses import dataclass, field

from foremoe.base.errors import InputError
from foremoe.base.fields import real
from foremoe.levels import RankSolver
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers.base import require_start
from foremoe.solvers.rank.chain import Chain


class _Longer(CostModel):
    """A cost model whose copies may hide under more than all of the time before the experts are needed."""

    def __post_init__(self) -> None:
        """Nothing is left to check."""


@dataclass(frozen=True)
class Overlapped(RankSolver):
    """`Chain` with copies that hide under `times` as long as the cost model says.

    The closed form takes the busiest rank of every row; on the timeline, copies of different ranks and rows overlap, so that more
    of them may pay, or fewer where neighbouring layers share links. Compose it without the guard, which prices as the problem
    does: ``Planner(rank=(Overlapped(times=2.0),), guard=False)``. `plan_judged` tries several. The method is our own.

    Attributes:
        times: From 0 (nothing hides) to 100.
        chain: Makes the rows.
    """

    times: float = 1.5
    chain: Chain = field(default_factory=Chain)

    def __post_init__(self) -> None:
        real(self.times, "times of Overlapped", 0.0, 100.0, open_low=False)
        if not isinstance(self.chain, Chain):
            raise InputError(f"chain of Overlapped must be a Chain; got {self.chain!r}.")

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """The rows of `chain`; rows that a cancel left out keep `start`."""
        require_start(problem, start)
        cost = _Longer(objective=problem.cost.objective, overlap=problem.cost.overlap * self.times)
        return self.chain.solve(dataclasses.replace(problem, cost=cost), start)
