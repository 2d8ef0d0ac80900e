"""`Eplb`: the expert-parallel load balancer that DeepSeek published, as a row kernel and a solver."""

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
    """Packs items, heaviest first, each into the lightest bin with room. Every bin gets the same number of items.

    Writes bin * room + position for every item. If a bin holds one item, items are assigned in order.
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
    """Replicates hot experts and packs the copies onto ranks as the published policy does. Writes the expert of every slot.

    Step 1 packs groups of experts onto nodes, step 2 replicates experts inside each node, and step 3 packs the copies of a node
    onto its ranks. Two copies of an expert may be placed on one rank. Loads are float64, but the published code uses float32, so
    loads that are equal in float32 may be ordered differently.
    """
    num_experts, num_physical = load_E.size, expert_P.size
    group, per_node = num_experts // num_groups, num_physical // num_nodes
    at_C = np.empty(num_groups, np.int64)
    _pack(load_E.reshape(num_groups, group).sum(axis=1), num_nodes, at_C)
    # Experts are sorted by node, so each node's part is contiguous.
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
    """Gives copies equal shares, and the remainder to the first copies. Merges an expert's copies on one rank into one slot.

    Rank i of the policy is our rank ``rank_G[i]``. The slots that become free are the last slots of a rank.
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
    """Sets experts and quotas of rows [low, high). Rows without load are not changed."""
    G, S = expert_NGS.shape[1:]
    expert_P = np.empty(G * S, np.int64)
    for n in range(low, high):
        if load_NE[n].max() > 0:
            place_row(load_NE[n].astype(np.float64), num_groups, num_nodes, G, expert_P)
            serve_row(load_NE[n], rank_G, expert_P, expert_NGS[n], quota_NGS[n])


@dataclass(frozen=True)
class Eplb(RankSolver):
    """Applies the published EPLB policy to each row's load: replicates the hottest experts, packs copies and splits evenly.

    All experts are placed again in every row, so most of them change rank from row to row. The result can be rated but not
    executed. All P slots are used, and two copies of one expert on one rank become one slot with both shares. Rows without load
    keep the start placement. `Problem.replicas` has no effect, because experts have no home here. The hierarchical policy keeps
    copies inside a node anyway.

    Source: DeepSeek, "Expert Parallelism Load Balancer" (2025), and the DeepSeek-V3 report (arXiv 2412.19437).

    Attributes:
        num_groups: Number of expert groups, each of which is kept on one node. Defaults to the number of groups of the model. If
            the groups do not divide evenly over the nodes, or nodes differ in size, the policy ignores nodes.
    """

    num_groups: int | None = None

    keeps_homes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_groups is not None:
            whole(self.num_groups, "num_groups of Eplb", 1, 10**6)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows.

        Raises:
            InputError: The experts do not divide evenly over the groups.
        """
        require_start(problem, start)
        num_groups = problem.model.num_expert_groups if self.num_groups is None else self.num_groups
        if problem.E % num_groups:
            raise InputError(f"{problem.E} experts do not divide evenly over {num_groups} groups; change num_groups of Eplb.")
        node_G = problem.cluster.node_of_rank_G
        size_V = np.bincount(node_G)
        num_nodes = len(size_V)
        if num_groups % num_nodes or (size_V != size_V[0]).any():
            num_groups = num_nodes = 1
        # The policy numbers ranks node by node.
        rank_G = np.argsort(node_G, kind="stable") if num_nodes > 1 else np.arange(problem.G)
        load_NE = problem.load_NE
        return edit_rows(start, lambda low, high, *placed: eplb_rows(low, high, load_NE, rank_G, num_groups, num_nodes, *placed))
