"""Data of every row for the page: loads, replicas with their quotas and sources, bounds, and predicted times."""

import dataclasses

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.plan.replicas import Replicas
from foremoe.plan.transfers import Link
from foremoe.problem.cost import Cost
from foremoe.problem.problem import Problem
from foremoe.report.packing import Packer
from foremoe.report.reasons import BestCopies

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts, Z replicas, C copies.

FROM_HOST = -1
NOT_SENT = -2  # the replica is still in its buffer from an earlier use, or the plan is scored and never executed


def sources_of(plan: Plan, replicas: Replicas) -> Array:
    """Returns the rank that first sends the weights of each replica, int16 [Z]. It may be `FROM_HOST` or `NOT_SENT` instead."""
    source_Z = np.full(len(replicas.row_Z), NOT_SENT, np.int16)
    # The first copy of a replica counts. The last write wins, so the copies are written in reverse order.
    source_Z[replica_of_copies(plan, replicas)[::-1]] = plan.transfers.src_C[::-1]
    return source_Z


def replica_of_copies(plan: Plan, replicas: Replicas) -> Array:
    """Returns the index of the replica that each of the plan's copies fills, int64 [C]."""
    key_Z = (replicas.row_Z * plan.G + replicas.rank_Z) * plan.S + replicas.slot_Z
    t = plan.transfers
    row_C = t.micro_step_C.astype(np.int64) * plan.L + t.layer_C
    return np.searchsorted(key_Z, (row_C * plan.G + t.dst_C) * plan.S + t.slot_C)


def require_belongs(problem: Problem, plan: Plan) -> None:
    """Raises InputError unless `plan` was made for `problem`. Both must have the same load, homes, ranks and redundant slots."""
    want = (problem.M, problem.L, problem.G, problem.S)
    if plan.expert_MLGS.shape != want:
        have = list(plan.expert_MLGS.shape)
        raise InputError(f"the plan has [M, L, G, S] = {have} and the problem {list(want)}; give the plan of this problem.")
    if (plan.load_MLE != problem.load_MLE).any():
        rows = int((plan.load_MLE != problem.load_MLE).any(axis=2).sum())
        raise InputError(
            f"the plan's load differs from the problem's in {rows} of {plan.N} rows; give the load that was planned."
        )
    if (plan.home_LE != problem.home_LE).any():
        raise InputError("the plan's homes differ from the problem's; give the problem with the homes that were planned for.")


def pack_rows(packer: Packer, plan: Plan, replicas: Replicas, static: Cost) -> None:
    """Adds the data to `packer` that the page needs to show a chosen row."""
    packer.add("load_MLE", plan.load_MLE, "int32")
    packer.add("home_rank_LE", plan.home_LE // plan.B, "uint16")
    packer.add("replicas_N", np.bincount(replicas.row_Z, minlength=plan.N), "int32")
    packer.add("rank_Y", replicas.rank_Z, "uint16")
    packer.add("expert_Y", replicas.expert_Z, "uint16")
    packer.add("quota_Y", plan.quota_NGS[replicas.row_Z, replicas.rank_Z, replicas.slot_Z], "int32")
    packer.add("source_Y", sources_of(plan, replicas), "int16")
    packer.add("load_bound_ML", np.ceil(plan.load_bound_ML - 1e-6), "int32")
    packer.add("static_s_ML", static.total_s, "float32")
    packer.add("planned_s_ML", plan.cost_ML.total_s, "float32")


def pack_reasons(packer: Packer, copies: BestCopies) -> None:
    """Adds to `packer` the best copy for every row without copies."""
    for name, values_W in copies._asdict().items():
        seconds = name.endswith("_s_W")
        packer.add(f"best_{name}", values_W, "float32" if seconds else "int32", differences=name == "row_W")


def link_bytes(problem: Problem, plan: Plan, replicas: Replicas) -> dict[str, Array]:
    """Returns the bytes of weights and returned gradients for each kind of link and direction, float64 [G].

    Weights are counted in all passes. Tokens are not included.
    """
    G, t = plan.G, plan.transfers
    weight, gradient = problem.model.expert_bytes, problem.model.gradient_bytes
    out = {}
    for link, name in ((Link.PEER, "peer"), (Link.RDMA, "rdma")):
        out[f"{name} out"] = np.bincount(t.src_C[t.link_C == link], minlength=G) * float(weight)
        out[f"{name} in"] = np.bincount(t.dst_C[t.link_C == link], minlength=G) * float(weight)
    out["host in"] = np.bincount(t.dst_C[t.link_C == Link.HOST], minlength=G) * float(weight)
    if problem.stage == "update" and plan.executable:
        node_G = problem.cluster.node_of_rank_G
        near_Z = node_G[replicas.rank_Z] == node_G[replicas.home_Z]
        for name, mask_Z in (("peer", near_Z), ("rdma", ~near_Z)):
            out[f"{name} out"] += np.bincount(replicas.rank_Z[mask_Z], minlength=G) * float(gradient)
            out[f"{name} in"] += np.bincount(replicas.home_Z[mask_Z], minlength=G) * float(gradient)
    return out


def executable_problem(problem: Problem, plan: Plan) -> Problem:
    """Returns `problem` with the machine, homes, slots, schedule and objective of `plan`."""
    head = plan.header
    return dataclasses.replace(
        problem, model=head.model, cluster=head.cluster, cost=head.cost, slot_depth=head.slot_depth, schedule=head.schedule,
        redundant=head.redundant, replicas=head.replicas, home_LE=plan.home_LE, stage=head.key.stage,
    )  # fmt: skip
