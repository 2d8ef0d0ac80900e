"""Row kernels of `Transitions`: what a placement costs where some replicas are there already, and how to use those."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.flow import split_row
from foremoe.solvers.kernels.price import (
    BACK_PEER,
    BACK_RDMA,
    COPY_PEER,
    COPY_RDMA,
    HIDE_BACKWARD,
    HIDE_FORWARD,
    REPLICA_PEER,
    REPLICA_RDMA,
    RETURNS,
    price_row,
)
from foremoe.solvers.kernels.prune import clean_row

# Letters: G ranks, S slots per rank, R redundant slots, E experts, V nodes, P buffers of a rank, K rates, 2 (peer, RDMA).

# Any maximum load.
UNLIMITED = 2**31


@kernel
def holds(g, e, buffer_GP):  # type: ignore[no-untyped-def]
    """Whether a buffer of the rank holds the expert."""
    found = False
    for held in buffer_GP[g]:
        found = found or held == e
    return found


@kernel
def may_serve(g, e, load_E, node_only, node_G, num_slots, home_E):  # type: ignore[no-untyped-def]
    """Whether a replica of the expert on the rank is allowed and has anything to serve."""
    home = home_E[e] // num_slots
    return load_E[e] > 0 and home != g and (not node_only or node_G[home] == node_G[g])


@kernel
def use_buffers(time, num_base, expert_GS, quota_GS, buffer_GP, last_GP):  # type: ignore[no-untyped-def]
    """Puts a row's replicas into the least recently used buffers; in place.

    Args:
        time: number of the row in its sequence, from 0.   buffer_GP: the expert in each buffer, -1 none.
        last_GP: int64, the row that read it last, -1 none.
    """
    G, S = expert_GS.shape
    for g in range(G):
        for s in range(num_base, S):
            if quota_GS[g, s] > 0:
                for p in range(buffer_GP.shape[1]):
                    if buffer_GP[g, p] == expert_GS[g, s]:
                        last_GP[g, p] = time
        for s in range(num_base, S):
            if quota_GS[g, s] == 0 or holds(g, expert_GS[g, s], buffer_GP):
                continue
            victim = -1
            for p in range(buffer_GP.shape[1]):
                if last_GP[g, p] == time or (victim >= 0 and buffer_GP[g, victim] < 0):
                    continue
                if victim < 0 or buffer_GP[g, p] < 0 or last_GP[g, p] < last_GP[g, victim]:
                    victim = p
            buffer_GP[g, victim], last_GP[g, victim] = expert_GS[g, s], time


@kernel
def price_kept(  # type: ignore[no-untyped-def]
    load_GE, demand_VE, node_G, num_base, rate_K, free_K, weight_2, home_E, busy_G, buffer_GP, expert_GS, quota_GS, load_G
):
    """`price_row` where the weights of replicas that a buffer holds are not sent.

    Args:
        free_K: the rates with copies, gradients and replicas for nothing.
        weight_2: what its weights add to the price of a replica.
        buffer_GP: the expert in each buffer, -1 none; [G, 0] if all weights are sent.
    """
    G, S = expert_GS.shape
    sent_4G, fan_4G = np.zeros((4, G), np.int64), np.zeros((4, G), np.int64)  # peer out, peer in, RDMA out, RDMA in
    for g in range(G):
        for s in range(num_base, S):
            e = expert_GS[g, s]
            if e < 0 or quota_GS[g, s] == 0:
                continue
            home = home_E[e] // S
            link = 0 if node_G[home] == node_G[g] else 2
            fan_4G[link, home] += 1
            fan_4G[link + 1, g] += 1
            if not holds(g, e, buffer_GP):
                sent_4G[link, home] += 1
                sent_4G[link + 1, g] += 1
    near_s, far_s = sent_4G[:2].max() * rate_K[COPY_PEER], sent_4G[2:].max() * rate_K[COPY_RDMA]
    copies_s = max(0.0, max(near_s, far_s) - rate_K[HIDE_FORWARD])
    copies_s += weight_2[0] * sent_4G[0].sum() + weight_2[1] * sent_4G[2].sum()
    copies_s += (rate_K[REPLICA_PEER] - weight_2[0]) * fan_4G[0].sum() + (rate_K[REPLICA_RDMA] - weight_2[1]) * fan_4G[2].sum()
    if rate_K[RETURNS] != 0.0:
        near_s, far_s = fan_4G[:2].max() * rate_K[BACK_PEER], fan_4G[2:].max() * rate_K[BACK_RDMA]
        copies_s += max(0.0, max(near_s, far_s) - rate_K[HIDE_BACKWARD])
    return copies_s + price_row(load_GE, demand_VE, node_G, num_base, free_K, home_E, busy_G, expert_GS, quota_GS, load_G)


@kernel
def put(g, slot, e, wish_VE, node_G, home_E, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Empties a redundant slot, its quota going home, and gives it an expert (-1 none) with what its node's tokens wish of it.

    Args:
        wish_VE: pairs that replicas should serve, by node; [0, E] for none.
    """
    S = expert_GS.shape[1]
    had = expert_GS[g, slot]
    if had >= 0:
        home, quota = home_E[had], quota_GS[g, slot]
        quota_GS[home // S, home % S] += quota
        load_G[home // S] += quota
        load_G[g] -= quota
    expert_GS[g, slot], quota_GS[g, slot] = e, 0
    if e >= 0 and wish_VE.size > 0:
        home = home_E[e]
        quota = min(wish_VE[node_G[g], e], np.int64(quota_GS[home // S, home % S]))
        quota_GS[home // S, home % S] -= quota
        quota_GS[g, slot] = quota
        load_G[home // S] -= quota
        load_G[g] += quota


@kernel
def level_row(goal, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Balances loads over the replicas there are and empties idle slots; in place."""
    split_row(goal, UNLIMITED, expert_GS.shape[0] * num_base, expert_GS, quota_GS, load_G)
    clean_row(num_base, expert_GS, quota_GS, load_G)


@kernel
def fill_row(goal, load_E, wish_VE, node_G, num_base, home_E, pick_GR, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Bare homes with the experts of `pick_GR` (-1 none) in redundant slots, balanced; in place. `wish_VE` as in `put`."""
    G, S = expert_GS.shape
    expert_GS[:, num_base:] = -1
    quota_GS[:, num_base:] = 0
    load_G[:] = 0
    for g in range(G):
        for b in range(num_base):
            quota_GS[g, b] = load_E[expert_GS[g, b]]
            load_G[g] += quota_GS[g, b]
    for g in range(G):
        for s in range(num_base, S):
            put(g, s, pick_GR[g, s - num_base], wish_VE, node_G, home_E, expert_GS, quota_GS, load_G)
    level_row(goal, num_base, expert_GS, quota_GS, load_G)


@kernel
def held_of(load_E, node_only, node_G, num_slots, home_E, buffer_GP, pick_GR):  # type: ignore[no-untyped-def]
    """Fills `pick_GR` with what a rank's buffers hold and may serve, the experts with most load first, then -1."""
    for g in range(pick_GR.shape[0]):
        for r in range(pick_GR.shape[1]):
            best = np.int64(-1)
            for e in buffer_GP[g]:
                if e < 0 or (pick_GR[g, :r] == e).any() or not may_serve(g, e, load_E, node_only, node_G, num_slots, home_E):
                    continue
                if best < 0 or load_E[e] > load_E[best]:
                    best = np.int64(e)
            pick_GR[g, r] = best
