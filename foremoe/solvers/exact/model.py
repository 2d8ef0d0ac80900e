"""The mixed-integer program of one row, which chooses the replicas and the split of every expert's tokens.

The binary variable ``x[e, g]`` says that rank g holds a replica of expert e. The variable ``y[e, g]`` is the number of pairs that
this replica serves. The home serves all other pairs of the expert.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array

# Letters: G ranks, E experts.

Pair = tuple[int, int]  # (expert, rank that is not its home)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """The input of the program for one row."""

    load_E: Array  # pairs of every expert
    home_E: Array  # home rank of every expert
    node_G: Array  # node of every rank
    redundant: int  # R
    least_load: int  # lower bound of the largest rank load
    most_load: int  # largest rank load that still improves on the start

    def pairs(self, node_only: bool) -> list[Pair]:
        """Returns all possible replicas of experts with load, on any rank other than the home or only in the home's node."""
        home_E, node_G = self.home_E, self.node_G
        may_EG = (self.load_E[:, None] > 0) & (home_E[:, None] != np.arange(len(node_G)))
        if node_only:
            may_EG &= node_G[home_E][:, None] == node_G
        return [(int(e), int(g)) for e, g in zip(*np.nonzero(may_EG), strict=True)]


class Outcome(NamedTuple):
    """The result of a program."""

    quota: dict[Pair, float]  # quotas of replicas, by (expert, rank)
    bound: float  # proven lower bound of the largest rank load


class Program:
    """The SCIP model of a `Row`, in which only given candidates can become replicas.

    With `whole`, quotas are integers. This is meant for small programs whose replicas are already chosen.
    """

    def __init__(self, row: Row, pairs: list[Pair], *, whole: bool = False) -> None:
        import pyscipopt

        self.row, self.pairs = row, pairs
        self.model = pyscipopt.Model()
        total, constrain, add = pyscipopt.quicksum, self.model.addCons, self.model.addVar
        self.x = {p: add(vtype="B") for p in pairs}
        most = {p: float(min(row.load_E[p[0]], row.most_load)) for p in pairs}
        self.y = {p: add(vtype="I" if whole else "C", lb=0.0, ub=most[p]) for p in pairs}
        G = len(row.node_G)
        reach: list[list[Pair]] = [[] for _ in range(G)]  # candidate replicas on each rank
        leave: list[list[Pair]] = [[] for _ in range(G)]  # candidate replicas of the experts at home on each rank
        by_expert: dict[int, list[Pair]] = {}
        for p in pairs:
            reach[p[1]].append(p)
            leave[int(row.home_E[p[0]])].append(p)
            by_expert.setdefault(p[0], []).append(p)
        self.static_G = np.bincount(row.home_E, row.load_E, G)
        for p in pairs:
            constrain(self.y[p] <= most[p] * self.x[p])
        for e, its_pairs in by_expert.items():
            if len(its_pairs) > 1:
                constrain(total(self.y[p] for p in its_pairs) <= float(row.load_E[e]))
        for on_rank in reach:
            if len(on_rank) > row.redundant:
                constrain(total(self.x[p] for p in on_rank) <= float(row.redundant))
        self.peak = add(vtype="I", lb=float(row.least_load), obj=1.0)
        for g in range(G):
            moved = total(self.y[p] for p in reach[g]) - total(self.y[p] for p in leave[g])
            constrain(moved + float(self.static_G[g]) <= self.peak)

    def start_from(self, quota: dict[Pair, float]) -> bool:
        """Offers quotas to SCIP as a first solution. Returns False if the program rejects them."""
        if not all(p in self.x for p in quota):
            return False
        solution, load_G = self.model.createSol(), self.static_G.copy()
        for (e, g), q in quota.items():
            self.model.setSolVal(solution, self.x[e, g], 1.0)
            self.model.setSolVal(solution, self.y[e, g], float(q))
            load_G[g] += q
            load_G[self.row.home_E[e]] -= q
        self.model.setSolVal(solution, self.peak, load_G.max())
        return bool(self.model.addSol(solution, free=True))

    def solve(self, *, node_limit: int, time_limit_s: float | None) -> Outcome | None:
        """Runs SCIP until it is done or reaches a limit. Returns None if SCIP found no solution."""
        model = self.model
        model.hideOutput()
        model.setParams({
            "limits/totalnodes": node_limit,
            # Signal handlers belong to the caller's main thread.
            "misc/catchctrlc": False,
            "parallel/maxnthreads": 1,
            "lp/threads": 1,
            # The constraint y <= load * x leaks load times this tolerance, which must stay far below one pair.
            "numerics/feastol": 1e-7,
        })  # fmt: skip
        if time_limit_s is not None:
            model.setParams({"timing/clocktype": 2, "limits/time": time_limit_s})
        optimize = model.optimizeNogil  # absent before PySCIPOpt 5.3; outside the try, which would hide its absence
        try:
            optimize()
        except Exception:  # PySCIPOpt raises it when SCIP gives up, for numerical trouble in its LP or lack of memory
            return None
        if model.getNSols() == 0:
            return None
        value = {p: model.getVal(self.y[p]) for p in self.pairs if model.getVal(self.x[p]) > 0.5}
        return Outcome({p: q for p, q in value.items() if q > 1e-4}, model.getDualbound())
