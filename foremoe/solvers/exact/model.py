"""The mixed-integer program of one row: which replicas to make and how to split every expert's tokens.

Binary ``x[e, g]``: rank g holds a replica of expert e. ``y[e, g]``: pairs that it serves; what is left of an expert's load stays
at its home. Everything is counted in pairs: seconds of the time objective are divided by the seconds of one pair, so that the
numbers are of the size that floating-point solvers are built for. `Rates` has the closed form.
"""

from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.problem.rates import Rates
from foremoe.solvers.exact.row import Pair, Row

# Letters: G ranks, V nodes, E experts.

# One side of a rank's link: what each of some replicas takes of it, those, and the same of others.
Side = tuple[float, list[Pair], float, list[Pair]]


class Outcome(NamedTuple):
    """What a program ended with."""

    quota: dict[Pair, float]  # by (expert, rank), off the homes
    objective: float  # in its own units, as the bound
    bound: float  # proven lower bound


class Program:
    """A `Row` over some candidate pairs as a SCIP model.

    Pairs that are no candidates get no replica. With `whole`, quotas are whole numbers: for small programs, whose pairs are
    chosen already. `budget` has the most replicas, and the most across nodes, or None; see `Exact`.
    """

    def __init__(
        self, row: Row, pairs: list[Pair], *, whole: bool = False, budget: tuple[int | None, int | None] = (None, None)
    ) -> None:
        import pyscipopt

        self.row, self.pairs = row, pairs
        self.model = pyscipopt.Model()
        self._sum, self._constrain = pyscipopt.quicksum, self.model.addCons
        self.auxiliary: list[tuple[Any, Any]] = []  # variable and its value as a function of the quotas
        # Kept out of SCIP's objective: its tolerances are relative, and a long window would drown differences between plans.
        self.constant = 0.0
        add = self.model.addVar
        rates, cost = row.rates, dict.fromkeys(pairs, 0.0)
        if rates is not None:
            cost = {p: (rates.replica_peer_s if self._by_peer(p) else rates.replica_rdma_s) / rates.pair_s for p in pairs}
        self.x = {p: add(vtype="B", obj=cost[p]) for p in pairs}
        most = {p: min(float(row.load_E[p[0]]), row.most_load) for p in pairs}
        self.y = {p: add(vtype="I" if whole else "C", lb=0.0, ub=most[p]) for p in pairs}
        G = len(row.node_G)
        self.reach: list[list[Pair]] = [[] for _ in range(G)]  # candidate replicas on each rank
        self.leave: list[list[Pair]] = [[] for _ in range(G)]  # candidate replicas of the experts at home there
        self.by_expert: dict[int, list[Pair]] = {}
        for p in pairs:
            self.reach[p[1]].append(p)
            self.leave[int(row.home_E[p[0]])].append(p)
            self.by_expert.setdefault(p[0], []).append(p)
        self.static_G = np.bincount(row.home_E, row.load_E, G)
        for p in pairs:
            self._constrain(self.y[p] <= most[p] * self.x[p])
        for e, its_pairs in self.by_expert.items():
            if len(its_pairs) > 1:
                self._constrain(self._sum(self.y[p] for p in its_pairs) <= float(row.load_E[e]))
        for on_rank in self.reach:
            self._budget(row.redundant, on_rank)
        self._budget(budget[0], pairs)
        self._budget(budget[1], [p for p in pairs if not self._by_peer(p)])
        self._compute(0.0 if rates is None else rates.slot_s / rates.pair_s)
        if rates is not None:
            self._exchange(rates)
            self._copies(rates)

    def _by_peer(self, p: Pair) -> bool:
        return bool(self.row.node_G[p[1]] == self.row.node_G[self.row.home_E[p[0]]])

    def _derived(self, value: Any, *, cost: float, low: float = 0.0, high: float | None = None, whole: bool = False) -> Any:
        """A variable that follows from the quotas; `value` computes it from them for the start solution."""
        variable = self.model.addVar(vtype="I" if whole else "C", lb=low, ub=high, obj=cost)
        self.auxiliary.append((variable, value))
        return variable

    def _budget(self, most: int | None, pairs: list[Pair]) -> None:
        if most is not None and len(pairs) > most:
            self._constrain(self._sum(self.x[p] for p in pairs) <= float(most))

    def _compute(self, slot: float) -> None:
        """The slowest rank: its load, and `slot` for every busy slot."""
        row = self.row
        active_G = np.bincount(row.home_E[row.load_E > 0], minlength=len(row.node_G))

        def loads(quota: dict[Pair, float], each: float = 0.0) -> Array:
            load_G = self.static_G + each * active_G
            for (e, g), q in quota.items():
                load_G[g] += q + each
                load_G[row.home_E[e]] -= q
            return load_G

        peak = self._derived(lambda quota: loads(quota, slot).max(), cost=1.0, low=row.least_load, whole=row.rates is None)
        for g in range(len(row.node_G)):
            moved = self._sum(self.y[p] for p in self.reach[g]) - self._sum(self.y[p] for p in self.leave[g])
            load = moved + float(self.static_G[g])
            if row.rates is not None:
                # For fixed replicas and whole rank loads the split is a network flow, so whole quotas reach the same cost.
                whole = self._derived(lambda quota, g=g: loads(quota)[g], cost=0.0, high=row.most_load, whole=True)
                self._constrain(load == whole)
                load = whole + self._sum(slot * self.x[p] for p in self.reach[g]) + float(slot * active_G[g])
            self._constrain(load <= peak)

    def _exchange(self, rates: Rates) -> None:
        """Dispatch and combine: pairs served on their own rank cost nothing, in their own node less than across nodes."""
        row, unit = self.row, rates.pair_s
        G, num_pairs = len(row.node_G), float(row.load_E.sum())
        peer, rdma = rates.peer_pair_s / unit, rates.rdma_pair_s / unit
        self.constant = (row.window_s + rates.fixed_s) / unit + rdma * num_pairs
        if row.demand_GE is None:
            share_V = np.bincount(row.node_G) / G
            self.constant += (peer - rdma) * num_pairs * float((share_V**2).sum()) - peer * num_pairs / G
            return
        nodes = [np.flatnonzero(row.node_G == v).tolist() for v in range(int(row.node_G.max()) + 1)]
        for e in np.flatnonzero(row.load_E).tolist():
            home = int(row.home_E[e])
            for g in range(G):
                self.constant -= self._locality(e, [g], g == home, int(row.demand_GE[g, e]), peer)
            for members in nodes:
                self.constant -= self._locality(e, members, home in members, int(row.demand_GE[members, e].sum()), rdma - peer)

    def _locality(self, e: int, members: list[int], at_home: bool, demand: int, gain: float) -> float:
        """``gain * min(demand, pairs of e served by `members`)``: returns the constant part, the rest becomes variables."""
        load = float(self.row.load_E[e])
        pairs = self.by_expert.get(e, [])
        # At home what counts is what leaves the group, elsewhere what reaches it.
        moved = [p for p in pairs if (p[1] in members) != at_home]
        if demand == 0.0 or gain == 0.0 or not moved:
            return gain * demand if at_home else 0.0

        def served(quota: dict[Pair, float]) -> float:
            there = sum(q for p, q in quota.items() if p[0] == e and (p[1] in members) != at_home)
            return load - there if at_home else there

        reached = self._sum(self.y[p] for p in moved)
        total = load - reached if at_home else reached
        met = self._derived(lambda quota: min(demand, served(quota)), cost=-gain)
        if gain > 0.0:
            self._constrain(met <= demand)
            self._constrain(met <= total)
            if not at_home:
                # Follows from whole x, and keeps fractions of many replicas from meeting all demand.
                self._constrain(met <= self._sum(demand * self.x[p] for p in moved))
            return 0.0
        # RDMA faster than peer links: the smaller of two must be held from below, which takes a choice.
        short = self.model.addVar(vtype="B")
        self.auxiliary.append((short, lambda quota: float(served(quota) < demand)))
        self._constrain(met >= demand - demand * short)
        self._constrain(met >= total - load + load * short)
        return 0.0

    def _copies(self, rates: Rates) -> None:
        """What the busiest rank, direction and link class sends beyond the time that hides it, in forward and in backward."""
        row, unit = self.row, rates.pair_s
        peer = {p: self._by_peer(p) for p in self.pairs}
        links = (
            (True, rates.copy_peer_s / unit, rates.gradient_peer_s / unit),
            (False, rates.copy_rdma_s / unit, rates.gradient_rdma_s / unit),
        )
        forward: list[Side] = []
        backward: list[Side] = []
        for g in range(len(row.node_G)):
            for inside, copy, gradient in links:
                into, out = ([p for p in pairs if peer[p] == inside] for pairs in (self.reach[g], self.leave[g]))
                forward += [(copy, into, 0.0, out), (copy, out, 0.0, into)]
                again, back = copy * rates.trains, gradient * rates.trains
                backward += [(again, into, back, out), (again, out, back, into)]
        for sides, hide_s in ((forward, row.hide_forward_s), (backward, row.hide_backward_s)):
            busy = [side for side in sides if (side[0] and side[1]) or (side[2] and side[3])]
            if not busy:
                continue

            def exposed(quota: dict[Pair, float], busy: list[Side] = busy, hide: float = hide_s / unit) -> float:
                def held(pairs: list[Pair]) -> int:
                    return sum(p in quota for p in pairs)

                return max(0.0, *(a * held(these) + b * held(those) - hide for a, these, b, those in busy))

            exposed_by = self._derived(exposed, cost=1.0)
            for a, these, b, those in busy:
                seconds = a * self._sum(self.x[p] for p in these) + b * self._sum(self.x[p] for p in those)
                self._constrain(exposed_by >= seconds - hide_s / unit)

    def start_from(self, quota: dict[Pair, float]) -> bool:
        """Offers quotas as a first solution; False if the program does not allow them."""
        if not all(p in self.x for p in quota):
            return False
        solution = self.model.createSol()
        for p, q in quota.items():
            self.model.setSolVal(solution, self.x[p], 1.0)
            self.model.setSolVal(solution, self.y[p], float(q))
        for variable, value in self.auxiliary:
            self.model.setSolVal(solution, variable, value(quota))
        return bool(self.model.addSol(solution, free=True))

    def solve(self, *, node_limit: int, gap: float, time_limit_s: float | None) -> Outcome | None:
        """Runs SCIP to the end or a limit, the `gap` between objective and bound being one; None if it found no solution."""
        model = self.model
        model.hideOutput()
        model.setParams({
            "limits/totalnodes": node_limit,
            "limits/absgap": gap / self.row.unit,
            # Signal handlers belong to the caller's main thread.
            "misc/catchctrlc": False,
            "parallel/maxnthreads": 1,
            "lp/threads": 1,
            # y <= load * x leaks load times this tolerance, which must stay far below one pair.
            "numerics/feastol": 1e-7,
        })  # fmt: skip
        if time_limit_s is not None:
            model.setParams({"timing/clocktype": 2, "limits/time": time_limit_s})
        optimize = model.optimizeNogil  # absent before PySCIPOpt 5.3, which must not pass for a failure of SCIP
        try:
            optimize()
        except Exception:  # what PySCIPOpt raises when SCIP gives up: numerics of its LP, memory
            return None
        if model.getNSols() == 0:
            return None
        value = {p: model.getVal(self.y[p]) for p in self.pairs if model.getVal(self.x[p]) > 0.5}
        quota = {p: q for p, q in value.items() if q > 1e-4}
        reached, bound = ((x + self.constant) * self.row.unit for x in (model.getObjVal(), model.getDualbound()))
        return Outcome(quota, reached, bound)
