"""`Exact`: chooses the replicas and quotas of a row together, with a mixed-integer program that SCIP solves."""

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
from foremoe.problem.bounds import load_bound
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.solvers.base import require_start
from foremoe.solvers.exact.model import Outcome, Pair, Program, Row

# Letters: N rows, G ranks, E experts, S slots per rank.


@dataclass(frozen=True)
class Exact(RankSolver):
    """Minimises the largest rank load of every row and proves it optimal, or returns the best placement found within a limit.

    Use it as an oracle in tests and ablations, or as a solver for small groups. A row with 16 experts on 4 ranks takes about 20
    ms, and a row with 32 experts on 8 ranks takes less than a second. A good start helps, as in
    ``rank=(Search(effort=0), Exact())``, because the program uses it as its first solution and as a limit for the load of every
    rank. `Exact` refuses the objective ``"time"``, because it cannot prove that times are optimal. SCIP (Bestuzheva et al., arXiv
    2112.08872) solves the program through PySCIPOpt.

    In the result, ``stop_N`` is OPTIMAL if the load equals the bound, LIMIT if a limit was reached first, and FELL_BACK if SCIP
    failed. ``bound_N`` is always a proven lower bound. A row keeps `start` unless the solver found a better placement.

    Attributes:
        node_limit: Maximum number of branch-and-bound nodes per row.
        time_limit_s: Maximum wall-clock time per row in seconds, or None for no limit. With a time limit, results depend on the
            speed of the machine, so `deterministic` is False.
    """

    exact: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("pyscipopt",)

    node_limit: int = 1000
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        whole(self.node_limit, "node_limit of Exact", 1, 2**31 - 1)
        if self.time_limit_s is not None:
            real(self.time_limit_s, "time_limit_s of Exact")

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        """Returns True if results are reproducible, that is, if `time_limit_s` is None."""
        return self.time_limit_s is None

    def refusal(self, problem: Problem) -> str | None:
        """Returns the reason why the objective ``"time"`` is refused, or None for ``"balance"``."""
        if problem.cost.objective == "balance":
            return None
        return "Exact minimises the largest rank load and cannot minimise time; plan with the objective balance"

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows. Rows that a cancellation skips keep the placement of `start`.

        Raises:
            InputError: PySCIPOpt is not installed, or the objective is not ``"balance"``.
        """
        if reason := self.refusal(problem):
            raise InputError(f"{reason}.")
        if importlib.util.find_spec("pyscipopt") is None:
            raise InputError("Exact needs the module pyscipopt, which is not installed; run pip install 'foremoe[exact]'.")
        require_start(problem, start)
        node_G, home_LE, base_NGB = problem.cluster.node_of_rank_G, problem.home_LE // problem.B, problem.base_NGB
        proven_N, most_N = load_bound(problem).astype(np.int64), start.load_NG().max(axis=1)
        expert_NGS, quota_NGS = start.expert_NGS.copy(), start.quotas_NGS.copy()
        failed_N = np.zeros(problem.N, bool)

        def block(n: int, _: int) -> None:
            if most_N[n] <= proven_N[n]:
                return
            row = Row(
                load_E=problem.load_NE[n].astype(np.int64), home_E=home_LE[n % problem.L], node_G=node_G, redundant=problem.R,
                least_load=int(proven_N[n]), most_load=int(most_N[n]),
            )  # fmt: skip
            outcome = self._solve_row(row, problem.replicas == "node", _off_home(row, start, n))
            if outcome is None:
                failed_N[n] = True
                return
            # The optimum is an integer, and SCIP's tolerances are too small to push the bound above it.
            proven_N[n] = max(proven_N[n], math.ceil(outcome.bound - 0.01 - 1e-7 * outcome.bound))
            _write(row, outcome.quota, base_NGB[n], expert_NGS[n], quota_NGS[n])

        done_N = for_rows(block, problem.N, rows_per_block=1)
        found = Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)
        found_N = found.load_NG().max(axis=1)
        best_N = np.minimum(found_N, most_N)
        stop_N = np.where(best_N <= proven_N, Stop.OPTIMAL, np.where(failed_N, Stop.FELL_BACK, Stop.LIMIT))
        stop_N[~done_N] = Stop.CANCELLED
        found = found.where(found_N < most_N, start)
        return dataclasses.replace(found, bound_N=np.minimum(proven_N, best_N).astype(np.float64), stop_N=stop_N)

    def _solve_row(self, row: Row, node_only: bool, start: dict[Pair, float]) -> Outcome | None:
        program = Program(row, row.pairs(node_only))
        program.start_from(start)
        outcome = program.solve(node_limit=self.node_limit, time_limit_s=self.time_limit_s)
        if outcome is None:
            return None
        rounded = {p: float(round(q)) for p, q in outcome.quota.items()}
        if all(abs(q - rounded[p]) < 1e-3 for p, q in outcome.quota.items()):
            return outcome._replace(quota=rounded)
        # The split came from an interior point of the program, so it is solved again for the same replicas with whole quotas.
        split = Program(row, list(outcome.quota), whole=True)
        again = split.solve(node_limit=self.node_limit, time_limit_s=self.time_limit_s)
        return None if again is None else outcome._replace(quota={p: float(round(q)) for p, q in again.quota.items()})


def _off_home(row: Row, placement: Placement, n: int) -> dict[Pair, float]:
    """Returns the quotas of one row that replicas serve."""
    expert_GS, quota_GS = placement.expert_NGS[n], placement.quotas_NGS[n]
    used = zip(*np.nonzero(quota_GS), strict=True)
    return {(int(expert_GS[g, s]), int(g)): float(quota_GS[g, s]) for g, s in used if row.home_E[expert_GS[g, s]] != g}


def _write(row: Row, quota: dict[Pair, float], base_GB: Array, expert_GS: Array, quota_GS: Array) -> None:
    """Writes a row's quotas in canonical form, with the replicas of each rank sorted by expert."""
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
