"""Row kernels of `Chain` under the objective ``"time"``: as much balance as pays, by the closed form of the cost model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inlined_kernel, inner_kernel, kernel
from foremoe.problem.kernels.load_bound import bound_row
from foremoe.problem.rates import add_copies, exposed_s
from foremoe.solvers.kernels.bring import bring_row
from foremoe.solvers.kernels.chain import FAILURES, Options, level_goal, plain_rule, search_row
from foremoe.solvers.kernels.flow import UNLIMITED, split_row
from foremoe.solvers.kernels.moves import Copies, Rule, new_moves
from foremoe.solvers.kernels.nearest import Wants, settle_nearest
from foremoe.solvers.kernels.price import count_copies, fans_seconds, free_fans, price_row
from foremoe.solvers.kernels.prune import prune_row
from foremoe.solvers.kernels.quota_flow import cheapest_quotas
from foremoe.solvers.kernels.rows import Placed, Row, assign, bare_homes, clean_row, copy_of, row_of
from foremoe.solvers.kernels.settle import settle_on
from foremoe.solvers.kernels.shed import most_loaded_first, shed_row

# Letters: N rows, I some rows, C candidates, G ranks, S slots per rank, V nodes, X places.

# Up to so many nodes, replicas near tokens are chosen for all ranks at once; with more nodes a rank's slots matter one by one.
NODES = 4
# Targets tried by `shed_row` for one limit.
SHEDS = 6
# Quotas are chosen again where the maximum load is above the goal by more than one part in LEVEL; on FEW ranks also where the row
# costs more than its goal by more than one part in CHEAP.
LEVEL, CHEAP, FEW = 200, 20, 16


class _Search(NamedTuple):
    """What all searches of a row share."""

    row: Row
    options: Options
    home: Placed  # all load at home
    goal: int  # pairs, the maximum load to reach
    bound: int  # pairs, no placement has a smaller maximum load
    order_G: Array  # int64, ranks from the most to the least loaded
    tried: Placed  # scratch


@inner_kernel
def _undo(moves, num_moves, most, row, fan_4G, placed):
    """Takes back the last moves of a settling that cost more than they save, dispatch aside; in place, but for `load_G`.

    Every move lowers the maximum `most` or leaves it, and adds to copies or leaves them. The search for the best number of moves
    goes from the end; it stops where all copies cost less than what the maximum has risen. `fan_4G` is scratch, zeros.
    """
    quota_GS, load_G, node_G, rates = placed.quota_GS, placed.load_G, row.node_G, row.rates
    count_copies(row, placed, fan_4G)
    copies_s = fans_seconds(fan_4G, rates)
    best_s, best = rates.pair_s * most + copies_s, num_moves
    for i in range(num_moves - 1, -1, -1):
        if rates.pair_s * most >= best_s:
            num_moves = i + 1
            break
        g, r, amount = moves.giver_C[i], moves.taker_C[i], moves.pairs_C[i]
        quota_GS[g, moves.base_C[i]] += amount
        quota_GS[r, moves.slot_C[i]] -= amount
        load_G[g] += amount
        load_G[r] -= amount
        most = max(most, load_G[g])
        if moves.new_C[i] == 1:
            add_copies(-1, g, r, node_G, fan_4G)
            copies_s = fans_seconds(fan_4G, rates)
        if rates.pair_s * most + copies_s < best_s:
            best_s, best = rates.pair_s * most + copies_s, i
        num_moves = i
    for i in range(num_moves, best):
        quota_GS[moves.giver_C[i], moves.base_C[i]] -= moves.pairs_C[i]
        quota_GS[moves.taker_C[i], moves.slot_C[i]] += moves.pairs_C[i]


@inner_kernel
def _wider(near, far, one_node, rates):
    """The next limits on copies out of a home, inside its node and to other nodes, and the seconds that they leave exposed."""
    more_near, more_far = near + 1 + near // 4, far + 1 + far // 4
    none = np.int64(0)
    near_s, far_s = exposed_s(more_near, none, rates), exposed_s(none, more_far, rates)
    if one_node or near_s <= far_s:
        return more_near, far, max(near_s, exposed_s(none, far, rates))
    return near, more_far, max(far_s, exposed_s(near, none, rates))


@inner_kernel
def _binds(near, far, one_node, num_slots):
    """Whether a limit on copies out of a home can be in the way: none leaves it for more than all redundant slots."""
    return near < num_slots or (far < num_slots and not one_node)


@kernel
def _own_pairs(redundant, row):
    """At least as many pairs as replicas let ranks serve on their own; 0 if sources are not known."""
    most = np.int64(0)
    for g in range(row.load_GE.shape[0] if row.located else 0):
        most += redundant * np.int64(row.load_GE[g].max())
    return most


@inlined_kernel
def _settled(goal, blind, row, thrifty, placed):
    """Settles from bare homes: first with copies that hide, then with more per link as long as balance may pay for them."""
    node_G, num_base, rates = row.node_G, row.num_base, row.rates
    G, S = placed.expert_GS.shape
    moves, num_moves = new_moves(2 * G * S + row.load_E.size), np.int64(0)
    near_G, far_G = np.zeros(G, np.int64), np.zeros(G, np.int64)
    one_rack, one_node = node_G.max() == 0, row.node_only or node_G.min() == node_G.max()
    # Where tokens come from counts by node, or by rank if there is one node.
    by_rank = one_rack and row.located
    place_G = np.arange(G) if by_rank else node_G.astype(np.int64)
    wants = Wants(place_G, (row.load_GE if by_rank else row.demand_VE).copy())
    rule = Rule(node_G, num_base, row.node_only, not blind, blind, thrifty, np.ones(G))
    near, far = free_fans(rates)
    if one_node:
        far = np.int64(0)
    node_goal = goal if one_node else level_goal(0.0, np.bool_(True), node_G, placed.load_G)
    while True:
        this_goal, copies = goal if far > 0 else node_goal, Copies(near, far, near_G, far_G)
        if blind and row.located:
            num_moves = settle_nearest(this_goal, rule, copies, wants, moves, num_moves, placed)
        else:
            num_moves = settle_on(this_goal, rule, copies, moves, num_moves, placed)
        over = placed.load_G.max() - goal
        if over <= 0 or not _binds(near, far, one_node, G * (S - num_base)):
            break
        near, far, least_s = _wider(near, far, one_node, rates)
        if least_s >= rates.pair_s * over:
            break
    _undo(moves, num_moves, placed.load_G.max(), row, np.zeros((4, G), np.int64), placed)
    clean_row(num_base, placed)


@kernel
def _keep_cheaper(row, tried, best_s, best):
    """Overwrites `best` with `tried` if that costs less. Returns the seconds of the cheaper one."""
    this_s = price_row(row, row.rates, tried)
    if this_s < best_s:
        assign(best, tried)
    return min(this_s, best_s)


@inlined_kernel
def _search_limits(search, inside, best_s, best):
    """Searches for every limit on copies out of a home, from copies that all hide to as many as less load could pay for.

    Overwrites `best` with what is cheaper; returns its seconds.
    """
    row, options, home, goal, tried = search.row, search.options, search.home, search.goal, search.tried
    rates, node_G, num_base, bound = row.rates, row.node_G, row.num_base, search.bound
    G, S = home.quota_GS.shape
    this_goal = level_goal(0.0, np.bool_(True), node_G, home.load_G) if inside and not row.node_only else goal
    if inside and not row.node_only and best_s <= rates.pair_s * this_goal - rates.peer_pair_s * _own_pairs(S - num_base, row):
        return best_s  # nodes differ by more than tokens that come nearer inside them can save
    rule = plain_rule(node_G, num_base, inside, options.slack > 0.0)
    few = Options(inside, max(1, options.tries // 4), options.spread, options.slack, options.relay)
    near_G, far_G = np.empty(G, np.int64), np.empty(G, np.int64)
    near, far = free_fans(rates)
    far = np.int64(0) if inside else max(far, np.int64(1))
    if not inside:
        near = max(near, np.int64(far * rates.copy_rdma_s / rates.copy_peer_s))
    vain = np.int64(0)
    while (best.load_G.max() - bound) * 1000 > goal and vain < 3:
        before_s = best_s
        assign(tried, home)
        search_row(this_goal, home.load_G.max(), rule, (near, far), few, home.quota_GS, tried)
        clean_row(num_base, tried)
        prune_row(tried.load_G.max(), row.load_E, FAILURES, num_base, tried)
        best_s = _keep_cheaper(row, tried, best_s, best)
        low, high = max(bound, this_goal), home.load_G.max()
        over_s = rates.pair_s * (tried.load_G.max() - low)
        for _ in range(SHEDS):
            target = (low + high) // 2
            assign(tried, home)
            near_G[:], far_G[:] = 0, 0
            shed_row(target, search.order_G, rule, Copies(near, far, near_G, far_G), tried)
            if tried.load_G.max() <= target:
                high = target
            else:
                low = target
            best_s = _keep_cheaper(row, tried, best_s, best)
        vain = 0 if best_s < before_s else vain + 1
        if not _binds(near, far, inside, G * (S - num_base)):
            break
        near, far, least_s = _wider(near, far, inside, rates)
        if least_s >= over_s:
            break
    return best_s


@inner_kernel
def _num_replicas(num_base, expert_GS):
    num = 0
    for g in range(expert_GS.shape[0]):
        for s in range(num_base, expert_GS.shape[1]):
            num += expert_GS[g, s] >= 0
    return num


@kernel
def _requoted(goal, row, tried, best_s, best, price_s_G):
    """Gives `best` the cheapest quotas of its replicas where it is far above the goal. Returns its seconds.

    Replicas without pairs leave. That idles a slot, and may make another replica needless: so quotas are chosen again.
    """
    level_s = row.rates.pair_s * goal
    level, cheap = (best.load_G.max() - goal) * LEVEL <= goal, (best_s - level_s) * CHEAP <= level_s
    if not row.located or row.rates.pair_s <= 0.0 or (level and (cheap or best.load_G.size > FEW)):
        return best_s
    num, fewer = _num_replicas(row.num_base, best.expert_GS), True
    while fewer:
        assign(tried, best)
        cheapest_quotas(row, tried, price_s_G)
        best_s, had = _keep_cheaper(row, tried, best_s, best), num
        num = _num_replicas(row.num_base, best.expert_GS)
        fewer = num < had
    return best_s


@kernel
def timed_rows(low, high, rows, options, expert_NGS, quota_NGS):
    """The cheapest of the start, bare homes and several settlings for rows [low, high), in place of the start."""
    num_base, node_only, located = rows.num_base, rows.node_only, rows.counts.located
    G = expert_NGS.shape[1]
    num_nodes, all_G, price_s_G = rows.node_G.max() + 1, np.ones(G, np.bool_), np.empty(G)
    for n in range(low, high):
        row, best = row_of(rows, n, expert_NGS[n]), Placed(expert_NGS[n], quota_NGS[n], np.empty(G, np.int64))
        clean_row(num_base, best)
        home = bare_homes(row.load_E, num_base, best.expert_GS)
        best_s, pair_s = price_row(row, row.rates, best), row.rates.pair_s
        if (best.expert_GS[:, num_base:] >= 0).any():
            best_s = _keep_cheaper(row, home, best_s, best)
        goal = level_goal(options.slack, node_only, rows.node_G, home.load_G)
        if home.load_G.max() <= goal:
            continue
        tried = copy_of(home)
        for blind in (True, False):
            if blind and (node_only or (num_nodes == 1 and not located)):
                continue
            if not blind and best_s <= pair_s * goal:
                break  # tokens come nearer by more than all copies cost: staying inside nodes cannot be cheaper
            assign(tried, home)
            _settled(goal, blind, row, options.slack > 0.0, tried)
            reached = split_row(goal, UNLIMITED, num_base, tried)
            clean_row(num_base, tried)
            prune_row(reached, row.load_E, FAILURES, num_base, tried)
            best_s = _keep_cheaper(row, tried, best_s, best)
        if located and not node_only and 1 < num_nodes <= NODES and expert_NGS.shape[2] > num_base:
            best_s = bring_row(goal, row, home, tried, best_s, best)
        best_s = _requoted(goal, row, tried, best_s, best, price_s_G)
        if options.tries == 0 or (best.load_G.max() - goal) * 1000 <= goal:
            continue
        # Links or experts too small leave some load above the goal. With few copies out of a home, which ones matters.
        bound = bound_row(goal, all_G, num_base, home.quota_GS)
        search = _Search(row, options, home, goal, bound, most_loaded_first(home.load_G), tried)
        had_s = best_s
        for inside in (True, False):
            if inside or not (node_only or num_nodes == 1):
                best_s = _search_limits(search, inside, best_s, best)
        if best_s < had_s:
            best_s = _requoted(goal, row, tried, best_s, best, price_s_G)


@kernel
def cheaper_rows(low, high, rows, row_I, expert_CIGS, quota_CIGS, expert_NGS, quota_NGS):
    """Overwrites rows ``row_I[low:high]`` with the cheapest candidate that costs less; slots without quota are emptied."""
    num_base, G = rows.num_base, expert_NGS.shape[1]
    for i in range(low, high):
        n = row_I[i]
        row, best = row_of(rows, n, expert_NGS[n]), Placed(expert_NGS[n], quota_NGS[n], np.empty(G, np.int64))
        clean_row(num_base, best)
        best_s = price_row(row, row.rates, best)
        for c in range(expert_CIGS.shape[0]):
            tried = Placed(expert_CIGS[c, i], quota_CIGS[c, i], np.empty(G, np.int64))
            clean_row(num_base, tried)
            best_s = _keep_cheaper(row, tried, best_s, best)
