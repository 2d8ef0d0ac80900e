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
from foremoe.problem.bounds import load_bound
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.solvers.base import require_start
from foremoe.solvers.exact.model import Outcome, Pair, Program, Row

# Letters: N rows, G ranks, E experts, S slots per rank.


@dataclass(frozen=True)
class Exact(RankSolver):
    """Finds the least largest rank load of every row, with a proof, or the best within a node limit.

    An oracle for tests and ablations and a usable solver for small groups: 16 experts on 4 ranks take about 20 ms a row and 32 on
    8 under a second. A good start helps (``rank=(Search(effort=0), Exact())``): it is the program's first solution and caps the
    load of every rank. It refuses the objective ``"time"``: seconds it does not prove. Solved by SCIP (Bestuzheva et al., arXiv
    2112.08872) through PySCIPOpt.

    ``stop_N`` is OPTIMAL where the bound meets the load, LIMIT where a limit came first, FELL_BACK where SCIP failed; ``bound_N``
    is a proven lower bound in any case. A row is `start` itself unless it is better.

    Attributes:
        node_limit: branch-and-bound nodes per row.
        time_limit_s: wall-clock seconds per row; results depend on the machine then, so `deterministic` turns False.
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
        """False under a wall-clock limit."""
        return self.time_limit_s is None

    def refusal(self, problem: Problem) -> str | None:
        """Refuses the objective ``"time"``."""
        if problem.cost.objective == "balance":
            return None
        return "Exact proves the least largest rank load, not seconds; plan with the objective balance"

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows; rows that a cancel left out keep `start`.

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
            # Optima are whole, and SCIP's tolerances cannot have pushed the bound above one.
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
        # The split came from an interior point of the program: the same replicas once more, with whole quotas.
        split = Program(row, list(outcome.quota), whole=True)
        again = split.solve(node_limit=self.node_limit, time_limit_s=self.time_limit_s)
        return None if again is None else outcome._replace(quota={p: float(round(q)) for p, q in again.quota.items()})


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
