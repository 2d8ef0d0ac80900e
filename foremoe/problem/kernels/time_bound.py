"""A lower bound of a row's seconds under the objective time, over how many replicas there are.

Few replicas leave load where it is and tokens far from their experts; many cost copies. Whatever the number, the bound adds up
the least compute, the least dispatch and the least price of copies that this number allows; the row's bound is the smallest
sum. Replicas that all stay inside nodes are counted apart from those with one or more in another node: the former leave nodes the
load that they have, the latter pay for a copy over RDMA.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inlined_kernel, kernel
from foremoe.problem.rates import exposed_s, row_rates

# Letters: N rows, G ranks, B base slots, E experts, V nodes, K numbers of replicas from 0.


class Homes(NamedTuple):
    """Where experts live, and where replicas may: `node_only` inside their home's node, `redundant` on a rank."""

    base_NGB: Array
    node_G: Array
    node_only: bool
    redundant: int


class Least(NamedTuple):
    """The least seconds of dispatch, combine and replicas with k or more replicas."""

    plain_K: Array  # without exposed copies
    late_K: Array  # with those of k copies, however they are spread over ranks


@kernel
def fill_level(pairs, active_G, pair_s, slot_s):
    """The least ``max_g(pair_s * load_g + slot_s * active_g)`` over all loads >= 0 that sum to `pairs`, by water-filling."""
    floor_G = slot_s * np.sort(active_G)
    below = 0.0
    for i in range(floor_G.size):
        below += floor_G[i]
        level = (pair_s * pairs + below) / (i + 1)
        if i + 1 == floor_G.size or level <= floor_G[i + 1]:
            return max(level, floor_G[-1])
    return 0.0


@kernel
def _top(value_E, out):
    """The largest of `value_E` into `out`, descending; zeros where there are no more."""
    out[:] = 0
    last = out.size - 1
    if last == 0:  # one slot per rank: a maximum without branches is several times as fast
        most = value_E[0]
        for e in range(1, value_E.size):
            most = max(most, value_E[e])
        out[0] = most
        return
    least = 0
    for e in range(value_E.size):
        value = value_E[e]
        if value > least:
            i = last
            while i > 0 and out[i - 1] < value:
                out[i] = out[i - 1]
                i -= 1
            out[i] = value
            least = out[last]


@inlined_kernel
def near_pairs(load_GE, demand_VE, base_GB, node_G, node_only, redundant, own_K, node_K):
    """Fills `own_K` and `node_K`: at most so many pairs are served on their own rank, inside their own node, with k replicas
    (for `node_K`: in other nodes than their home's).

    A rank serves on its own at most its demand for its homes and, with every replica, its demand for that expert; R replicas
    at most. A node likewise, with the slots of all its ranks.
    """
    G, E = load_GE.shape
    B = base_GB.shape[1]
    num = min(redundant, E)
    own_gain, node_gain = np.zeros((G, num), np.int64), np.zeros((G, num), np.int64)
    demand_E, node_E = np.empty(E, load_GE.dtype), np.empty(E, demand_VE.dtype)
    own, inside, row = np.int64(0), np.int64(0), 0
    for node in range(node_G.max() + 1):
        for e in range(E):
            node_E[e] = demand_VE[node, e]
        ranks = 0
        for g in range(G):
            if node_G[g] != node:
                continue
            ranks += 1
            if node_only:
                demand_E[:] = 0
                for h in range(G):
                    if node_G[h] == node and h != g:
                        for b in range(B):
                            demand_E[base_GB[h, b]] = load_GE[g, base_GB[h, b]]
                for b in range(B):
                    own += load_GE[g, base_GB[g, b]]
            else:
                for e in range(E):
                    demand_E[e] = load_GE[g, e]
                for b in range(B):
                    own += demand_E[base_GB[g, b]]
                    demand_E[base_GB[g, b]] = 0
            if num:
                _top(demand_E, own_gain[g])
        for g in range(G):
            if node_G[g] == node:
                for b in range(B):
                    inside += node_E[base_GB[g, b]]
                    node_E[base_GB[g, b]] = 0
        if num and not node_only:
            _top(node_E, node_gain[row : row + ranks].reshape(-1))
        row += ranks
    own_K[0], node_K[0] = own, inside
    sorted_own, sorted_node = np.sort(own_gain.reshape(-1)), np.sort(node_gain.reshape(-1))
    for k in range(1, own_K.size):
        own_K[k] = own_K[k - 1] + sorted_own[-k]
        node_K[k] = node_K[k - 1] + sorted_node[-k]


@kernel
def copies_s(own_K, node_K, num_ranks, pairs, rates, near, far):
    """Fills `near` for replicas inside their homes' nodes, `far` for those of which at least one is not."""
    peer, rdma = rates.peer_pair_s, rates.rdma_pair_s
    # Where RDMA is faster than peer links, leaving the node costs less, and only a rank's own pairs save anything.
    own_s, node_s = min(peer, rdma), max(0.0, rdma - peer)
    excess_s = rates.replica_rdma_s - rates.replica_peer_s
    inside_s = -node_s * node_K[0]
    some_far = some_far_late = np.inf  # the best number of replicas in other nodes, from 1
    near_late = exposed_s(1.0, 0.0, rates)
    for k in range(own_K.size):
        if k:
            far_s = k * excess_s - node_s * node_K[k]
            some_far = min(some_far, far_s)
            # Every rank sends out 1 / num_ranks of the copies on average.
            fan = float((k + num_ranks - 1) // num_ranks)
            some_far_late = min(some_far_late, far_s + exposed_s(0.0, fan, rates))
        near_s = rates.fixed_s + rdma * pairs - own_s * own_K[k] + k * rates.replica_peer_s
        near.plain_K[k], near.late_K[k] = near_s + inside_s, near_s + inside_s + (near_late if k else 0.0)
        far.plain_K[k], far.late_K[k] = near_s + some_far, near_s + some_far_late
    for least in (near, far):
        for least_K in least:
            for k in range(own_K.size - 1, -1, -1):
                least_K[k] = max(least_K[k], rates.fixed_s)
                if k + 1 < own_K.size:
                    least_K[k] = min(least_K[k], least_K[k + 1])


@kernel
def fan_s(fan, most_near, far, rates):
    """The least seconds that do not hide where a rank sends `fan` copies, up to `most_near` inside its node, more if `far`."""
    if not far:
        return exposed_s(float(fan), 0.0, rates) if fan <= most_near else np.inf
    least = np.inf
    for near in range(min(fan, most_near) + 1):
        least = min(least, exposed_s(float(near), float(fan - near), rates))
    return least


@inlined_kernel
def least_row_s(floor_s, load_GB, near_G, far, rates, least):
    """The smallest sum of compute, dispatch and copies over how many replicas there are.

    Replicas are made one by one, each of the largest expert, or what is left of it, of the slowest rank: after j of them no
    choice of j replicas has a faster slowest rank, nor gets there with fewer copies from one home. No slot serves more than the
    slowest rank. Compute takes at least `floor_s`; a rank sends at most `near_G` copies inside its node, and others if `far`.
    """
    G, B = load_GB.shape
    pair_s, slot_s = rates.pair_s, rates.slot_s
    compute_G, fan_G = np.zeros(G), np.zeros(G, np.int64)
    busy, least_active = 0, B
    for g in range(G):
        active = 0
        for b in range(B):
            compute_G[g] += pair_s * load_GB[g, b]
            active += load_GB[g, b] > 0
        compute_G[g] += slot_s * active
        busy += active
        least_active = min(least_active, active)
    left_GB = load_GB.astype(np.float64)
    mean_s = pair_s * load_GB.sum() / G
    late_s = 0.0
    best = np.inf
    for k in range(least.plain_K.size):
        slowest = compute_G.argmax()
        compute_s = max(compute_G[slowest], max(floor_s, mean_s + slot_s * (busy + k) / G))
        best = min(best, compute_s + max(least.late_K[k], least.plain_K[k] + late_s))
        if compute_G[slowest] <= floor_s:
            break
        # A replica on a rank that is no slower serves no more than this, beside the busy base slots there.
        b = left_GB[slowest].argmax()
        given = min(left_GB[slowest, b], (compute_G[slowest] - slot_s * (least_active + 1)) / pair_s)
        if given <= 0.0:
            break
        left_GB[slowest, b] -= given
        compute_G[slowest] -= pair_s * given
        fan_G[slowest] += 1
        late_s = max(late_s, fan_s(fan_G[slowest], near_G[slowest], far, rates))
    return best


@kernel
def time_bound_rows(low, high, counts, homes, rates, times, load_bound_2N, bound_N):
    """Fills ``bound_N[low:high]`` with the least seconds of rows without ``times.base_N``.

    Replicas that stay inside nodes are told apart from others. The largest rank load is no smaller
    than the first of `load_bound_2N`, nor than the second if replicas stay inside nodes. Sources count as uniform where they are
    not known.
    """
    node_G = homes.node_G
    G, B = homes.base_NGB.shape[1], homes.base_NGB.shape[2]
    num_replicas = G * min(homes.redundant, counts.load_NE.shape[1])
    ranks_V = np.bincount(node_G)
    may_leave = not homes.node_only and ranks_V.size > 1
    near_G = (ranks_V[node_G] - 1) * min(homes.redundant, B)
    share = 0.0
    for node in range(ranks_V.size):
        share += (ranks_V[node] / G) * (ranks_V[node] / G)
    own_K, node_K = np.empty(num_replicas + 1), np.empty(num_replicas + 1)
    near, far = Least(np.empty_like(own_K), np.empty_like(own_K)), Least(np.empty_like(own_K), np.empty_like(own_K))
    load_GB, active_G = np.empty((G, B), np.int64), np.empty(G, np.int64)
    for n in range(low, high):
        of_row = row_rates(rates, times, n)
        pairs = 0.0
        for g in range(G):
            active_G[g] = 0
            for b in range(B):
                load_GB[g, b] = counts.load_NE[n, homes.base_NGB[n, g, b]]
                pairs += load_GB[g, b]
                active_G[g] += load_GB[g, b] > 0
        own_K[:], node_K[:] = pairs / G, pairs * share
        if counts.located:
            near_pairs(
                counts.load_NGE[n], counts.demand_NVE[n], homes.base_NGB[n], node_G, homes.node_only, homes.redundant, own_K,
                node_K,
            )  # fmt: skip
        copies_s(own_K, node_K, G, pairs, of_row, near, far)
        filled_s = fill_level(pairs, active_G, rates.pair_s, rates.slot_s)
        active_s = rates.slot_s * active_G.min()
        floor_s = max(filled_s, rates.pair_s * load_bound_2N[0, n] + active_s)
        near_floor_s = max(filled_s, rates.pair_s * load_bound_2N[1, n] + active_s)
        apart_s = least_row_s(floor_s, load_GB, near_G, True, of_row, far) if may_leave else np.inf
        if near_floor_s + near.plain_K[0] < apart_s:
            apart_s = min(apart_s, least_row_s(near_floor_s, load_GB, near_G, False, of_row, near))
        bound_N[n] = apart_s
