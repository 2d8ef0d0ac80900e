"""Changes of a set of replicas: the one that prices least by its bounds, and how it is made."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.price import exposed_s
from foremoe.solvers.kernels.replica_bounds import count_copy, replica_s

# Letters: G ranks, R redundant slots per rank, P redundant slots, E experts, K bounds (rate_K: rates).

# A replica that left may not come back for TENURE to 2 * TENURE steps, a new one may not leave for up to half of TENURE.
TENURE = 10


@kernel
def random(state_1, below):  # type: ignore[no-untyped-def]
    """A whole number in [0, below), from a xorshift generator."""
    x = state_1[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state_1[0] = x
    return np.int64(x % np.uint64(below))


@kernel
def _largest(total_s_K, num, add_s_EGK, e, a, f, b, other_s, enough_s, first):  # type: ignore[no-untyped-def]
    """The largest of the first bounds, with two additions and more to each; it stops at one of `enough_s`.

    Args:
        first: the bound to look at before all others.

    Returns:
        the largest, and the bound that reached `enough_s`, else `first`.
    """
    most_s = total_s_K[first] + add_s_EGK[e, a, first] + add_s_EGK[f, b, first] + other_s
    if most_s >= enough_s:
        return most_s, first
    for k in range(num):
        this_s = total_s_K[k] + add_s_EGK[e, a, k] + add_s_EGK[f, b, k] + other_s
        if this_s > most_s:
            most_s = this_s
            if most_s >= enough_s:
                return most_s, k
    return most_s, first


@kernel
def fans_s(fan_4G, rate_K, free_s):  # type: ignore[no-untyped-def]
    """Seconds of copies that do not hide, beyond `free_s`."""
    peer_fan, rdma_fan = 0, 0
    for g in range(fan_4G.shape[1]):
        peer_fan = max(peer_fan, max(fan_4G[0, g], fan_4G[1, g]))
        rdma_fan = max(rdma_fan, max(fan_4G[2, g], fan_4G[3, g]))
    return max(0.0, exposed_s(peer_fan, rdma_fan, rate_K) - free_s)


@kernel
def _swap_copies(home_E, node_G, e, a, f, b, fan_4G):  # type: ignore[no-untyped-def]
    """Counts expert e as gone from rank a to b, and f from b to a; rank -1 is nowhere."""
    if a >= 0:
        count_copy(home_E, node_G, e, a, -1, fan_4G)
        count_copy(home_E, node_G, f, a, 1, fan_4G)
    if b >= 0:
        count_copy(home_E, node_G, e, b, 1, fan_4G)
        count_copy(home_E, node_G, f, b, -1, fan_4G)


@kernel
def _fans_after_s(home_E, node_G, e, a, f, b, fan_4G, rate_K, free_s):  # type: ignore[no-untyped-def]
    """`fans_s` as it would be with expert e gone from rank a to b, and f from b to a."""
    _swap_copies(home_E, node_G, e, a, f, b, fan_4G)
    out_s = fans_s(fan_4G, rate_K, free_s)
    _swap_copies(home_E, node_G, f, a, e, b, fan_4G)
    return out_s


@kernel
def best_change(row, held, bounds, num, node_only, free_s, wanted_s, until_EG, t, choice_5):  # type: ignore[no-untyped-def]
    """Looks for the change of the least price: a slot gets another expert or none, or slots of two ranks exchange experts.

    Args:
        free_s: seconds of copies that do not hide but do not count.
        wanted_s: a change that is barred counts if its price is below this.
        until_EG: steps before which an expert may neither come to a rank nor leave it.
        choice_5: filled with rank and place of the slot, the expert it gets, and rank and place of the slot that gets its own
            (-1: none). A rank of -1: there is no change.
    """
    expert_GR, at_EG, fan_4G = held.expert_GR, held.at_EG, held.fan_4G
    load_E, home_E, node_G, rate_K = row.load_E, row.home_E, row.node_G, row.rate_K
    toggled_s_EGK, moved_s_PGK, total_s_K = bounds.toggled_s_EGK, bounds.moved_s_PGK, bounds.total_s_K
    G, R = expert_GR.shape
    copies_s, best_s, first = 0.0, np.inf, 0
    for r in range(G):
        for e in expert_GR[r]:
            copies_s += replica_s(home_E, node_G, rate_K, e, r)
    choice_5[:] = -1
    for a in range(G):
        for i in range(R):
            old = expert_GR[a, i]
            if old < 0 and i > 0 and expert_GR[a, i - 1] < 0:
                continue  # one empty slot is as good as another
            without_s = copies_s - replica_s(home_E, node_G, rate_K, old, a)
            for e in range(-1, home_E.size):
                if e == old or (e >= 0 and (at_EG[e, a] or load_E[e] == 0)):
                    continue
                if e >= 0 and node_only and node_G[home_E[e]] != node_G[a]:
                    continue
                barred = (old >= 0 and until_EG[old, a] > t) or (e >= 0 and until_EG[e, a] > t)
                enough_s = min(best_s, wanted_s) if barred else best_s
                other_s = without_s + replica_s(home_E, node_G, rate_K, e, a)
                this_s, first = _largest(total_s_K, num, toggled_s_EGK, old, a, e, a, other_s, enough_s, first)
                if this_s < enough_s:
                    this_s += _fans_after_s(home_E, node_G, old, a, e, -1, fan_4G, rate_K, free_s)
                if this_s < enough_s:
                    best_s = this_s
                    choice_5[0], choice_5[1], choice_5[2], choice_5[3] = a, i, e, -1
            for b in range(a + 1, G):
                if node_only and node_G[a] != node_G[b]:
                    continue
                for j in range(R):
                    e = expert_GR[b, j]
                    if old == e or (e < 0 and j > 0 and expert_GR[b, j - 1] < 0):
                        continue
                    if (old >= 0 and at_EG[old, b]) or (e >= 0 and at_EG[e, a]):
                        continue
                    barred = old >= 0 and (until_EG[old, a] > t or until_EG[old, b] > t)
                    barred |= e >= 0 and (until_EG[e, a] > t or until_EG[e, b] > t)
                    enough_s = min(best_s, wanted_s) if barred else best_s
                    p, q = a * R + i if old >= 0 else -1, b * R + j if e >= 0 else -1
                    other_s = without_s + replica_s(home_E, node_G, rate_K, e, a)
                    other_s += replica_s(home_E, node_G, rate_K, old, b) - replica_s(home_E, node_G, rate_K, e, b)
                    this_s, first = _largest(total_s_K, num, moved_s_PGK, p, b, q, a, other_s, enough_s, first)
                    if this_s < enough_s:
                        this_s += _fans_after_s(home_E, node_G, old, a, e, b, fan_4G, rate_K, free_s)
                    if this_s < enough_s:
                        best_s = this_s
                        choice_5[0], choice_5[1], choice_5[2], choice_5[3], choice_5[4] = a, i, e, b, j


@kernel
def make_change(row, held, choice_5, t, state_1, until_EG):  # type: ignore[no-untyped-def]
    """Makes a change and bars its return for some steps. Returns the expert that the slot held."""
    a, i, e, b, j = choice_5
    old = held.expert_GR[a, i]
    _swap_copies(row.home_E, row.node_G, old, a, e, b, held.fan_4G)
    held.expert_GR[a, i] = e
    wait = random(state_1, TENURE)
    if old >= 0:
        held.at_EG[old, a], until_EG[old, a] = False, t + TENURE + wait
    if e >= 0:
        held.at_EG[e, a], until_EG[e, a] = True, t + 1 + wait // 2
    if b >= 0:
        held.expert_GR[b, j] = old
        if old >= 0:
            held.at_EG[old, b], until_EG[old, b] = True, t + 1 + wait // 2
        if e >= 0:
            held.at_EG[e, b], until_EG[e, b] = False, t + TENURE + wait
    return old
