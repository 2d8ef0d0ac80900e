"""`MegatronSummary`: summary of one stage on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from foremoe.base.arrays import Array
from foremoe.distributed.planning import Planned
from foremoe.integrations.megatron.known import COUNTED
from foremoe.integrations.megatron.stage import MegatronStage
from foremoe.plan.plan import Plan
from foremoe.transfer.timeline import Timeline
from foremoe.workload.skew import mean_skew

# Letters: M micro-steps, L MoE layers of this rank, S slots of a rank.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MegatronSummary:
    """Summary of one stage on one rank.

    Attributes:
        plan: Plan that ran.
        timeline: Timeline of the engine.
        drift_ML: Number of this rank's pairs that were not planned and were served at home, int64.
        served_MLS: Number of pairs that each of this rank's slots served, int64.
        fell_back: Rows (micro-step, layer) that ran at home because a replica was missing.
        plan_s: Seconds that this rank spent on planning.
        share_s: Seconds that this rank spent on exchanging counts and plans.
        slot_bytes: Size in bytes of this rank's slots.
        served_skew_ML: Skew over the EP group as served, float64. None unless routing was a hint (``replay=False``).
        known_rows: Number of rows that used the routes that were computed when the stage began.
        counted_rows: Number of rows that exchanged counts, by reason:

            * "first": the first stage of a kind only compares routes,
            * "unknown": there were more unknown tokens than spare places,
            * "differs": `work` differed from the plan or from the routers' choices,
            * "untold": the routing of the tokens was not given,
            * "layer": the layer has another dispatcher, or shared experts run between its messages,
            * "memory": the memory limit for routes was reached.
        route_bytes: Size in bytes of the host memory that this rank's routes occupy.
    """

    plan: Plan
    timeline: Timeline
    drift_ML: Array
    served_MLS: Array
    fell_back: tuple[tuple[int, int], ...]
    plan_s: float
    share_s: float
    slot_bytes: int
    served_skew_ML: Array | None = None
    known_rows: int = 0
    counted_rows: dict[str, int] = field(default_factory=dict)
    route_bytes: int = 0

    def metrics(self) -> dict[str, float]:
        """Returns totals of the stage. Mean skews over rows are given with experts at home, with the plan, and as served."""
        plan = self.plan
        home_MLG = plan.load_MLE.reshape(plan.M, plan.L, plan.G, -1).sum(axis=3)
        drift_L = self.drift_ML.sum(axis=0)
        out = {
            "skew_before": mean_skew(home_MLG),
            "skew_after": plan.skew_mean,
            "replicas": float(plan.num_replicas),
            "plan_s": self.plan_s,
            "share_s": self.share_s,
            "begin_s": self.timeline.begin_s,
            "exposed_s": self.timeline.exposed_s,
            "received_bytes": float(sum(self.timeline.bytes_by_backend.values())),
            "drift": float(self.drift_ML.sum()),
            "fell_back": float(len(self.fell_back)),
            "retired": float(len(self.timeline.retired)),
            "slot_bytes": float(self.slot_bytes),
            "known_rows": float(self.known_rows),
            "route_bytes": float(self.route_bytes),
        }
        out.update({f"counted/{why}": float(self.counted_rows.get(why, 0)) for why in COUNTED})
        if self.served_skew_ML is not None:
            out["skew_served"] = float(self.served_skew_ML.mean())
        numbers = plan.header.moe_layer_L.tolist()
        out.update({f"drift/layer_{number}": float(drift) for number, drift in zip(numbers, drift_L, strict=True) if drift})
        return out


def summary_of(
    planned: Planned, stage: MegatronStage, timeline: Timeline | None, slot_bytes: int, counted_rows: dict[str, int]
) -> MegatronSummary:  # fmt: skip
    """Returns the summary of a finished stage."""
    assert timeline is not None
    drift_ML, served_MLS = stage.counts()
    return MegatronSummary(
        plan=planned.plan, timeline=timeline, drift_ML=drift_ML, served_MLS=served_MLS, fell_back=tuple(stage.fell_back),
        plan_s=planned.plan_s, share_s=planned.share_s, slot_bytes=slot_bytes, served_skew_ML=stage.served_skew(),
        known_rows=0 if stage.known is None else len(stage.known.taken), counted_rows=counted_rows,
        route_bytes=0 if stage.known is None else stage.known.num_bytes,
    )  # fmt: skip
