"""Eplb: the published expert-parallel load balancer of DeepSeek, as a row kernel and a solver."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.levels import RankSolver
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers.base import edit_rows, require_start
from foremoe.solvers.split.kernels import even_row

# Letters: N rows, G ranks, S slots per rank, E logical experts, P = G*S physical slots, X copies in a node, V nodes;
# I items and B bins of a packing, C groups of experts.


@kernel
def _pack(weight_I, num_bins, slot_I):
    """Heaviest first, each item to the lightest bin with room; every bin gets equally many.

    Writes bin * room + place of every item; bins of one item take the items in order.
    """
    room = weight_I.size // num_bins
    if room == 1:
        slot_I[:] = np.arange(num_bins)
        return
    weight_B, count_B = np.zeros(num_bins), np.zeros(num_bins, np.int64)
    for item in np.argsort(-weight_I, kind="mergesort"):
        chosen = -1
        for b in range(num_bins):
            if count_B[b] < room and (chosen < 0 or weight_B[b] < weight_B[chosen]):
                chosen = b
        slot_I[item] = chosen * room + count_B[chosen]
        weight_B[chosen] += weight_I[item]
        count_B[chosen] += 1


@kernel
def place_row(load_E, num_groups, num_nodes, num_ranks, expert_P):
    """Replicates hot experts and packs the copies onto ranks, as the published policy does; writes the expert of every slot.

    Step 1 packs groups of experts to nodes, step 2 replicates experts inside each node, step 3 packs the copies of a node to
    its ranks. Two copies of an expert may meet on one rank. Loads are float64 where the published code has float32: loads that
    float32 cannot tell apart may come out in another order.
    """
    num_experts, num_physical = load_E.size, expert_P.size
    group, per_node = num_experts // num_groups, num_physical // num_nodes
    at_C = np.empty(num_groups, np.int64)
    _pack(load_E.reshape(num_groups, group).sum(axis=1), num_nodes, at_C)
    # Experts in the order of nodes; each node's part is contiguous.
    local_E = np.empty(num_experts, np.int64)
    for e in range(num_experts):
        local_E[at_C[e // group] * group + e % group] = e
    width = num_experts // num_nodes
    slot_X = np.empty(per_node, np.int64)
    for node in range(num_nodes):
        expert_X, count_E = np.arange(per_node), np.ones(width, np.int64)
        share_E = load_E[local_E[node * width : (node + 1) * width]]
        for x in range(width, per_node):
            hot = np.argmax(share_E)
            expert_X[x] = hot
            count_E[hot] += 1
            share_E[hot] = load_E[local_E[node * width + hot]] / count_E[hot]
        _pack(share_E[expert_X], num_ranks // num_nodes, slot_X)
        for x in range(per_node):
            expert_P[node * per_node + slot_X[x]] = local_E[node * width + expert_X[x]]


@kernel
def serve_row(load_E, rank_G, expert_P, expert_GS, quota_GS):
    """Every copy an equal share (the first ones the remainder); copies of one expert on one rank become one slot.

    Place i of the policy is rank ``rank_G[i]``; slots that merging frees are a rank's last ones.
    """
    G, S = expert_GS.shape
    share_GS = np.empty((G, S), np.int64)
    even_row(load_E, expert_P.reshape(G, S), share_GS)
    expert_GS[:, :] = -1
    quota_GS[:, :] = 0
    for i in range(G):
        g, used = rank_G[i], 0
        for s in range(S):
            e, slot = expert_P[i * S + s], 0
            while slot < used and expert_GS[g, slot] != e:
                slot += 1
            used = max(used, slot + 1)
            expert_GS[g, slot] = e
            quota_GS[g, slot] += share_GS[i, s]


@kernel
def eplb_rows(low, high, load_NE, rank_G, num_groups, num_nodes, expert_NGS, quota_NGS):
    """Places and serves rows [low, high); rows without load stay as they are."""
    G, S = expert_NGS.shape[1:]
    expert_P = np.empty(G * S, np.int64)
    for n in range(low, high):
        if load_NE[n].max() > 0:
            place_row(load_NE[n].astype(np.float64), num_groups, num_nodes, G, expert_P)
            serve_row(load_NE[n], rank_G, expert_P, expert_NGS[n], quota_NGS[n])


@dataclass(frozen=True)
class Eplb(RankSolver):
    """The published EPLB policy on each row's own load: replicates the hottest experts, packs replicas, splits evenly.

    Re-places all experts, so most of them change rank from row to row: it is scored, never executed. All P slots are used; two
    copies of one expert on one rank become one slot with both shares. Rows without load keep the start. The node limit of
    `Problem.replicas` has no meaning for experts without a home; the hierarchical policy keeps copies inside a node anyway.

    Source: DeepSeek, "Expert Parallelism Load Balancer" (2025), and the DeepSeek-V3 report (arXiv 2412.19437).

    Attributes:
        num_groups: groups of experts to keep on one node each; None takes the model's. Where groups do not divide over the
            nodes, or nodes differ in size, the policy ignores nodes.
    """

    num_groups: int | None = None

    keeps_homes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_groups is not None:
            whole(self.num_groups, "num_groups of Eplb", 1, 10**6)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows.

        Raises:
            InputError: the experts do not divide over the groups.
        """
        require_start(problem, start)
        num_groups = problem.model.num_expert_groups if self.num_groups is None else self.num_groups
        if problem.E % num_groups:
            raise InputError(f"{problem.E} experts do not divide over {num_groups} groups; choose another num_groups for Eplb.")
        node_G = problem.cluster.node_of_rank_G
        size_V = np.bincount(node_G)
        num_nodes = len(size_V)
        if num_groups % num_nodes or (size_V != size_V[0]).any():
            num_groups = num_nodes = 1
        # The policy counts ranks node by node.
        rank_G = np.argsort(node_G, kind="stable") if num_nodes > 1 else np.arange(problem.G)
        load_NE = problem.load_NE
        return edit_rows(start, lambda low, high, *placed: eplb_rows(low, high, load_NE, rank_G, num_groups, num_nodes, *placed))
