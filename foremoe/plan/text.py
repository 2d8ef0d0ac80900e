"""Texts about a plan: its summary and the explanation of one row."""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.plan.replicas import Replicas
from foremoe.plan.transfers import Link
from foremoe.problem.cost import Cost
from foremoe.problem.placement import Stop
from foremoe.workload.skew import mean_skew, skew

# Letters: M micro-steps, L layers, G ranks, E experts, S slots per rank.

_EVEN = 1.02  # largest skew that costs next to nothing
_FEW = 0.05  # share of uneven rows that hardly matters

STOPS = {
    Stop.OPTIMAL: "no placement has a better objective ({objective}), which is proven",
    Stop.LIMIT: "the limit of nodes or seconds was met",
    Stop.CANCELLED: "planning was cancelled",
    Stop.FELL_BACK: "the solver failed or was worse, so the row is an earlier level's",
}


def static_load_MLG(plan: Plan) -> Array:
    """Returns int64 [M, L, G], the number of pairs that every rank serves with static placement."""
    at_home_LE = np.argsort(plan.home_LE, axis=1)
    load_MLE = np.take_along_axis(plan.load_MLE, at_home_LE[None], axis=2)
    return load_MLE.reshape(plan.M, plan.L, plan.G, plan.B).sum(axis=3, dtype=np.int64)


def summary(plan: Plan) -> str:
    """Returns a summary of the plan in a few lines of at most 80 characters."""
    head, replicas = plan.header, plan.num_replicas
    before_ML, after_ML = skew(static_load_MLG(plan)), plan.skew_ML
    nodes = "1 node" if head.cluster.num_nodes == 1 else f"{head.cluster.num_nodes} nodes"
    steps = "1 micro-step" if plan.M == 1 else f"{plan.M} micro-steps"
    lines = [
        f"plan: {head.key.stage} of {head.model.name}, {steps} x {plan.L} layers x {plan.G} ranks, R = {head.redundant}",
        f"skew: {mean_skew(static_load_MLG(plan)):.3f} -> {plan.skew_mean:.3f} mean, "
        f"{before_ML.max():.3f} -> {after_ML.max():.3f} worst; planned for {head.cost.objective}",
        *_bounds(plan),
        f"replicas: {replicas / plan.N:.1f} per layer and micro-step ({replicas / (plan.N * plan.G):.2f} per rank); "
        f"{plan.E} experts, {nodes}",
    ]
    if plan.executable:
        sent = f"{len(plan.transfers)} copies over {len(head.schedule.phase_X)} passes"
        lines.append(f"weights sent: {sent}{_by_link(plan.transfers.link_C, head.model.expert_bytes)}")
        if head.schedule.trains and replicas:
            z, node_G = Replicas.of(plan), head.cluster.node_of_rank_G
            link_Z = np.where(node_G[z.rank_Z] == node_G[z.home_Z], Link.PEER, Link.RDMA)
            lines.append(f"gradients returned: {len(link_Z)}{_by_link(link_Z, head.model.gradient_bytes)}")
    else:
        lines.append("moves homes: scored, never executed; the stage leaves out moving weights")
    return "\n".join(lines)


def _by_link(link_X: Array, num_bytes: float) -> str:
    """Returns the gigabytes of transfers by kind of link as text in parentheses. The text is empty if there are none."""
    gigabytes = {link: int((link_X == link).sum()) * num_bytes / 1e9 for link in Link}
    text = ", ".join(f"{link.name.lower()} {size:.1f} GB" for link, size in gigabytes.items() if size)
    return f" ({text})" if text else ""


def _bounds(plan: Plan) -> list[str]:
    """Returns lines about limits: rows that remain uneven with these homes and slots, and rows with a proven optimum."""
    mean_ML = plan.load_MLE.sum(axis=2) / plan.G
    bound_ML = np.divide(plan.load_bound_ML, mean_ML, out=np.ones_like(mean_ML), where=mean_ML > 0)
    uneven = int((bound_ML > _EVEN).sum())
    lines = []
    if uneven > _FEW * plan.N:
        cure = "more slots or other homes" if plan.executable else "other homes"
        rows = f"{uneven} of {plan.N} rows cannot get below {_EVEN}"
        lines += [f"bound: {rows} with these homes and slots;", f"  {cure} would help"]
    optimal = int((plan.stop_ML == Stop.OPTIMAL).sum())
    return lines + ([f"optimal: proven for {optimal} of {plan.N} rows in {plan.header.cost.objective}"] if optimal else [])


def row_name(plan: Plan, micro_step: int, layer: int) -> str:
    """Returns the name of a row, with the micro-step and layer as `explain` takes them, and the layer's index in the model."""
    return f"micro-step {micro_step}, layer {layer} (model layer {int(plan.header.moe_layer_L[layer])})"


def explain(plan: Plan, micro_step: int, layer: int) -> str:
    """Lists rank loads without and with the plan, and every replica with its pairs and the rank whose load it reduces."""
    if micro_step not in range(plan.M) or layer not in range(plan.L):
        there = f"the plan has micro-steps 0 to {plan.M - 1} and layers 0 to {plan.L - 1}"
        raise InputError(f"micro-step {micro_step}, layer {layer} does not exist; {there}.")
    expert_GS, quota_GS = plan.expert_MLGS[micro_step, layer], plan.quota_MLGS[micro_step, layer]
    load_E, home_E = plan.load_MLE[micro_step, layer], plan.home_LE[layer] // plan.B
    before_G = np.bincount(home_E, load_E, minlength=plan.G).astype(np.int64)
    after_G = quota_GS.sum(axis=1)
    node_G = plan.header.cluster.node_of_rank_G
    bound = float(plan.load_bound_ML[micro_step, layer])
    lines = [
        f"{row_name(plan, micro_step, layer)}: {int(load_E.sum())} pairs, mean {before_G.mean():.1f} per rank",
        f"busiest rank: {before_G.max()} at home -> {after_G.max()} planned; proven lower bound {bound:.0f}",
        _price(plan.cost_ML.each(lambda part_ML: part_ML[micro_step, layer])),
        f"stopped: {_stopped(plan, micro_step, layer, after_G.max() < bound + 1.0)}",
        "rank  node  at home  planned  replicas held (expert: pairs, from rank)",
    ]
    for g in range(plan.G):
        held = []
        # If homes move, base slots may also hold experts of other ranks.
        for s in range(plan.S):
            e = int(expert_GS[g, s])
            if e >= 0 and home_E[e] != g:
                far = "" if node_G[home_E[e]] == node_G[g] else ", other node"
                held.append(f"{e}: {quota_GS[g, s]} of {load_E[e]}, from {home_E[e]}{far}")
        lines.append(f"{g:4d}  {node_G[g]:4d}  {before_G[g]:7d}  {after_G[g]:7d}  {'; '.join(held) or '-'}")
    return "\n".join(lines)


def _price(cost: Cost) -> str:
    """Returns the price of a row in all passes in microseconds, part by part."""
    exchanges_s, copies_s = cost.dispatch_s + cost.combine_s, cost.transfer_s + cost.gradient_s
    parts = {"experts": cost.compute_s, "exchanges": exchanges_s, "exposed copies": copies_s, "attention": cost.window_s}
    shown = ", ".join(f"{name} {1e6 * float(seconds):.0f}" for name, seconds in parts.items())
    return f"price, us: {shown}"


def _stopped(plan: Plan, micro_step: int, layer: int, at_bound: bool) -> str:
    """Returns the reason why the search for a row stopped."""
    stop = Stop(plan.stop_ML[micro_step, layer])
    if at_bound:
        return "no placement with these homes and slots has a lower busiest rank"
    if stop != Stop.DONE:
        return STOPS[stop].format(objective=plan.header.cost.objective)
    slots = plan.G * (plan.S - plan.B)
    free = slots - int((plan.quota_MLGS[micro_step, layer, :, plan.B :] > 0).sum())
    if not plan.executable or not slots:
        return "the planner ran to its end" if slots else "there are no redundant slots (R = 0)"
    if not free:
        return f"all {slots} redundant slots are taken"
    why = "; no further copy was found to pay" if "Search(" in plan.header.planner else ""
    return f"{free} of {slots} redundant slots are free{why}"
