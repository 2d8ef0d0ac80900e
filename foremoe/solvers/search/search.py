"""Search: the default rank solver. It places replicas for even load and near tokens, and then improves the row step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.levels import RankSolver
from foremoe.problem.estimate import problem_rates, row_times
from foremoe.problem.placement import Placement
from foremoe.problem.pricing import problem_rows
from foremoe.problem.problem import Problem
from foremoe.solvers.base import edit_rows, require_start
from foremoe.solvers.search.descend import AS_PAYS, Choice, search_rows
from foremoe.solvers.search.level import TRIES, Options, balanced_rows
from foremoe.solvers.search.parts import GROUPS, without


@dataclass(frozen=True)
class Search(RankSolver):
    """Searches each row for replicas that lower its `foremoe.price`. This is the default rank solver.

    Choose it for every plan that an engine runs. `Exact` proves how far the rows of a small problem are from the optimum, and
    `Robust` plans for unknown loads. No row costs more than its start, or more than without replicas. Plans are the same on every
    machine and with every number of threads, and the plan of a row does not depend on other rows.

    Under the objective ``"balance"``, the largest rank load is nearly always the least possible, with few replicas, and `effort`
    is ignored. If the source ranks of a row's tokens are unknown, only the start of the search is computed. The method is our
    own. The page "How rows are planned" describes it.

    Attributes:
        effort: Number of changes that are tried per row. 0 computes only the start, without groups of nodes, which takes some ten
            microseconds per row at EP8 and up to 8 ms at EP512. None chooses the number by the gain that is possible in a row.
            The search then takes at most half a percent of the time of the row's start placement, multiplied by the number of
            ranks.
        without: Parts of `foremoe.solvers.search.parts.PARTS` to leave out, to measure the gain of each.
    """

    effort: int | None = None
    without: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.effort is not None:
            whole(self.effort, "effort of Search", 0, 2**31 - 1)
        without(self.without)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows. Rows that a cancellation skips keep the placement of `start`.

        Raises:
            InputError: The start is not valid, or experts in it are not at home.
        """
        require_start(problem, start)
        if (start.expert_NGS[:, :, : problem.B] != problem.base_NGB).any():
            raise InputError("Search keeps homes, and its start moves them; leave out the solver before it.")
        node_only = problem.replicas == "node"
        if problem.cost.objective == "balance":
            node_G, options = problem.cluster.node_of_rank_G, Options(node_only, TRIES)
            return edit_rows(
                start, lambda low, high, *placed: balanced_rows(low, high, problem.load_NE, node_G, problem.B, options, *placed)
            )
        effort = AS_PAYS if self.effort is None else self.effort
        if problem.load_MLGE is None:
            effort = 0
        rows, parts = problem_rows(problem), without(self.without)
        if effort == 0:
            parts &= ~GROUPS
        choice = Choice(effort, parts, node_only, problem_rates(problem), row_times(problem))
        return edit_rows(start, lambda low, high, *placed: search_rows(low, high, rows, choice, *placed))
