"""Plan: the immutable result of planning, which can check itself. Engines need nothing else from a solver."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, Length, array
from foremoe.base.errors import InputError, PlanError
from foremoe.base.shown import table
from foremoe.plan.eplb_maps import EplbMaps, eplb_maps
from foremoe.plan.header import PlanHeader
from foremoe.plan.laws import Checked, plan_violations
from foremoe.plan.split import split_over_sources
from foremoe.plan.transfers import TransferList, derive_transfers
from foremoe.problem.cost import Cost
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.workload.skew import mean_skew, skew
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts, B base slots, S slots, P = G*S physical slots.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan(ArrayValue, Checked):
    """The slots of every expert and the numbers of pairs that they serve, for every micro-step and layer of one stage.

    Attributes:
        home_LE: Home slot g*B + b of every expert, int32.
        load_MLE: Planned load, int32. The plan contains the load so that it can check itself.
        expert_MLGS: Logical expert in every physical slot, int16, or -1 for an empty slot. Slots [0, B) are base slots.
        quota_MLGS: Number of (token, expert) pairs that every slot serves, int32.
        bound_ML: Lower bound of the objective, float64, in seconds for "time" and in pairs for "balance".
        load_bound_ML: Lower bound of the largest rank load, float64.
        stop_ML: `Stop` of each row, uint8.

    Example:
        >>> plan
        Plan(4 micro-steps, 4 layers, 8 ranks, 32 experts, R=1, 103 replicas, stage='update', objective='time')
        >>> plan.check(problem)
        >>> int(plan.load_NG.max()), int(problem.static().load_NG().max())
        (33480, 73744)
    """

    header: PlanHeader
    home_LE: Array = array(np.int32)
    load_MLE: Array = array(np.int32)
    expert_MLGS: Array = array(np.int16)
    quota_MLGS: Array = array(np.int32)
    transfers: TransferList
    cost_ML: Cost
    bound_ML: Array = array(np.float64)
    load_bound_ML: Array = array(np.float64)
    stop_ML: Array = array(np.uint8)

    def __post_init__(self) -> None:
        self.freeze()
        if self.cost_ML.window_s.shape != (self.M, self.L):
            raise InputError(f"cost_ML must have shape [{self.M}, {self.L}]; got {list(self.cost_ML.window_s.shape)}.")

    M = Length("expert_MLGS")  #: Number of micro-steps.
    L = Length("expert_MLGS")  #: Number of MoE layers of the plan.
    G = Length("expert_MLGS")  #: Number of ranks.
    S = Length("expert_MLGS")  #: Number of slots per rank.
    E = Length("home_LE")  #: Number of logical experts.

    def __repr__(self) -> str:
        head, sizes = self.header, f"{self.M} micro-steps, {self.L} layers, {self.G} ranks, {self.E} experts"
        more = f"R={head.redundant}, {self.num_replicas} replicas, stage={head.key.stage!r}, objective={head.cost.objective!r}"
        return f"Plan({sizes}, {more})"

    def _repr_html_(self) -> str:
        figures: dict[str, str] = {}
        for line in self.summary().splitlines():
            name, _, text = line.partition(": ") if not line.startswith(" ") else (list(figures)[-1], "", line)
            figures[name] = f"{figures.get(name, '')}{text}"
        return table("Plan", figures)

    def plot(self) -> Any:
        """Draws the skew of every row as a map, static and planned, and returns the figure. Needs matplotlib."""
        from foremoe.plan.plot import skew_maps

        return skew_maps(self)

    @property
    def N(self) -> int:
        """Number of rows, M x L."""
        return self.M * self.L

    @property
    def B(self) -> int:
        """Number of base slots per rank."""
        return self.S - self.header.redundant

    @property
    def expert_NGS(self) -> Array:
        """View of `expert_MLGS` with one entry per row."""
        return self.expert_MLGS.reshape(self.N, self.G, self.S)

    @property
    def quota_NGS(self) -> Array:
        """View of `quota_MLGS` with one entry per row."""
        return self.quota_MLGS.reshape(self.N, self.G, self.S)

    @property
    def placement(self) -> Placement:
        """The placement of all rows, in the form that solvers return and that `foremoe.price` takes."""
        return Placement(expert_NGS=self.expert_NGS, quota_NGS=self.quota_NGS)

    @property
    def load_NG(self) -> Array:
        """Number of pairs that every rank serves, int64 [N, G]."""
        return np.einsum("ngs->ng", self.quota_NGS, dtype=np.int64)

    @property
    def skew_ML(self) -> Array:
        """Largest rank load divided by the mean, float64 [M, L]. It is 1.0 for perfect balance and for rows without load."""
        return skew(self.load_NG.reshape(self.M, self.L, self.G))

    @property
    def skew_mean(self) -> float:
        """Mean of `skew_ML` over all rows that have load."""
        return mean_skew(self.load_NG)

    @property
    def load_gap_ML(self) -> Array:
        """Difference between the largest rank load and its proven lower bound, as a share of the bound, float64 [M, L]."""
        load_ML, bound_ML = self.load_NG.max(axis=1).reshape(self.M, self.L), np.maximum(self.load_bound_ML, 1.0)
        return np.maximum(load_ML - bound_ML, 0.0) / bound_ML

    @property
    def objective_ML(self) -> Array:
        """Value of the objective, float64 [M, L], in the unit of `bound_ML`."""
        if self.header.cost.objective == "time":
            return self.cost_ML.total_s
        return self.load_NG.max(axis=1).reshape(self.M, self.L).astype(np.float64)

    @property
    def executable(self) -> bool:
        """True if all experts at home are in their base slots, so that an engine can run the plan."""
        return self.header.keeps_homes

    @property
    def num_replicas(self) -> int:
        """Number of redundant slots that serve pairs, summed over all rows."""
        return int((self.quota_MLGS[..., self.B :] > 0).sum())

    @property
    def checked(self) -> bool:
        """True if this plan has passed `check` and need not be checked again, because it is immutable."""
        return getattr(self, "_checked", False)

    def violations(self, problem: Problem | None = None) -> list[PlanError]:
        """Lists violations of laws, the first few for each law. With `problem`, also compares the plan with the problem."""
        return plan_violations(self, problem)

    def check(self, problem: Problem | None = None) -> None:
        """Raises the first of `violations`, if there is one. Without `problem`, does nothing if the plan is already `checked`."""
        if self.checked and problem is None:
            return
        broken = self.violations(problem)
        if broken:
            raise broken[0]
        object.__setattr__(self, "_checked", True)

    def rows_for(self, workload: Workload, rank: int) -> Array:
        """Returns the number of pairs from source rank `rank` to every physical slot p = g*S + s, int32 [M, L, P].

        By the split law (module `split`), pairs go first to slots of their source rank, then of its node, then of other ranks.

        Raises:
            InputError: The plan was made for other counts, or the rank does not exist.
            PlanError: The plan violates a law.
        """
        if rank not in range(self.G):
            raise InputError(f"rank {rank} does not exist; the plan has {self.G} ranks.")
        if workload.load_MLGE.shape != (self.M, self.L, self.G, self.E) or (workload.load_MLE != self.load_MLE).any():
            raise InputError("the workload's counts differ from the plan's load; split the workload that was planned.")
        load_NGE = workload.load_MLGE.reshape(self.N, self.G, self.E)
        node_G = self.header.cluster.node_of_rank_G
        self.check()
        split_NP = split_over_sources(load_NGE, self.expert_NGS, self.quota_NGS, node_G, rank)
        return split_NP.reshape(self.M, self.L, self.G * self.S)

    def to_eplb(self, layer: int | None = None, micro_step: int | None = None) -> EplbMaps:
        """Returns the placement in the form that EPLB and serving engines use: phy2log, log2phy and logcnt (docs/from-eplb.md).

        Quotas are lost, because engines split an expert's tokens evenly over its copies. Slots that are empty get further copies.

        Args:
            layer: Index of one layer. By default, the first axis of the arrays has all layers.
            micro_step: Index of one micro-step. By default, all micro-steps must have the same placement.
        """
        return eplb_maps(self, layer, micro_step)

    def rederived(self) -> Plan:
        """Returns the same plan with transfers derived again from placement and schedule, on default links."""
        head = self.header
        expert_NGS = self.expert_NGS if head.keeps_homes else np.full_like(self.expert_NGS, -1)
        transfers = derive_transfers(
            expert_NGS, self.quota_NGS, self.home_LE, schedule=head.schedule, slot_depth=head.slot_depth,
            node_of_rank_G=head.cluster.node_of_rank_G,
        )  # fmt: skip
        return dataclasses.replace(self, transfers=transfers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a ``.safetensors`` file with format version and checksum. `load` returns an equal plan from it."""
        from foremoe.plan.files import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan and checks it.

        Raises:
            InputError: The file is missing, truncated, changed, in another format or not a plan file, or the plan violates a law.
        """
        from foremoe.plan.files import load_plan

        plan = load_plan(path)
        try:
            plan.check()
        except PlanError as error:
            raise InputError(f"the plan {os.fspath(path)!r} breaks its laws ({error}); `foremoe check` says more.") from None
        return plan

    def summary(self) -> str:
        """Returns a summary of a few lines with sizes, skew before and after planning, replicas, bytes and predicted time."""
        from foremoe.plan.text import summary

        return summary(self)

    def explain(self, micro_step: int, layer: int) -> str:
        """Explains one row. Lists rank loads without and with the plan, and every replica with the pairs that it serves.

        Example:
            >>> print(plan.explain(0, 0).splitlines()[1])
            busiest rank: 49183 at home -> 32696 planned; proven lower bound 32696
        """
        from foremoe.plan.text import explain

        return explain(self, micro_step, layer)
