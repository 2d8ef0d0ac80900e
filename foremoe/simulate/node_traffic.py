"""How long exchanges keep the links busy where a token travels once to every node and rank that serve it."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.plan.split import link_slots
from foremoe.problem.kernels.reached import reached
from foremoe.simulate.nics import add_row

# Letters: N rows, G ranks, V nodes, Y NICs, E experts, S slots per rank.


class NodeRows(NamedTuple):
    """The rows of a plan, and where the seconds of one dispatch are written.

    Which tokens a slot serves is not known from counts: see `reached`. A node's overflow counts as spread over all slots
    elsewhere that have room.
    """

    load_NGE: Array
    demand_NVE: Array
    expert_NGS: Array
    quota_NGS: Array
    weight_N: Array  # times that a row dispatches
    node_G: Array
    place_G: Array  # number of a rank inside its node
    nic_G: Array
    num_topk: int
    seconds_2: Array  # of one message by peer link and by RDMA
    busy_N2: Array


class _Flow(NamedTuple):
    """Pairs of one row, float64, and scratch of one expert by rank and by node."""

    to_VG: Array  # from the tokens of a node to a rank
    own_G: Array  # of `to_VG`: from the rank itself
    quota_G: Array
    left_V: Array  # pairs that the tokens of a node send
    spare_V: Array  # pairs that its ranks serve


class _Sent(NamedTuple):
    """Messages of one row, float64, out of and into every rank, and the tokens of every rank and node."""

    peer_2G: Array
    rdma_2G: Array
    tokens_G: Array
    tokens_V: Array


@inner_kernel
def _add_flow(n, e, first, next_P, rows, flow):
    """Adds the pairs of an expert by the split law: to their own rank, then inside their node, then to what is left elsewhere."""
    node_G, S = rows.node_G, rows.expert_NGS.shape[2]
    to_VG, own_G, quota_G, left_V, spare_V = flow
    for v in range(left_V.size):
        left_V[v], spare_V[v] = rows.demand_NVE[n, v, e], 0.0
    p = first
    while p >= 0:
        g, quota = p // S, np.float64(rows.quota_NGS[n, p // S, p % S])
        own = min(np.float64(rows.load_NGE[n, g, e]), quota)
        own_G[g] += own
        to_VG[node_G[g], g] += own
        left_V[node_G[g]] -= own
        quota_G[g] = quota - own
        spare_V[node_G[g]] += quota - own
        p = next_P[p]
    over = 0.0
    for v in range(left_V.size):
        over += max(0.0, spare_V[v] - left_V[v])
    p = first
    while p >= 0:
        g = p // S
        here = node_G[g]
        inside = min(spare_V[here], left_V[here])
        share = quota_G[g] / spare_V[here] if spare_V[here] > 0.0 else 0.0
        to_VG[here, g] += share * inside
        far = share * (spare_V[here] - inside)
        for v in range(left_V.size):
            if v != here and far > 0.0:
                to_VG[v, g] += far * max(0.0, left_V[v] - spare_V[v]) / over
        p = next_P[p]


@inner_kernel
def _send(num_topk, num_experts, node_G, place_G, rank_VI, flow, sent):
    """Messages of the flow of one row: over NICs to the rank of the same place, from there to those that serve the token."""
    peer_2G, rdma_2G, tokens_G, tokens_V = sent
    to_VG, own_G = flow.to_VG, flow.own_G
    for v in range(tokens_V.size):
        if tokens_V[v] == 0.0:
            continue
        for here in range(tokens_V.size):
            num_here = 0
            while num_here < rank_VI.shape[1] and rank_VI[here, num_here] >= 0:
                num_here += 1
            pairs = received = 0.0
            for i in range(num_here):
                g = rank_VI[here, i]
                pairs += to_VG[v, g]
                if here == v:  # straight from every other rank of the node
                    others, served = tokens_V[v] - tokens_G[g], to_VG[v, g] - own_G[g]
                    came = reached(others, served, num_topk, num_experts) if others > 0.0 else 0.0
                    peer_2G[1, g] += came
                    for j in range(num_here):
                        if j != i and came > 0.0:
                            peer_2G[0, rank_VI[here, j]] += came * tokens_G[rank_VI[here, j]] / others
                else:
                    received += reached(tokens_V[v], to_VG[v, g], num_topk, num_experts)
            if here == v or pairs == 0.0:
                continue
            crossed = reached(tokens_V[v], pairs, num_topk, num_experts)
            for i in range(rank_VI.shape[1]):
                source = rank_VI[v, i]
                if source < 0:
                    break
                share, forwarder = tokens_G[source] / tokens_V[v], rank_VI[here, i % num_here]
                rdma_2G[0, source] += crossed * share
                rdma_2G[1, forwarder] += crossed * share
                kept = reached(tokens_V[v], to_VG[v, forwarder], num_topk, num_experts)
                peer_2G[0, forwarder] += share * (received - kept)
                peer_2G[1, forwarder] -= share * kept
            for i in range(num_here):
                peer_2G[1, rank_VI[here, i]] += reached(tokens_V[v], to_VG[v, rank_VI[here, i]], num_topk, num_experts)


@kernel
def node_exchange_rows(low, high, rows):
    """Writes the seconds of rows [low, high); returns float64 [2, G], the weighted messages of every rank by link class."""
    _, G, S = rows.expert_NGS.shape
    E, V = rows.load_NGE.shape[2], rows.demand_NVE.shape[1]
    first_E, next_P = np.empty(E, np.int64), np.empty(G * S, np.int64)
    flow = _Flow(np.zeros((V, G)), np.zeros(G), np.zeros(G), np.zeros(V), np.zeros(V))
    sent = _Sent(np.zeros((2, G)), np.zeros((2, G)), np.zeros(G), np.zeros(V))
    rank_VI = np.full((V, rows.place_G.max() + 1), -1, np.int64)
    for g in range(G):
        rank_VI[rows.node_G[g], rows.place_G[g]] = g
    total_2G, nic_2Y = np.zeros((2, G)), np.zeros((2, rows.nic_G.max() + 1))
    for n in range(low, high):
        link_slots(rows.expert_NGS[n], rows.quota_NGS[n], first_E, next_P)
        flow.to_VG[:] = 0.0
        flow.own_G[:] = 0.0
        for e in range(E):
            if first_E[e] >= 0:
                _add_flow(n, e, first_E[e], next_P, rows, flow)
        sent.tokens_V[:] = 0.0
        for g in range(G):
            pairs = np.int64(0)
            for e in range(E):
                pairs += rows.load_NGE[n, g, e]
            sent.tokens_G[g] = pairs / rows.num_topk
            sent.tokens_V[rows.node_G[g]] += sent.tokens_G[g]
        sent.peer_2G[:] = 0.0
        sent.rdma_2G[:] = 0.0
        _send(rows.num_topk, E, rows.node_G, rows.place_G, rank_VI, flow, sent)
        add_row(n, sent.peer_2G, sent.rdma_2G, rows, rows.seconds_2, nic_2Y, total_2G)
    return total_2G
