"""Exact: replicas and quotas of a row together, as a mixed-integer program through SCIP."""

import dataclasses
import importlib.util
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.fields import real, whole
from foremoe.base.parallel import for_rows
from foremoe.levels import RankSolver
from foremoe.problem.bounds import row_bound
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers.base import require_start
from foremoe.solvers.exact.model import Outcome, Program
from foremoe.solvers.exact.row import Pair, Row, rows_of

# Letters: N rows, G ranks, E experts, S slots per rank.

# Relative gap under which the time objective counts as proven; SCIP's own arithmetic is good to about a tenth of it.
_CLOSED = 1e-6


@dataclass(frozen=True)
class Exact(RankSolver):
    """Finds the proven optimum of every row under the problem's objective, or the best within a node limit.

    An oracle for tests and ablations and a usable solver for small groups: under balance, 16 experts on 4 ranks take about
    20 ms a row and 32 on 8 under a second; under time, 32 experts on 4 ranks take 0.1 to 1 s with one redundant slot and a few
    seconds with two. A good start helps (``rank=(Search(effort=0), Exact())``): it is the program's first solution and caps the
    load of every rank. Under time the program counts what is linear in it (`estimate.least_rates`): its optimum is a
    lower bound, and what it finds stays where it is cheaper. Solved by SCIP (Bestuzheva et al., arXiv 2112.08872) through
    PySCIPOpt.

    ``stop_N`` is OPTIMAL where the bound meets the objective (to a relative 1e-6 under time), LIMIT where a limit came first,
    FELL_BACK where SCIP failed; ``bound_N`` is a proven lower bound in any case. A row is `start` itself unless it is better.
    With a budget (`max_replicas`, `max_cross_node`) the solver looks for the optimum within it, and a row with that proof is
    DONE; ``bound_N`` and OPTIMAL still refer to all placements. Rows whose start exceeds the budget start at home.

    Attributes:
        node_limit: branch-and-bound nodes per row.
        gap: the search of a row ends when objective minus bound falls to this share of what the start has reached.
        time_limit_s: wall-clock seconds per row; results depend on the machine then, so `deterministic` turns False.
        max_replicas: the most replicas in a row, or None for as many as there are slots.
        max_cross_node: the most replicas in another node than their home's, or None.
    """

    exact: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("pyscipopt",)

    node_limit: int = 1000
    gap: float = 0.0
    time_limit_s: float | None = None
    max_replicas: int | None = None
    max_cross_node: int | None = None

    def __post_init__(self) -> None:
        whole(self.node_limit, "node_limit of Exact", 1, 2**31 - 1)
        for name in ("max_replicas", "max_cross_node"):
            if getattr(self, name) is not None:
                whole(getattr(self, name), f"{name} of Exact", 0, 2**31 - 1)
        real(self.gap, "gap of Exact", 0.0, 1.0, open_low=False)
        if self.time_limit_s is not None:
            real(self.time_limit_s, "time_limit_s of Exact")

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        """False under a wall-clock limit."""
        return self.time_limit_s is None

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows; rows that a cancel left out keep `start`.

        Raises:
            InputError: PySCIPOpt is not installed.
        """
        if importlib.util.find_spec("pyscipopt") is None:
            raise InputError("Exact needs the module pyscipopt, which is not installed; run pip install 'foremoe[exact]'.")
        require_start(problem, start)
        balance = problem.cost.objective == "balance"
        start = start.where(self._within_N(problem, start), problem.static())
        before_N, bound_N = row_objective(problem, start), row_bound(problem)
        closed = 1.0 if balance else 1.0 + _CLOSED  # objective over bound that counts as proven
        proven_N = bound_N.copy()  # of placements within the budget
        row_of, base_NGB = rows_of(problem, before_N), problem.base_NGB
        expert_NGS, quota_NGS = start.expert_NGS.copy(), start.quotas_NGS.copy()
        failed_N = np.zeros(problem.N, bool)

        def block(n: int, _: int) -> None:
            if before_N[n] <= bound_N[n] * closed:
                return
            row = row_of(n)
            outcome = self._solve_row(row, problem.replicas == "node", _off_home(row, start, n), float(before_N[n]))
            if outcome is None:
                failed_N[n] = True
                return
            proven_N[n] = max(bound_N[n], _safe(outcome.bound, balance))
            _write(row, outcome.quota, base_NGB[n], expert_NGS[n], quota_NGS[n])

        done_N = for_rows(block, problem.N, rows_per_block=1)
        found = Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)
        found_N = row_objective(problem, found)
        best_N = np.minimum(found_N, before_N)
        least_N = proven_N if self.max_replicas is None and self.max_cross_node is None else bound_N
        stop_N = np.where(failed_N, Stop.FELL_BACK, Stop.LIMIT)
        stop_N[best_N <= proven_N * closed] = Stop.DONE
        stop_N[best_N <= least_N * closed] = Stop.OPTIMAL
        stop_N[~done_N] = Stop.CANCELLED
        found = found.where(found_N < before_N, start)
        return dataclasses.replace(found, bound_N=np.minimum(least_N, best_N), stop_N=stop_N)

    def _within_N(self, problem: Problem, placement: Placement) -> Array:
        """bool [N]: rows of the placement that keep the budget."""
        expert_NGS, node_G = placement.expert_NGS, problem.cluster.node_of_rank_G
        home_NGS = (problem.home_LE // problem.B)[np.arange(problem.N)[:, None, None] % problem.L, expert_NGS]
        copy_NGS = (placement.quotas_NGS > 0) & (home_NGS != np.arange(problem.G)[:, None])
        cross_NGS = copy_NGS & (node_G[home_NGS] != node_G[:, None])
        most, most_cross = (np.inf if most is None else most for most in (self.max_replicas, self.max_cross_node))
        return (copy_NGS.sum(axis=(1, 2)) <= most) & (cross_NGS.sum(axis=(1, 2)) <= most_cross)

    def _solve_row(self, row: Row, node_only: bool, start: dict[Pair, float], before: float) -> Outcome | None:
        program = Program(row, row.pairs(node_only), budget=(self.max_replicas, self.max_cross_node))
        program.start_from(start)
        outcome = program.solve(node_limit=self.node_limit, gap=self.gap * before, time_limit_s=self.time_limit_s)
        if outcome is None:
            return None
        rounded = {p: float(round(q)) for p, q in outcome.quota.items()}
        if all(abs(q - rounded[p]) < 1e-3 for p, q in outcome.quota.items()):
            return outcome._replace(quota=rounded)
        # The split came from an interior point of the program: the same replicas once more, with whole quotas.
        split = Program(row, list(outcome.quota), whole=True)
        again = split.solve(node_limit=self.node_limit, gap=0.0, time_limit_s=self.time_limit_s)
        return None if again is None else outcome._replace(quota={p: float(round(q)) for p, q in again.quota.items()})


def _safe(bound: float, balance: bool) -> float:
    """A bound that SCIP's tolerances cannot have pushed above the optimum; under balance optima are whole."""
    return float(math.ceil(bound - 0.01 - 1e-7 * bound)) if balance else bound * (1.0 - 0.1 * _CLOSED)


def _off_home(row: Row, placement: Placement, n: int) -> dict[Pair, float]:
    """Quotas of one row that are served off their expert's home."""
    expert_GS, quota_GS = placement.expert_NGS[n], placement.quotas_NGS[n]
    used = zip(*np.nonzero(quota_GS), strict=True)
    return {(int(expert_GS[g, s]), int(g)): float(quota_GS[g, s]) for g, s in used if row.home_E[expert_GS[g, s]] != g}


def _write(row: Row, quota: dict[Pair, float], base_GB: Array, expert_GS: Array, quota_GS: Array) -> None:
    """Writes a row's quotas as canonical slots: replicas of a rank by ascending expert."""
    base = base_GB.shape[1]
    home_load_E = row.load_E.copy()
    next_slot_G = np.full(len(base_GB), base)
    expert_GS[:], quota_GS[:] = -1, 0
    for (e, g), q in sorted(quota.items()):
        if q > 0.0:
            expert_GS[g, next_slot_G[g]], quota_GS[g, next_slot_G[g]] = e, int(q)
            next_slot_G[g] += 1
            home_load_E[e] -= int(q)
    expert_GS[:, :base], quota_GS[:, :base] = base_GB, home_load_E[base_GB]
