"""Row kernels of `Transitions`: what a placement costs where some replicas are there already, and how to use those."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.rates import Rates, add_copies, busiest_s, late_s
from foremoe.solvers.closed_form import price_row
from foremoe.solvers.rows import Row, assign, bare_homes, clean_row
from foremoe.solvers.split.flow import UNLIMITED, split_row

# Letters: G ranks, S slots per rank, R redundant slots, E experts, P buffers of a rank.


class Keeping(NamedTuple):
    """A row whose ranks hold weights in buffers."""

    row: Row
    free: Rates  # its rates with copies, gradients and replicas for nothing
    peer_s: float  # what its weights add to the price of a replica on peer links
    rdma_s: float  # the same on RDMA links
    goal: int  # pairs, the maximum load to balance to


class Buffers(NamedTuple):
    """Buffers of every rank."""

    expert_GP: Array  # int64, the expert in each, -1 none; [G, 0] if all weights are sent
    last_GP: Array  # int64, the row that read it last, -1 none


@inner_kernel
def holds(g, e, buffer_GP):
    """Whether a buffer of the rank holds the expert."""
    found = False
    for held in buffer_GP[g]:
        found = found or held == e
    return found


@inner_kernel
def may_serve(g, e, row, num_slots):
    """Whether a replica of the expert on the rank is allowed and has anything to serve."""
    home = row.home_E[e] // num_slots
    return row.load_E[e] > 0 and home != g and (not row.node_only or row.node_G[home] == row.node_G[g])


@kernel
def use_buffers(time, num_base, expert_GS, quota_GS, buffers):
    """Puts the replicas with a quota of row number `time` of a sequence into the least recently used buffers; in place."""
    buffer_GP, last_GP = buffers
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
def price_kept(keeping, buffer_GP, placed):
    """`price_row` where the weights of replicas that a buffer holds are not sent."""
    row, rates, (expert_GS, quota_GS, _) = keeping.row, keeping.row.rates, placed
    G, S = expert_GS.shape
    sent_4G, fan_4G = np.zeros((4, G), np.int64), np.zeros((4, G), np.int64)  # peer out, peer in, RDMA out, RDMA in
    for g in range(G):
        for s in range(row.num_base, S):
            e = expert_GS[g, s]
            if e < 0 or quota_GS[g, s] == 0:
                continue
            home = row.home_E[e] // S
            add_copies(1, home, g, row.node_G, fan_4G)
            if not holds(g, e, buffer_GP):
                add_copies(1, home, g, row.node_G, sent_4G)
    # Weights are not sent again in backward, where all replicas return gradients.
    copies_s = late_s((busiest_s(sent_4G, rates)[0], busiest_s(fan_4G, rates)[1]), rates)
    copies_s += keeping.peer_s * sent_4G[0].sum() + keeping.rdma_s * sent_4G[2].sum()
    peer_s, rdma_s = rates.replica_peer_s - keeping.peer_s, rates.replica_rdma_s - keeping.rdma_s
    copies_s += peer_s * fan_4G[0].sum() + rdma_s * fan_4G[2].sum()
    return copies_s + price_row(row, keeping.free, placed)


@inner_kernel
def put(g, slot, e, row, nearer, placed):
    """Sends the quota of a redundant slot home and gives it an expert (-1: none), with `nearer` what its new node asks of it."""
    expert_GS, quota_GS, load_G = placed
    S = expert_GS.shape[1]
    had = expert_GS[g, slot]
    if had >= 0:
        home, quota = row.home_E[had], quota_GS[g, slot]
        quota_GS[home // S, home % S] += quota
        load_G[home // S] += quota
        load_G[g] -= quota
    expert_GS[g, slot], quota_GS[g, slot] = e, 0
    if e >= 0 and nearer:
        home = row.home_E[e]
        wish = min(np.int64(row.demand_VE[row.node_G[g], e]), np.int64(quota_GS[home // S, home % S]))
        quota_GS[home // S, home % S] -= wish
        quota_GS[g, slot] = wish
        load_G[home // S] -= wish
        load_G[g] += wish


@kernel
def level_row(goal, num_base, placed):
    """Balances loads over the replicas there are and empties idle slots; in place."""
    split_row(goal, UNLIMITED, num_base, placed)
    clean_row(num_base, placed)


@kernel
def fill_row(keeping, nearer, pick_GR, placed):
    """Bare homes with the experts of `pick_GR` (-1 none) in redundant slots, balanced; in place. `nearer` as in `put`."""
    row, (G, S) = keeping.row, placed.expert_GS.shape
    assign(placed, bare_homes(row.load_E, row.num_base, placed.expert_GS))
    for g in range(G):
        for s in range(row.num_base, S):
            put(g, s, pick_GR[g, s - row.num_base], row, nearer, placed)
    level_row(keeping.goal, row.num_base, placed)


@kernel
def held_of(row, num_slots, buffer_GP, pick_GR):
    """Fills `pick_GR` with what a rank's buffers hold and may serve, the experts with most load first, then -1."""
    for g in range(pick_GR.shape[0]):
        for r in range(pick_GR.shape[1]):
            best = np.int64(-1)
            for e in buffer_GP[g]:
                if e < 0 or (pick_GR[g, :r] == e).any() or not may_serve(g, e, row, num_slots):
                    continue
                if best < 0 or row.load_E[e] > row.load_E[best]:
                    best = np.int64(e)
            pick_GR[g, r] = best
