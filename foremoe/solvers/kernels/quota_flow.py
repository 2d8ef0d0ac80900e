"""The cheapest quotas for given replicas: pairs flow to the nearest rank, then off the fullest ranks as long as that pays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel

# Letters: G ranks, V nodes, E experts, J experts with replicas, H their hosts (ranks that hold them), A arcs, S slots per rank.


class Hosts(NamedTuple):
    """Hosts by expert, each expert's home first; and by node what they serve of it."""

    first_J: Array  # int64 [J + 1], where an expert's hosts begin
    slot_H: Array  # int64, p = g*S + s
    rank_H: Array  # int64
    node_H: Array  # int64, j*V + v, as in the two last
    own_H: Array  # float64, pairs of the host's own tokens
    quota_H: Array  # float64, pairs that it serves
    demand_JV: Array  # float64 [J*V], pairs of a node's tokens
    served_JV: Array  # float64 [J*V], pairs that a node serves


class _Arcs(NamedTuple):
    """Moves of a pair from a full rank to another host of its expert."""

    from_A: Array  # int64, host
    to_A: Array  # int64, host
    cost_s_A: Array  # float64, how much more its links cost after the move


@kernel
def _hosts(row, expert_GS):
    """Hosts of all experts with replicas, every pair served where links cost least."""
    G, S = expert_GS.shape
    E, V, num_base = row.load_E.size, row.demand_VE.shape[0], row.num_base
    num_E, num_hosts, J = np.zeros(E, np.int64), 0, 0
    for g in range(G):
        for s in range(num_base, S):
            e = expert_GS[g, s]
            if e >= 0:
                J += num_E[e] == 0
                num_hosts += 1 + (num_E[e] == 0)
                num_E[e] += 1
    first_J, at_E = np.zeros(J + 1, np.int64), np.full(E, -1, np.int64)
    slot_H, rank_H, node_H = np.empty(num_hosts, np.int64), np.empty(num_hosts, np.int64), np.empty(num_hosts, np.int64)
    own_H, quota_H, demand_JV, served_JV = np.zeros(num_hosts), np.zeros(num_hosts), np.zeros(J * V), np.zeros(J * V)
    j = 0
    for g in range(G):
        for s in range(num_base, S):
            e = expert_GS[g, s]
            if e < 0:
                continue
            if at_E[e] < 0:
                h, j = first_J[j], j + 1
                first_J[j] = h + 1 + num_E[e]
                slot_H[h], at_E[e] = row.home_E[e], h + 1
            slot_H[at_E[e]] = g * S + s
            at_E[e] += 1
    for j in range(J):
        home, end = first_J[j], first_J[j + 1]
        e = expert_GS[slot_H[home] // S, slot_H[home] % S]
        for v in range(V if row.located else 0):
            demand_JV[j * V + v] = row.demand_VE[v, e]
        for h in range(home, end):
            g = slot_H[h] // S
            rank_H[h], node_H[h] = g, j * V + (row.node_G[g] if row.located else 0)
            if row.located:
                own_H[h] = quota_H[h] = row.load_GE[g, e]
                served_JV[node_H[h]] += own_H[h]
        elsewhere = np.float64(row.load_E[e])
        for h in range(home, end):  # the first host of a node serves all its tokens that have none on their own rank
            quota_H[h] += demand_JV[node_H[h]] - served_JV[node_H[h]]
            served_JV[node_H[h]] = demand_JV[node_H[h]]
            elsewhere -= quota_H[h]
        quota_H[home] += elsewhere
        served_JV[node_H[home]] += elsewhere
    return Hosts(first_J, slot_H, rank_H, node_H, own_H, quota_H, demand_JV, served_JV)


@inner_kernel
def _find_arcs(hosts, full_G, least, rates, arcs):
    """Fills `arcs` with those out of full ranks; returns how many there are."""
    first_J, _, rank_H, node_H, own_H, quota_H, demand_JV, served_JV = hosts
    peer_s, cross_s, num = rates.peer_pair_s, max(0.0, rates.rdma_pair_s - rates.peer_pair_s), 0
    for j in range(first_J.size - 1):
        for h in range(first_J[j], first_J[j + 1]):
            if not full_G[rank_H[h]] or quota_H[h] <= least:
                continue
            v = node_H[h]
            leave_s = peer_s if quota_H[h] <= own_H[h] + least else 0.0
            cross_out_s = cross_s if served_JV[v] <= demand_JV[v] + least else 0.0
            for to in range(first_J[j], first_J[j + 1]):
                if to == h:
                    continue
                cost_s, w = leave_s, node_H[to]
                if quota_H[to] < own_H[to] - least:
                    cost_s -= peer_s
                if w != v:
                    cost_s += cross_out_s
                    if served_JV[w] < demand_JV[w] - least:
                        cost_s -= cross_s
                arcs.from_A[num], arcs.to_A[num], arcs.cost_s_A[num] = h, to, cost_s
                num += 1
    return num


@inner_kernel
def _find_routes(hosts, arcs, num, full_G, rounding_s, path_s_G, next_G):
    """Fills the seconds of the cheapest path from every full rank to one that is not, and its first arc; inf and -1 if none."""
    rank_H = hosts.rank_H
    for g in range(full_G.size):
        path_s_G[g], next_G[g] = np.inf if full_G[g] else 0.0, -1
    changed, rounds = True, 0
    while changed and rounds < full_G.size:
        changed, rounds = False, rounds + 1
        for i in range(num):
            a, path_s = rank_H[arcs.from_A[i]], arcs.cost_s_A[i] + path_s_G[rank_H[arcs.to_A[i]]]
            if path_s < path_s_G[a] - rounding_s:
                path_s_G[a], next_G[a], changed = path_s, i, True


@inner_kernel
def _room(amount, mark, rate):
    """Steps until an amount that changes by `rate` passes a mark; inf if it moves away."""
    return (mark - amount) / rate if (mark - amount) * rate > 0.0 else np.inf


@kernel
def _step(limit, least, full_G, next_G, arcs, hosts, load_G):
    """Moves as much off all full ranks as fills a rank or makes an arc cost something else."""
    _, _, rank_H, node_H, own_H, quota_H, demand_JV, served_JV = hosts
    G = full_G.size
    out_G, into_G = np.zeros(G), np.zeros(G)
    rate_H, rate_JV = np.zeros(quota_H.size), np.zeros(served_JV.size)
    for g in range(G):
        a = g
        while next_G[a] >= 0:
            out_G[a] += 1.0
            a = rank_H[arcs.to_A[next_G[a]]]
        into_G[a] += full_G[g]
    step = np.inf
    for g in range(G):
        if not full_G[g]:
            step = min(step, (limit - load_G[g]) / (1.0 + into_G[g]))
            continue
        h, to = arcs.from_A[next_G[g]], arcs.to_A[next_G[g]]
        rate_H[h] -= out_G[g]
        rate_H[to] += out_G[g]
        rate_JV[node_H[h]] -= out_G[g]
        rate_JV[node_H[to]] += out_G[g]
    for h in range(quota_H.size):
        if rate_H[h] != 0.0:
            if abs(quota_H[h] - own_H[h]) > least:
                step = min(step, _room(quota_H[h], own_H[h], rate_H[h]))
            if rate_H[h] < 0.0:
                step = min(step, quota_H[h] / -rate_H[h])
    for i in range(served_JV.size):
        if rate_JV[i] != 0.0 and abs(served_JV[i] - demand_JV[i]) > least:
            step = min(step, _room(served_JV[i], demand_JV[i], rate_JV[i]))
    for h in range(quota_H.size):
        quota_H[h] += rate_H[h] * step
    for i in range(served_JV.size):
        served_JV[i] += rate_JV[i] * step
    for g in range(G):
        load_G[g] += -step if full_G[g] else into_G[g] * step


@kernel
def _flow(hosts, rates, load_G, price_s_G):
    """Lowers the limit on load from where every pair is served nearest to where less costs more in links than it saves."""
    first_J, G, pair_s = hosts.first_J, load_G.size, rates.pair_s
    most = 0
    for j in range(first_J.size - 1):
        num = first_J[j + 1] - first_J[j]
        most += num * (num - 1)
    arcs = _Arcs(np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most))
    least, rounding_s = 1e-9 * (1.0 + load_G.sum()), 1e-12 * pair_s
    full_G, path_s_G, next_G = np.empty(G, np.bool_), np.empty(G), np.empty(G, np.int64)
    price_s_G[:] = 0.0
    # Every round but the last fills a rank or changes an arc; the limit is for what rounding might make of that.
    for _ in range(16 * (G + hosts.quota_H.size)):
        limit, path_s, had_s, num_stuck = load_G.max(), 0.0, price_s_G.sum(), 0
        for g in range(G):
            full_G[g] = load_G[g] >= limit - least
        num = _find_arcs(hosts, full_G, least, rates, arcs)
        _find_routes(hosts, arcs, num, full_G, rounding_s, path_s_G, next_G)
        for g in range(G):
            if path_s_G[g] == np.inf:
                num_stuck += 1
            else:
                path_s += path_s_G[g]
        if num_stuck > 0:  # the limit cannot fall: what these ranks cost more is free to be any
            for g in range(G):
                price_s_G[g] += (pair_s - had_s) / num_stuck if path_s_G[g] == np.inf else 0.0
            return
        if path_s >= pair_s:
            for g in range(G):
                price_s_G[g] += (pair_s - had_s) / (path_s - had_s) * (path_s_G[g] - price_s_G[g])
            return
        price_s_G[:] = path_s_G
        _step(limit, least, full_G, next_G, arcs, hosts, load_G)
    price_s_G += (pair_s - price_s_G.sum()) / G


@kernel
def split_flow(row, placed, price_s_G):
    """The `Hosts` of a placement with quotas in fractions of pairs, and loads with busy slots in pairs, float64 [G].

    Fills what no flow changes: `placed` gets all load at home, `price_s_G` the prices of `cheapest_quotas`.
    """
    expert_GS, quota_GS, load_G = placed
    (G, S), slot = expert_GS.shape, row.rates.slot_s / row.rates.pair_s
    hosts, flow_load_G = _hosts(row, expert_GS), np.empty(G)
    for g in range(G):
        busy, load_G[g] = row.busy_G[g], 0
        for s in range(S):
            e = expert_GS[g, s]
            quota_GS[g, s] = row.load_E[e] if s < row.num_base else 0
            load_G[g] += quota_GS[g, s]
            busy += s >= row.num_base and e >= 0
        flow_load_G[g] = load_G[g] + slot * busy
    for j in range(hosts.first_J.size - 1):
        home = hosts.first_J[j]
        for h in range(home, hosts.first_J[j + 1]):
            flow_load_G[hosts.rank_H[h]] += hosts.quota_H[h]
        p = hosts.slot_H[home]
        flow_load_G[p // S] -= quota_GS[p // S, p % S]
    _flow(hosts, row.rates, flow_load_G, price_s_G)
    return hosts, flow_load_G


@kernel
def cheapest_quotas(row, placed, price_s_G):
    """Gives the replicas of a placement the quotas with which links and the fullest rank together cost least; in place.

    A parametric flow: all pairs start at the nearest rank. Then the limit on load falls; every rank at the limit gives way by
    the cheapest chain of detours to a rank below it, which is optimal for each limit on the way, until a lower limit costs more
    in links than it saves in compute. Quotas are whole pairs then, and a replica without pairs leaves the placement.

    `price_s_G` gets dual prices: seconds that one more pair on a rank costs. They add up to `rates.pair_s`. With these replicas
    in their slots, no quotas cost less than every pair served where price and link together are least.
    """
    expert_GS, quota_GS, load_G = placed
    S, hosts = expert_GS.shape[1], split_flow(row, placed, price_s_G)[0]
    for j in range(hosts.first_J.size - 1):
        home = hosts.slot_H[hosts.first_J[j]]
        for h in range(hosts.first_J[j] + 1, hosts.first_J[j + 1]):
            p = hosts.slot_H[h]
            amount = min(np.int64(np.round(hosts.quota_H[h])), np.int64(quota_GS[home // S, home % S]))
            quota_GS[p // S, p % S] = amount
            quota_GS[home // S, home % S] -= amount
            load_G[home // S] -= amount
            load_G[p // S] += amount
            if amount == 0:
                expert_GS[p // S, p % S] = -1
