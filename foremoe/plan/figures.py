"""Figures of a finished plan, computed from its arrays, which `compare` shows."""

from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.trainer import Trainer
from foremoe.plan.plan import Plan
from foremoe.plan.replicas import Replicas
from foremoe.plan.transfers import Link
from foremoe.problem.memory import Fit, fit
from foremoe.problem.problem import Problem

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts, S slots.

FIGURES = (
    "skew_mean", "skew_p99", "skew_max", "gap_mean", "replicas_per_layer", "moves_per_layer", "max_fanout", "bytes_per_layer",
    "bytes_by_link", "predicted_stage_s", "transfer_s", "predicted_speedup_vs_static", "peak_bytes", "peak_bytes_with_reforward",
    "fits", "host_bytes", "slots_per_rank", "plan_us_per_layer",
)  # fmt: skip


def plan_figures(
    name: str, problem: Problem, plan: Plan, *, static_s: float, counted_ML: Array | None = None, trainer: Trainer | None = None
) -> dict[str, Any]:
    """Returns the figures that `compare` shows for one planner, over the counted rows. The caller fills in ``plan_us_per_layer``.

    `static_s` is the predicted time in seconds of the same rows with static placement. By default, all rows are counted.
    """
    counted_ML = np.ones((plan.M, plan.L), bool) if counted_ML is None else counted_ML
    num_rows = int(counted_ML.sum())
    loaded_ML = counted_ML & plan.load_MLE.any(axis=2)
    skew_N = plan.skew_ML[loaded_ML if loaded_ML.any() else counted_ML]
    moves, bytes_by_link = traffic(problem, plan, counted_ML)
    stage_s, transfer_s = stage_seconds(plan, counted_ML)
    return {
        "solver": name, "skew_mean": float(skew_N.mean()), "skew_p99": float(np.quantile(skew_N, 0.99)),
        "skew_max": float(skew_N.max()), "gap_mean": float(plan.load_gap_ML[loaded_ML].mean()) if loaded_ML.any() else 0.0,
        "replicas_per_layer": float((plan.quota_MLGS[counted_ML][..., plan.B :] > 0).sum() / num_rows), "moves_per_layer": moves,
        "max_fanout": max_fanout(plan, counted_ML), "bytes_per_layer": sum(bytes_by_link.values()),
        "bytes_by_link": bytes_by_link, "predicted_stage_s": stage_s, "transfer_s": transfer_s,
        "predicted_speedup_vs_static": static_s / stage_s if stage_s > 0 else 1.0,
        **memory_figures(fit(problem, plan.placement, trainer=trainer)), "host_bytes": host_bytes(problem, plan),
        "slots_per_rank": slots_per_rank(plan), "plan_us_per_layer": None, "n_solved": num_rows,
    }  # fmt: skip


def stage_seconds(plan: Plan, counted_ML: Array | None = None) -> tuple[float, float]:
    """Returns the predicted seconds of the counted rows, and the part of them that weight and gradient transfers take.

    By default, all rows are counted. If homes move, the first figure does not include transfers, because such plans are rated
    only by their balance.
    """
    counted_ML = np.ones((plan.M, plan.L), bool) if counted_ML is None else counted_ML
    parts = {name: float(part[counted_ML].sum()) for name, part in plan.cost_ML.parts().items()}
    transfer_s = parts["transfer_s"] + parts["gradient_s"]
    return sum(parts.values()) - (0.0 if plan.executable else transfer_s), transfer_s


def memory_figures(verdict: Fit) -> dict[str, Any]:
    """Returns the result of the memory check as figures for `compare`."""
    return {"peak_bytes": verdict.peak_bytes, "peak_bytes_with_reforward": verdict.reforward_bytes, "fits": verdict.fits}


def host_bytes(problem: Problem, plan: Plan) -> int:
    """Returns the bytes of the fullest node's host store. The store holds each expert once that is copied from it."""
    t = plan.transfers
    host_C = t.link_C == Link.HOST
    node_C = problem.cluster.node_of_rank_G[t.dst_C[host_C]].astype(np.int64)
    stored = np.unique((node_C * plan.L + t.layer_C[host_C]) * plan.E + t.expert_C[host_C])
    return int(np.bincount(stored // (plan.L * plan.E)).max(initial=0)) * problem.model.expert_bytes


def slots_per_rank(plan: Plan) -> int:
    """Returns the number of redundant slots per rank that the plan needs, which is 0 if it has no replicas."""
    return plan.S - plan.B if (plan.quota_MLGS[..., plan.B :] > 0).any() else 0


def max_fanout(plan: Plan, counted_ML: Array) -> int:
    """Returns the largest number of copies that any rank sends for a single row. Each slot that serves a replica is a copy."""
    replicas = Replicas.of(plan, counted_ML)
    return int(np.bincount(replicas.row_Z * plan.G + replicas.home_Z).max(initial=0))


def traffic(problem: Problem, plan: Plan, counted_ML: Array | None = None) -> tuple[float, dict[str, float]]:
    """Returns the mean number of moves per row, and the mean bytes of weights and gradients per row by kind of link.

    The means are over the counted rows, or over all rows by default. A move is a new replica. If homes move, a move is a slot
    whose expert the rank did not hold in the micro-step before.
    """
    counted_ML = np.ones((plan.M, plan.L), bool) if counted_ML is None else counted_ML
    num_rows = counted_ML.sum()
    moves, link_bytes = (_copy_bytes if plan.executable else _move_bytes)(problem, plan, counted_ML)
    return float(moves / num_rows), {name: float(total / num_rows) for name, total in link_bytes.items()}


def _copy_bytes(problem: Problem, plan: Plan, counted_ML: Array) -> tuple[int, dict[str, float]]:
    model, node_G, t = problem.model, problem.cluster.node_of_rank_G, plan.transfers
    counted_C, replicas = counted_ML[t.micro_step_C, t.layer_C], Replicas.of(plan, counted_ML)
    num_copies = {link.name.lower(): float((counted_C & (t.link_C == link)).sum()) for link in Link}
    link_bytes = {name: num * model.expert_bytes for name, num in num_copies.items()}
    if problem.stage == "update":
        num_near = int((node_G[replicas.home_Z] == node_G[replicas.rank_Z]).sum())
        link_bytes["peer"] += num_near * model.gradient_bytes
        link_bytes["rdma"] += (len(replicas.rank_Z) - num_near) * model.gradient_bytes
    return len(replicas.rank_Z), link_bytes


def _move_bytes(problem: Problem, plan: Plan, counted_ML: Array) -> tuple[int, dict[str, float]]:
    """Counts moves between micro-steps. An expert is sent inside the node if any rank of the node held it before."""
    model, node_G = problem.model, problem.cluster.node_of_rank_G
    link_bytes, moves = {link.name.lower(): 0.0 for link in Link}, 0
    before_LGE = np.zeros((plan.L, plan.G, plan.E), bool)
    at_L, at_E = np.indices((plan.L, plan.E)).reshape(2, -1)
    before_LGE[at_L, plan.home_LE[at_L, at_E] // plan.B, at_E] = True
    for m in range(plan.M):
        now_LGE = _contents(plan, m)
        at_L, at_G, at_E = np.nonzero(now_LGE & ~before_LGE & counted_ML[m, :, None, None])
        in_node = np.stack([before_LGE[:, node_G == node].any(axis=1) for node in range(problem.cluster.num_nodes)])
        num_near = int(in_node[node_G[at_G], at_L, at_E].sum())
        moves += len(at_L)
        link_bytes["peer"] += num_near * model.expert_bytes
        link_bytes["rdma"] += (len(at_L) - num_near) * model.expert_bytes
        before_LGE = now_LGE
    return moves, link_bytes


def _contents(plan: Plan, micro_step: int) -> Array:
    """Returns bool [L, G, E], the experts in the slots of every rank."""
    held_LGE = np.zeros((plan.L, plan.G, plan.E), bool)
    at_L, at_G, at_S = np.nonzero(plan.expert_MLGS[micro_step] >= 0)
    held_LGE[at_L, at_G, plan.expert_MLGS[micro_step][at_L, at_G, at_S]] = True
    return held_LGE
