"""The figures of one finished plan, counted from its arrays: what every row of `compare` shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link
from foremoe.problem.objective import peak_bytes as peak_bytes_by_rank
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.workload.skew import skew

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts, S slots.

FIGURES = (
    "skew_mean", "skew_p99", "skew_max", "gap_mean", "replicas_per_layer", "moves_per_layer", "max_fanout", "bytes_per_layer",
    "bytes_by_link", "predicted_stage_s", "transfer_s", "speedup_vs_static", "peak_bytes", "plan_us_per_layer",
)  # fmt: skip

_LINKS = {Link.PEER: "peer", Link.RDMA: "rdma", Link.HOST: "host"}


def plan_figures(
    name: str, problem: Problem, plan: Plan, *, first: int, static_s: float, sends: float | None = None
) -> dict[str, Any]:
    """One row of `compare`, over the micro-steps from `first` on; ``plan_us_per_layer`` is left to who timed it.

    Args:
        first: micro-steps left out at the front.
        static_s: predicted seconds of static placement over the same rows.
        sends: how often weights travel per replica; default: as the plan's transfers say.
    """
    skip = first * plan.L
    skew_N = skew(plan.load_NG)[skip:]
    moves, bytes_by_link = traffic(problem, plan, first, sends)
    stage_s, transfer_s = stage_seconds(plan, first)
    return {
        "solver": name,
        "skew_mean": float(skew_N.mean()),
        "skew_p99": float(np.quantile(skew_N, 0.99)),
        "skew_max": float(skew_N.max()),
        "gap_mean": float(plan.load_gap_ML[first:].mean()),
        "replicas_per_layer": float((plan.quota_MLGS[first:, ..., plan.B :] > 0).sum() / (plan.N - skip)),
        "moves_per_layer": moves,
        "max_fanout": max_fanout(plan, first),
        "bytes_per_layer": sum(bytes_by_link.values()),
        "bytes_by_link": bytes_by_link,
        "predicted_stage_s": stage_s,
        "transfer_s": transfer_s,
        "speedup_vs_static": static_s / stage_s if stage_s > 0 else 1.0,
        "peak_bytes": peak_bytes(problem, plan),
        "plan_us_per_layer": None,
        "n_solved": plan.N - skip,
    }


def stage_seconds(plan: Plan, first: int = 0) -> tuple[float, float]:
    """Predicted seconds from micro-step `first` on, and those of weight and gradient transfer among them.

    Where homes move, the weights' way is not in the first figure: such plans are scored for their balance.
    """
    parts = {name: float(part[first:].sum()) for name, part in plan.cost_ML.parts().items()}
    transfer_s = parts["transfer_s"] + parts["gradient_s"]
    return sum(parts.values()) - (0.0 if plan.executable else transfer_s), transfer_s


def peak_bytes(problem: Problem, plan: Plan) -> int:
    """Most bytes on any rank (see `objective.peak_bytes`)."""
    placement = Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS)
    return int(peak_bytes_by_rank(problem, placement).max())


def max_fanout(plan: Plan, first: int = 0) -> int:
    """Largest number of copies that leave one rank for one row: slots that serve an expert away from its home."""
    at_M, at_L, at_G, at_S = np.nonzero(plan.quota_MLGS[first:] > 0)
    home = plan.home_LE[at_L, plan.expert_MLGS[first:][at_M, at_L, at_G, at_S]] // plan.B
    away = home != at_G
    if not away.any():
        return 0
    row = at_M[away] * plan.L + at_L[away]
    return int(np.bincount(row * plan.G + home[away]).max())


def traffic(problem: Problem, plan: Plan, first: int = 0, sends: float | None = None) -> tuple[float, dict[str, float]]:
    """Moves per row, and bytes per row by link class: weights for every pass and gradients home.

    Moves are replicas made; where homes move, slots whose expert their rank did not hold in the micro-step before.
    """
    rows = plan.N - first * plan.L
    counts = _copied(problem, plan, first, sends) if plan.executable else _re_placed(problem, plan, first)
    moves, link = counts
    return moves / rows, {name: total / rows for name, total in link.items()}


def _copied(problem: Problem, plan: Plan, first: int, sends: float | None) -> tuple[int, dict[str, float]]:
    model, node_G = problem.model, problem.cluster.node_of_rank_G
    counted_C = plan.transfers.micro_step_C >= first
    at_M, at_L, at_G, at_S = np.nonzero(plan.quota_MLGS[first:, ..., plan.B :] > 0)
    copies = {name: float((counted_C & (plan.transfers.link_C == path)).sum()) for path, name in _LINKS.items()}
    if sends is not None and counted_C.any():
        scale = sends * len(at_M) / float(counted_C.sum())
        copies = {name: count * scale for name, count in copies.items()}
    link = {name: count * model.expert_bytes for name, count in copies.items()}
    if problem.stage == "update":
        home = plan.home_LE[at_L, plan.expert_MLGS[first:, ..., plan.B :][at_M, at_L, at_G, at_S]] // plan.B
        near = int((node_G[home] == node_G[at_G]).sum())
        link["peer"] += near * model.gradient_bytes
        link["rdma"] += (len(home) - near) * model.gradient_bytes
    return len(at_M), link


def _re_placed(problem: Problem, plan: Plan, first: int) -> tuple[int, dict[str, float]]:
    """An expert that comes to a rank travels inside the node if any rank of it held the expert before."""
    model, node_G = problem.model, problem.cluster.node_of_rank_G
    link, moves = dict.fromkeys(_LINKS.values(), 0.0), 0
    before_LGE = np.zeros((plan.L, plan.G, plan.E), bool)
    at_L, at_E = np.indices((plan.L, plan.E)).reshape(2, -1)
    before_LGE[at_L, plan.home_LE[at_L, at_E] // plan.B, at_E] = True
    for m in range(plan.M):
        now_LGE = _held(plan, m)
        if m >= first:
            at_L, at_G, at_E = np.nonzero(now_LGE & ~before_LGE)
            in_node = np.stack([before_LGE[:, node_G == node].any(axis=1) for node in range(problem.cluster.num_nodes)])
            near = int(in_node[node_G[at_G], at_L, at_E].sum())
            moves += len(at_L)
            link["peer"] += near * model.expert_bytes
            link["rdma"] += (len(at_L) - near) * model.expert_bytes
        before_LGE = now_LGE
    return moves, link


def _held(plan: Plan, micro_step: int) -> Array:
    held_LGE = np.zeros((plan.L, plan.G, plan.E), bool)
    at_L, at_G, at_S = np.nonzero(plan.expert_MLGS[micro_step] >= 0)
    held_LGE[at_L, at_G, plan.expert_MLGS[micro_step][at_L, at_G, at_S]] = True
    return held_LGE
