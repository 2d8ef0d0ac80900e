"""Search: the default rank level. A row starts level and near its tokens, and gets cheaper by small changes."""

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
    """The default: searches each row for a placement with a lower `foremoe.price`, with experts at home.

    Choose it for every plan that an engine runs; `Exact` proves how far from the best a small problem's rows are, `Robust` plans
    for loads that are not known. No row costs more than its start, or than without replicas. Plans are the same on every machine
    and with every number of threads, and a row's does not depend on other rows.

    Under the objective ``"balance"`` the largest rank load is nearly always the least possible, with few replicas; `effort` does
    not matter then. Rows of unknown sources are started and not searched. The method is our own; the page "How rows are planned"
    describes it.

    Attributes:
        effort: Changes tried in a row, at least 0. 0 is the start alone, without groups of nodes: some ten microseconds a row at
            EP8, 15 ms at EP512. None: as many as pay, by what there is to gain in a row, up to half a percent of the row's time
            after its start, times the ranks.
        without: Parts that are left out, of `foremoe.solvers.search.parts.PARTS`: for measuring what each is worth.
    """

    effort: int | None = None
    without: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.effort is not None:
            whole(self.effort, "effort of Search", 0, 2**31 - 1)
        without(self.without)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows; rows that a cancel left out keep `start`.

        Raises:
            InputError: The start is not valid, or moves homes.
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
