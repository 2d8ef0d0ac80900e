"""Eplb: the published expert-parallel load balancer of DeepSeek, as a pure function, a row kernel and a solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.levels import RankSolver
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem

# Letters: L layers (rows), G ranks, S slots per rank, E logical experts, P = G*S physical slots, X copies of an expert;
# I items and K packs of a packing, C = number of groups of experts.


def rebalance(
    load_LE: npt.ArrayLike, num_physical: int, num_groups: int, num_nodes: int, num_ranks: int
) -> tuple[Array, Array, Array]:
    """Replicates hot experts and packs the copies onto ranks, layer by layer, as the published policy does.

    Step 1 packs groups of experts to nodes, step 2 replicates experts inside each node, step 3 packs the copies of a node to
    its ranks. Where groups do not divide over nodes, all ranks count as one node and all experts as one group. Two copies of
    an expert may meet on one rank.

    Args:
        load_LE: load per layer and logical expert, whole numbers or not, >= 0.
        num_physical: P, physical slots of all ranks; a multiple of num_ranks.
        num_groups: groups of neighbouring experts; experts divide over them.
        num_nodes: nodes; ranks divide over them, in order.
        num_ranks: G.

    Returns:
        ``physical_to_logical_LP`` int64, the expert in every slot; ``logical_to_physical_LEX`` int64, the slots of every expert
        by copy, -1 after the last; ``num_copies_LE`` int64.

    Raises:
        InputError: negative loads or numbers that do not divide.

    Computed in float64 where the published code uses float32: loads that float32 cannot tell apart may come out in another order.

    Source: DeepSeek, "Expert Parallelism Load Balancer" (2025), and the DeepSeek-V3 report (arXiv 2412.19437).
    """
    load_LE = _checked(np.asarray(load_LE), num_physical, num_groups, num_nodes, num_ranks)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_layers, num_experts = load_LE.shape
    physical_LP, copy_LP = np.empty((2, num_layers, num_physical), np.int64)
    for layer, load_E in enumerate(load_LE):
        physical_LP[layer], copy_LP[layer] = _place(load_E, num_physical, num_groups, num_nodes, num_ranks)
    num_copies_LE = np.stack([np.bincount(row_P, minlength=num_experts) for row_P in physical_LP])
    logical_LEX = np.full((num_layers, num_experts, num_copies_LE.max()), -1, np.int64)
    logical_LEX[np.arange(num_layers)[:, None], physical_LP, copy_LP] = np.arange(num_physical)
    return physical_LP, logical_LEX, num_copies_LE


def _checked(load_LE: Array, num_physical: int, num_groups: int, num_nodes: int, num_ranks: int) -> Array:
    if load_LE.ndim != 2 or load_LE.dtype.kind not in "iuf" or 0 in load_LE.shape:
        raise InputError(f"load_LE must hold numbers of shape [layers, experts]; got {load_LE.dtype} {list(load_LE.shape)}.")
    if not np.isfinite(load_LE).all() or load_LE.min() < 0:
        raise InputError("load_LE holds negative or infinite loads or NaN; loads are finite and at least 0.")
    num_experts = load_LE.shape[1]
    if min(num_physical, num_groups, num_nodes, num_ranks) < 1 or num_physical < num_experts:
        raise InputError(
            f"{num_physical} physical slots, {num_groups} groups, {num_nodes} nodes and {num_ranks} ranks do not hold"
            f" {num_experts} experts; every count is at least 1 and there are at least as many slots as experts."
        )
    if num_experts % num_groups or num_physical % num_ranks or num_ranks % num_nodes:
        raise InputError(
            f"{num_experts} experts must divide over {num_groups} groups, {num_physical} slots over {num_ranks} ranks and"
            f" {num_ranks} ranks over {num_nodes} nodes."
        )
    return load_LE.astype(np.float64)


def _pack(weight_I: Array, num_packs: int) -> tuple[Array, Array]:
    """Heaviest first, each item to the lightest pack with room; every pack gets equally many.

    Returns:
        pack of each item and its place in it. Packs of one item take the items in order.
    """
    room = len(weight_I) // num_packs
    if room == 1:
        return np.arange(num_packs), np.zeros(num_packs, np.int64)
    pack_I, place_I = np.empty((2, len(weight_I)), np.int64)
    weight_K, count_K = np.zeros(num_packs), np.zeros(num_packs, np.int64)
    for item in np.argsort(-weight_I, kind="stable"):
        pack = np.argmin(np.where(count_K < room, weight_K, np.inf))
        pack_I[item], place_I[item] = pack, count_K[pack]
        weight_K[pack] += weight_I[item]
        count_K[pack] += 1
    return pack_I, place_I


def _replicate(load_E: Array, num_copies: int) -> tuple[Array, Array]:
    """One copy of every expert, then again and again one more of the expert with the most load per copy.

    Returns:
        expert of each copy and which copy of that expert it is.
    """
    expert_X, copy_X = np.arange(num_copies), np.zeros(num_copies, np.int64)
    count_E = np.ones(len(load_E), np.int64)
    for x in range(len(load_E), num_copies):
        e = np.argmax(load_E / count_E)
        expert_X[x], copy_X[x] = e, count_E[e]
        count_E[e] += 1
    return expert_X, copy_X


def _place(load_E: Array, num_physical: int, num_groups: int, num_nodes: int, num_ranks: int) -> tuple[Array, Array]:
    """One layer: the expert in every physical slot and which copy it is. Groups divide over nodes."""
    group = len(load_E) // num_groups
    # Step 1: pack groups to nodes.
    node_C, place_C = _pack(load_E.reshape(num_groups, group).sum(axis=1), num_nodes)
    order_C = np.lexsort((place_C, node_C))
    expert_P, copy_P = np.empty((2, num_physical), np.int64)
    per_node = num_physical // num_nodes
    for node, groups in enumerate(order_C.reshape(num_nodes, -1)):
        local_E = (groups[:, None] * group + np.arange(group)).ravel()
        # Step 2: replicate experts inside the node.
        expert_X, copy_X = _replicate(load_E[local_E], per_node)
        share_X = (load_E[local_E] / np.bincount(expert_X))[expert_X]
        # Step 3: pack copies to the node's ranks.
        rank_X, place_X = _pack(share_X, num_ranks // num_nodes)
        slot_X = node * per_node + rank_X * (num_physical // num_ranks) + place_X
        expert_P[slot_X], copy_P[slot_X] = local_E[expert_X], copy_X
    return expert_P, copy_P


@kernel
def _pack_kernel(weight_I, num_packs, slot_I):  # type: ignore[no-untyped-def]
    """`_pack` in one number per item: pack * room + place."""
    room = weight_I.size // num_packs
    if room == 1:
        slot_I[:] = np.arange(num_packs)
        return
    weight_K, count_K = np.zeros(num_packs), np.zeros(num_packs, np.int64)
    for item in np.argsort(-weight_I, kind="mergesort"):
        pack = -1
        for k in range(num_packs):
            if count_K[k] < room and (pack < 0 or weight_K[k] < weight_K[pack]):
                pack = k
        slot_I[item] = pack * room + count_K[pack]
        weight_K[pack] += weight_I[item]
        count_K[pack] += 1


@kernel
def place_row(load_E, num_groups, num_nodes, num_ranks, expert_P):  # type: ignore[no-untyped-def]
    """`rebalance` for one row of float64 loads, without which copy is which; groups divide over nodes."""
    num_experts, num_physical = load_E.size, expert_P.size
    group, per_node = num_experts // num_groups, num_physical // num_nodes
    load_C = np.zeros(num_groups)
    for c in range(num_groups):
        load_C[c] = load_E[c * group : (c + 1) * group].sum()
    at_C = np.empty(num_groups, np.int64)
    _pack_kernel(load_C, num_nodes, at_C)
    # Experts in the order of nodes; each node's part is contiguous.
    local_E = np.empty(num_experts, np.int64)
    for c in range(num_groups):
        for i in range(group):
            local_E[at_C[c] * group + i] = c * group + i
    width = num_experts // num_nodes
    count_E, share_E = np.empty(width, np.int64), np.empty(width)
    expert_X, share_X, slot_X = np.empty(per_node, np.int64), np.empty(per_node), np.empty(per_node, np.int64)
    for node in range(num_nodes):
        for i in range(width):
            expert_X[i], count_E[i], share_E[i] = i, 1, load_E[local_E[node * width + i]]
        for x in range(width, per_node):
            hot = np.argmax(share_E)
            expert_X[x] = hot
            count_E[hot] += 1
            share_E[hot] = load_E[local_E[node * width + hot]] / count_E[hot]
        for x in range(per_node):
            share_X[x] = share_E[expert_X[x]]
        _pack_kernel(share_X, num_ranks // num_nodes, slot_X)
        for x in range(per_node):
            expert_P[node * per_node + slot_X[x]] = local_E[node * width + expert_X[x]]


@kernel
def serve_row(load_E, rank_G, expert_P, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """Every copy an equal share (the first ones the remainder); copies of one expert on one rank become one slot.

    Place i of the policy is rank ``rank_G[i]``; slots that merging frees are a rank's last ones.
    """
    G, S = expert_GS.shape
    count_E, done_E = np.zeros(load_E.size, np.int64), np.zeros(load_E.size, np.int64)
    for e in expert_P:
        count_E[e] += 1
    expert_GS[:, :] = -1
    quota_GS[:, :] = 0
    for i in range(G):
        g, used = rank_G[i], 0
        for s in range(S):
            e = expert_P[i * S + s]
            share = load_E[e] // count_E[e]
            if done_E[e] < load_E[e] % count_E[e]:
                share += 1
            done_E[e] += 1
            slot = 0
            while slot < used and expert_GS[g, slot] != e:
                slot += 1
            if slot == used:
                used += 1
            expert_GS[g, slot] = e
            quota_GS[g, slot] += share


@kernel
def eplb_rows(low, high, load_NE, rank_G, num_groups, num_nodes, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
    """Places and serves rows [low, high); rows without load stay as they are."""
    G, S = expert_NGS.shape[1:]
    expert_P = np.empty(G * S, np.int64)
    for n in range(low, high):
        if load_NE[n].max() > 0:
            place_row(load_NE[n].astype(np.float64), num_groups, num_nodes, G, expert_P)
            serve_row(load_NE[n], rank_G, expert_P, expert_NGS[n], quota_NGS[n])


@dataclass(frozen=True)
class Eplb(RankSolver):
    """The published EPLB policy on every row's own load: replicate the hottest by load per copy, pack, split evenly.

    Re-places all experts, so most of them change rank from row to row: it is scored, never executed. All P slots are used; two
    copies of one expert on one rank become one slot with both shares. Rows without load keep the start. The node limit of
    `Problem.replicas` has no meaning for experts without a home; the hierarchical policy keeps copies inside a node anyway.

    Attributes:
        num_groups: groups of experts to keep on one node each; None takes the model's. Where groups do not divide over the
            nodes, or nodes differ in size, the policy ignores nodes.
    """

    num_groups: int | None = None

    keeps_homes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_groups is not None and (
            isinstance(self.num_groups, bool) or not isinstance(self.num_groups, int) or self.num_groups < 1
        ):
            raise InputError(f"Eplb needs at least one group of experts, or None for the model's; got {self.num_groups!r}.")

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows.

        Raises:
            InputError: the experts do not divide over the groups.
        """
        num_groups = problem.model.num_expert_groups if self.num_groups is None else self.num_groups
        if problem.E % num_groups:
            raise InputError(f"{problem.E} experts do not divide over {num_groups} groups; choose another num_groups for Eplb.")
        size_V = np.bincount(problem.cluster.node_of_rank_G)
        num_nodes = len(size_V)
        if num_groups % num_nodes or (size_V != size_V[0]).any():
            num_groups = num_nodes = 1
        # The policy counts ranks node by node.
        node_G = problem.cluster.node_of_rank_G
        rank_G = np.argsort(node_G, kind="stable") if num_nodes > 1 else np.arange(problem.G)
        load_NE, expert_NGS, quota_NGS = problem.load_NE, start.expert_NGS.copy(), start.quotas_NGS.copy()

        def block(low: int, high: int) -> None:
            eplb_rows(low, high, load_NE, rank_G, num_groups, num_nodes, expert_NGS, quota_NGS)

        done_N = for_rows(block, problem.N)
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS, stop_N=np.where(done_N, Stop.DONE, Stop.CANCELLED))
