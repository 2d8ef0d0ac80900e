"""The cheapest quotas for given replicas: pairs flow to the nearest rank, then off the fullest ranks as long as that pays."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel

# Letters: G ranks, E experts, J experts with replicas.


@kernel
def _detours(link_GG, at_JG, flow_JGG, least, cost_GG, via_GG):
    """Fills, from rank to rank, the least seconds that a pair served there costs more elsewhere, and which flow that is."""
    J, G = at_JG.shape
    cost_GG[:] = np.inf
    for j in range(J):
        for source in range(G):
            for a in range(G):
                if flow_JGG[j, source, a] <= least:
                    continue
                for b in range(G):
                    cost_s = link_GG[source, b] - link_GG[source, a]
                    if b != a and at_JG[j, b] and cost_s < cost_GG[a, b]:
                        cost_GG[a, b], via_GG[a, b] = cost_s, j * G + source


@kernel
def _routes(cost_GG, full_G, rounding_s, way_s_G, next_G):
    """Fills the seconds of the cheapest way from every full rank to one that is not, and its first step; inf and -1 if none."""
    G = full_G.size
    for g in range(G):
        way_s_G[g], next_G[g] = np.inf if full_G[g] else 0.0, -1
    for _ in range(G):
        changed = False
        for a in range(G):
            if not full_G[a]:
                continue
            for b in range(G):
                if cost_GG[a, b] + way_s_G[b] < way_s_G[a] - rounding_s:
                    way_s_G[a], next_G[a], changed = cost_GG[a, b] + way_s_G[b], b, True
        if not changed:
            break


@kernel
def _step(limit, full_G, next_G, via_GG, flow_JGG, load_G):
    """Moves as much off all full ranks as ends a flow or fills a rank."""
    G = full_G.size
    out_G, in_G = np.zeros(G), np.zeros(G)
    for g in range(G):
        a = g
        while next_G[a] >= 0:
            out_G[a] += 1.0
            a = next_G[a]
        in_G[a] += full_G[g]
    step = np.inf
    for g in range(G):
        if full_G[g]:
            i = via_GG[g, next_G[g]]
            step = min(step, flow_JGG[i // G, i % G, g] / out_G[g])
        else:
            step = min(step, (limit - load_G[g]) / (1.0 + in_G[g]))
    for g in range(G):
        if full_G[g]:
            i = via_GG[g, next_G[g]]
            flow_JGG[i // G, i % G, g] -= out_G[g] * step
            flow_JGG[i // G, i % G, next_G[g]] += out_G[g] * step
            load_G[g] -= step
        else:
            load_G[g] += in_G[g] * step


@kernel
def cheapest_flow(case, expert_J, at_JG, flow_JGG, load_G, price_s_G):
    """Splits the pairs of some experts over their ranks so that links and the fullest rank together cost least.

    A parametric flow: all pairs start at the nearest rank. Then the limit on load falls; every rank at the limit gives way by
    the cheapest chain of detours to a rank below it, which is optimal for each limit on the way, until a lower limit costs more
    in links than it saves in compute.

    Fills `flow_JGG` with pairs by expert, source and serving rank, and adds them to `load_G`, float64. `price_s_G` gets dual
    prices: seconds that one more pair on a rank costs. They add up to `rates.pair_s`, and no quotas cost less than every pair
    served where price and link together are least.
    """
    pairs_EG, link_GG, home_E, pair_s = case.pairs_EG, case.link_GG, case.home_E, case.rates.pair_s
    J, G = at_JG.shape
    price_s_G[:] = 0.0
    flow_JGG[:] = 0.0
    for j in range(J):
        e = expert_J[j]
        for source in range(G):
            nearest = home_E[e]
            for r in range(G):
                if at_JG[j, r] and link_GG[source, r] < link_GG[source, nearest]:
                    nearest = r
            flow_JGG[j, source, nearest] = pairs_EG[e, source]
            load_G[nearest] += pairs_EG[e, source]
    least, rounding_s = 1e-9 * (1.0 + load_G.sum()), 1e-12 * pair_s
    cost_GG, via_GG, way_s_G = np.empty((G, G)), np.empty((G, G), np.int64), np.empty(G)
    next_G = np.empty(G, np.int64)
    # Every round but the last ends a flow or fills a rank; the limit is for what rounding might make of that.
    for _ in range(16 * G * (J + 1)):
        limit = load_G.max()
        full_G = load_G >= limit - least
        _detours(link_GG, at_JG, flow_JGG, least, cost_GG, via_GG)
        _routes(cost_GG, full_G, rounding_s, way_s_G, next_G)
        stuck_G = way_s_G == np.inf
        had_s = price_s_G.sum()
        if stuck_G.any():  # the limit cannot fall: what these ranks cost more is free to be any
            price_s_G += (pair_s - had_s) / stuck_G.sum() * stuck_G
            return
        if way_s_G.sum() >= pair_s:
            price_s_G += (pair_s - had_s) / (way_s_G.sum() - had_s) * (way_s_G - price_s_G)
            return
        price_s_G[:] = way_s_G
        _step(limit, full_G, next_G, via_GG, flow_JGG, load_G)
    price_s_G += (pair_s - price_s_G.sum()) / G
