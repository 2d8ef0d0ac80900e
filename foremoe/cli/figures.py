"""Figures of a trace, a workload or a plan, as values for JSON and as lines of text."""

from collections.abc import Iterable
from math import isnan
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import printable
from foremoe.cli.files import layer_loads
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.plan.text import static_load_MLG
from foremoe.plan.transfers import Link
from foremoe.planner.summary import PlanSummary, count_stops
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.dealing import Dealt
from foremoe.workload.skew import mean_skew, skew, skew_statistics
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, K top-k, T tokens, Q sequences, X found.

_HOTTEST = 5


def trace_figures(trace: RoutingTrace) -> dict[str, Any]:
    """Returns the trace's sizes, its sequence lengths and the popularity of its experts."""
    length_Q = trace.seq_len_Q
    return {
        "tokens": trace.T, "unknown_tokens": 0 if trace.known_T is None else int((~trace.known_T).sum()), "sequences": trace.Q,
        "layers": trace.L, "moe_layers": trace.moe_layer_L, "experts": trace.num_experts, "topk": trace.K, "model": trace.model,
        "models_of_this_shape": [m.name for m in Model.matching(trace.L, trace.num_experts, trace.K)],
        "source": trace.source, "id": trace.id,
        "sequence_length": {
            "min": length_Q.min(), "median": float(np.median(length_Q)), "mean": float(length_Q.mean()), "max": length_Q.max(),
        },
        "popularity": popularity(layer_loads(trace)),
    }  # fmt: skip


def popularity(loads: Iterable[Array]) -> dict[str, Any]:
    """Returns the hottest experts, with their layers and their loads divided by the mean. `loads` yields int64 [E] per layer."""
    # Layers are read one at a time, because a small file may declare thousands of layers and experts.
    highest, hottest, never_chosen = [], list[dict[str, Any]](), 0
    for layer, load_E in enumerate(loads):
        over_E = load_E / (load_E.mean() or 1.0)
        highest.append(float(over_E.max()))
        never_chosen += int((load_E == 0).sum())
        full = len(hottest) == _HOTTEST
        found_X = np.flatnonzero(over_E > hottest[-1]["over_mean"]) if full else np.argsort(-over_E, kind="stable")[:_HOTTEST]
        hottest += [{"layer": layer, "expert": e, "over_mean": float(over_E[e])} for e in found_X.tolist()]
        hottest = sorted(hottest, key=lambda one: -one["over_mean"])[:_HOTTEST]
    return {
        "hottest_over_mean": {"mean": float(np.mean(highest)), "max": max(highest)}, "hottest": hottest,
        "never_chosen": never_chosen,
    }  # fmt: skip


def workload_figures(work: Workload) -> dict[str, Any]:
    """Returns the workload's sizes, its totals, and its skew with every expert at home."""
    statistics = skew_statistics(work) if work.E % work.G == 0 else None
    tokens_M = work.tokens_MG.sum(axis=1, dtype=np.int64)
    return {
        "micro_steps": work.M, "layers": work.L, "ranks": work.G, "experts": work.E, "topk": work.num_topk, "stage": work.stage,
        "model": work.model, "tokens": int(tokens_M.sum()), "pairs": int(work.load_MLE.sum(dtype=np.int64)),
        "unknown_tokens": int(work.unknown_ML.max(axis=1).sum()),
        "tokens_per_micro_step": {"min": int(tokens_M.min()), "max": int(tokens_M.max())},
        "trace_id": work.trace_id, "dealt": work.dealt,
        "static_skew": None if statistics is None else {"mean": statistics["skew_mean"], "p99": statistics["skew_p99"]},
        "step_correlation": None if statistics is None or isnan(found := statistics["step_correlation"]) else found,
        "popularity": popularity(work.load_MLE[:, at].sum(axis=0, dtype=np.int64) for at in range(work.L)),
    }  # fmt: skip


def plan_figures(plan: Plan) -> dict[str, Any]:
    """Returns the plan's sizes, its skew before and after planning, its copies and the predicted seconds."""
    head, skew_ML, static_MLG = plan.header, plan.skew_ML, static_load_MLG(plan)
    return {
        "key": head.key, "planner": head.planner, "model": head.model.name, "cluster": head.cluster.name, "micro_steps": plan.M,
        "layers": plan.L, "ranks": plan.G, "nodes": head.cluster.num_nodes, "experts": plan.E, "redundant": head.redundant,
        "slot_depth": head.slot_depth, "replicas_allowed": head.replicas, "objective": head.cost.objective,
        "executable": plan.executable, "static_skew": {"mean": mean_skew(static_MLG), "max": float(skew(static_MLG).max())},
        "skew": {"mean": plan.skew_mean, "p99": float(np.quantile(skew_ML, 0.99)), "max": float(skew_ML.max())},
        "load_gap_mean": float(plan.load_gap_ML.mean()), "replicas": plan.num_replicas,
        "copies": {link.name.lower(): int((plan.transfers.link_C == link).sum()) for link in Link},
        "predicted_s": {name: float(part.sum()) for name, part in plan.cost_ML.parts().items()},
        "predicted_stage_s": float(plan.cost_ML.sum().total_s),
        "cost_model": "calibrated" if head.cluster.calibrated else "uncalibrated", "residual": head.cluster.residual,
        "stops": count_stops(plan.stop_ML),
        "trace_id": head.trace_id, "dealt": head.dealt,
    }  # fmt: skip


def summary_figures(summary: PlanSummary) -> dict[str, Any]:
    """Returns the planning time, the gain of each level and the warnings."""
    return {
        name: getattr(summary, name) for name in ("plan_s", "levels", "rows", "rows_kept_at_start", "unknown_share", "warnings")
    }


def trace_text(figures: dict[str, Any]) -> list[str]:
    """Formats `trace_figures`."""
    length, shape = figures["sequence_length"], figures["models_of_this_shape"]
    unknown = f" ({figures['unknown_tokens']} with unknown routing)" if figures["unknown_tokens"] else ""
    unnamed = f"not named; the shape is that of {', '.join(shape)}" if shape else "not named, of no known shape"
    return [
        f"trace: {figures['tokens']:,} tokens{unknown} in {figures['sequences']:,} sequences, {figures['layers']} layers, "
        f"top-{figures['topk']} of {figures['experts']} experts",
        f"model: {printable(figures['model'] or unnamed)}",
        f"sequence length: {length['min']:,} to {length['max']:,} tokens, median {length['median']:,g},"
        f" mean {length['mean']:,.1f}",
        *popularity_text(figures["popularity"]),
        printable(f"id: {figures['id']}" + (f", source: {figures['source']}" if figures["source"] else "")),
    ]


def popularity_text(figures: dict[str, Any]) -> list[str]:
    """Formats `popularity`."""
    over = figures["hottest_over_mean"]
    named = ", ".join(f"layer {h['layer']} expert {h['expert']} ({h['over_mean']:.2f}x)" for h in figures["hottest"])
    return [
        f"hottest expert of a layer: {over['mean']:.2f}x the mean load on average, {over['max']:.2f}x at most; "
        f"{figures['never_chosen']} experts (over all layers) are never chosen",
        f"hottest of all layers: {named}",
    ]


def workload_text(figures: dict[str, Any]) -> list[str]:
    """Formats `workload_figures`."""
    size, static = figures["tokens_per_micro_step"], figures["static_skew"]
    unknown = f" ({figures['unknown_tokens']} with unknown routing)" if figures["unknown_tokens"] else ""
    skew_line = f"static skew: needs experts that divide over the ranks; {figures['experts']} over {figures['ranks']} do not"
    if static is not None:
        skew_line = f"static skew (experts at home in order): mean {static['mean']:.3f}, p99 {static['p99']:.3f}"
    if figures["step_correlation"] is not None:
        skew_line += f"; one micro-step's loads correlate {figures['step_correlation']:.2f} with the next one's"
    return [
        f"workload: {figures['stage']} of {printable(figures['model'] or 'a model that is not named')}, "
        f"{figures['micro_steps']} micro-steps x {figures['layers']} layers, {figures['ranks']} source ranks, "
        f"top-{figures['topk']} of {figures['experts']} experts",
        f"totals: {figures['tokens']:,} tokens{unknown}, {figures['pairs']:,} (token, expert) pairs; "
        f"{size['min']:,} to {size['max']:,} tokens in a micro-step",
        skew_line,
        *popularity_text(figures["popularity"]),
        f"dealt: {dealing_text(figures['dealt'], 'by another program, which recorded only counts')}",
    ]


def dealing_text(dealt: Dealt | None, unknown: str) -> str:
    """Describes how a batch was packed. Returns `unknown` if the packing was not recorded."""
    return (
        f"{dealt.tokens_per_rank} tokens per rank by {printable(dealt.packer)}, seed {dealt.seed}"
        if dealt is not None
        else unknown
    )
