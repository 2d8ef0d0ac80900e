"""Kernels of the home level. They swap experts between domains by simulated annealing, and between the ranks of a node.

Loads are integers (see `scaled`), so a sum that is updated in steps equals a new sum exactly. A domain is a node, or a rank if
there are no replicas that balance the ranks of a node.
"""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.random import next_random

# Letters: M micro-steps, G ranks, V domains, E experts; P positions, those of one domain side by side; Q quantiles.

# Maximum bits of a sum over micro-steps and domains, so that its square, and sums of such squares, fit int64.
_SUM_BITS = 30
# Domains of unequal size are weighted in steps of 1 / _STEPS.
_STEPS = 64
# Proposals at one temperature.
_AT_ONCE = 64
# -log of the uniform draws of the Metropolis rule. A table is faster than a logarithm per proposal.
_DROP_Q = -np.log((np.arange(1024) + 0.5) / 1024)
# Maximum number of passes over all swaps inside the nodes. The search nearly always ends earlier, when no swap helps.
_PASSES = 20
# A swap inside a node is made only if it lowers the sum of squares by at least this share of the balanced sum.
_WORTH = 1e-4


class Loads(NamedTuple):
    """The loads of a layer as integers."""

    load_EM: Array  # int64, load of every expert and micro-step
    weight_V: Array  # int64, factor of every domain's load that makes domains of unequal size comparable
    even: int  # weighted load of every domain and micro-step in perfect balance


class Domains(NamedTuple):
    """The weighted loads of domains, int64, and the two largest of them in every micro-step."""

    load_VM: Array  # weighted load
    first_M: Array  # the largest
    second_M: Array  # the second largest; -1 where there is only one domain
    owner_M: Array  # the domain with the largest


class Cooling(NamedTuple):
    """The temperature schedule of the annealing."""

    num_proposals: int
    heat: float  # initial temperature in units of the loads
    end: float  # final temperature divided by the initial one


def scaled(load_ME: Array, domain_G: Array) -> Loads:
    """Returns the loads of a layer as integers. The weighted load of a domain is its load per rank.

    Rounding errors are at most a millionth of a domain's mean if the product of micro-steps and domains is at most a thousand.
    """
    size_V = np.bincount(domain_G)
    steps = 1 if (size_V == size_V[0]).all() else _STEPS
    weight_V = np.rint(steps * size_V.max() / size_V).astype(np.int64)
    bits = min(20, _SUM_BITS - int(len(size_V) * len(load_ME) * weight_V.max()).bit_length())
    even = 2.0 ** max(bits, 1) * steps
    mean = load_ME.sum(dtype=np.float64) / (len(load_ME) * len(domain_G)) * size_V.max() * steps
    load_EM = np.rint(np.ascontiguousarray(load_ME.T, np.float64) * (even / mean if mean > 0.0 else 0.0)).astype(np.int64)
    return Loads(load_EM, weight_V, int(even))


@kernel
def domains_of(loads, domain_E):
    """Returns the `Domains` for a given assignment of experts to domains."""
    M = loads.load_EM.shape[1]
    load_VM = np.zeros((loads.weight_V.size, M), np.int64)
    for e in range(domain_E.size):
        load_VM[domain_E[e]] += loads.load_EM[e] * loads.weight_V[domain_E[e]]
    domains = Domains(load_VM, np.empty(M, np.int64), np.empty(M, np.int64), np.empty(M, np.int64))
    find_largest(domains)
    return domains


@kernel
def find_largest(domains):
    """Fills in the two largest loads of every micro-step, and the domain with the largest load."""
    first_M, second_M, owner_M = domains.first_M, domains.second_M, domains.owner_M
    first_M[:], second_M[:], owner_M[:] = -1, -1, -1
    for v in range(domains.load_VM.shape[0]):
        load_M = domains.load_VM[v]
        for m in range(load_M.size):  # without branches, for SIMD
            x, first = load_M[m], first_M[m]
            second_M[m] = max(second_M[m], min(x, first))
            first_M[m] = max(x, first)
            owner_M[m] = v if x > first else owner_M[m]


@kernel
def swap_effect(loads, domains, e, f, a, b):
    """Returns the effect of swapping expert e of domain a and expert f of domain b.

    The effect consists of the new largest load, summed over micro-steps, and the increase of the sum of squares.
    """
    load_e_M, load_f_M, load_a_M, load_b_M = loads.load_EM[e], loads.load_EM[f], domains.load_VM[a], domains.load_VM[b]
    weight_a, weight_b, owner_M = loads.weight_V[a], loads.weight_V[b], domains.owner_M
    largest = squares = np.int64(0)
    for m in range(load_a_M.size):
        more = load_f_M[m] - load_e_M[m]
        up, down = more * weight_a, more * weight_b
        # If a and b have the two largest loads, one of them stays at or above the second largest load.
        rest = domains.first_M[m] if (owner_M[m] != a) & (owner_M[m] != b) else domains.second_M[m]
        largest += max(max(load_a_M[m] + up, load_b_M[m] - down), rest)
        squares += up * (2 * load_a_M[m] + up) - down * (2 * load_b_M[m] - down)
    return largest, squares


@kernel
def anneal(loads, cost_EV, smooth, cooling, seed, domain_E):
    """Improves `domain_E` in place by swaps of two experts. At the end, it holds the best assignment found or the start.

    The best assignment minimises the largest load, summed over micro-steps, plus the cost of every expert in its domain. To
    accept a swap, ``smooth / (2 * even)`` times the sum of squares is added to this objective. The squares reward a swap that
    helps only the second most loaded domain. `cost_EV` is int64, in units of the loads. The temperature falls geometrically.
    """
    E, M = loads.load_EM.shape
    load_EM, weight_V, heat = loads.load_EM, loads.weight_V, cooling.heat
    domains = domains_of(loads, domain_E)
    value = largest_now = domains.first_M.sum()
    for i in range(E):
        value += cost_EV[i, domain_E[i]]
    best, best_E = value, domain_E.copy()
    state = np.array([seed], np.uint64)
    step, slope = cooling.end ** (1.0 / max(1, cooling.num_proposals // _AT_ONCE)), smooth / (2.0 * loads.even)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for i in range(cooling.num_proposals):
        if i % _AT_ONCE == 0:
            heat *= step
        draw = next_random(state)
        e = np.int64(((draw & low) * np.uint64(E)) >> half)
        f = np.int64(((draw >> half) * np.uint64(E)) >> half)
        a, b = domain_E[e], domain_E[f]
        if a == b:
            continue
        largest, squares = swap_effect(loads, domains, e, f, a, b)
        new = value + largest - largest_now + cost_EV[e, b] - cost_EV[e, a] + cost_EV[f, a] - cost_EV[f, b]
        if np.float64(new - value) + slope * np.float64(squares) > heat * _DROP_Q[next_random(state) >> np.uint64(54)]:
            continue
        for m in range(M):
            more = load_EM[f, m] - load_EM[e, m]
            domains.load_VM[a, m] += more * weight_V[a]
            domains.load_VM[b, m] -= more * weight_V[b]
        find_largest(domains)
        domain_E[e], domain_E[f] = b, a
        value, largest_now = new, largest
        if value < best:
            best = value
            best_E[:] = domain_E
    domain_E[:] = best_E


@kernel
def settle_inside(load_EM, node_E, now_E, node_G):
    """Chooses ranks (int64 [E]) for experts whose nodes are given, so that few replicas can balance the ranks.

    An expert that stays in its node keeps its rank. All other experts, in order of decreasing load, go to the least loaded ranks
    with room. Then experts of a node swap ranks as long as this lowers the sum of squared rank loads over all micro-steps.
    """
    E, M = load_EM.shape
    G = node_G.size
    load_GM, total_G, room_G = np.zeros((G, M), np.int64), np.zeros(G, np.int64), np.full(G, E // G)
    rank_E, total_E = np.full(E, -1), load_EM.sum(axis=1)
    order_E = np.argsort(-total_E, kind="mergesort")
    for stays in (True, False):
        for e in order_E:
            g = -1
            if stays and node_E[e] == node_G[now_E[e]]:
                g = now_E[e]
            elif not stays and rank_E[e] < 0:
                for other in range(G):
                    if node_G[other] == node_E[e] and room_G[other] > 0 and (g < 0 or total_G[other] < total_G[g]):
                        g = other
            if g >= 0:
                rank_E[e] = g
                room_G[g] -= 1
                total_G[g] += total_E[e]
                load_GM[g] += load_EM[e]
    mean = np.float64(total_E.sum()) / (G * M)
    worth = _WORTH * mean * mean * M
    for _ in range(_PASSES):
        vain = True
        for e in range(E):
            for f in range(e):
                a, b = rank_E[e], rank_E[f]
                if a == b or node_E[e] != node_E[f]:
                    continue
                growth = np.int64(0)  # half of the growth
                for m in range(M):
                    more = load_EM[f, m] - load_EM[e, m]
                    growth += more * (load_GM[a, m] - load_GM[b, m] + more)
                if 2.0 * np.float64(growth) < -worth:
                    load_GM[a] += load_EM[f] - load_EM[e]
                    load_GM[b] -= load_EM[f] - load_EM[e]
                    rank_E[e], rank_E[f] = b, a
                    vain = False
        if vain:
            break
    return rank_E
