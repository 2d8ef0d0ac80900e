"""Row kernels of `Search` under ``"balance"``. They settle ranks, split pairs exactly and drop replicas that are not needed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.kernels.load_bound import bound_row
from foremoe.solvers.rows import Placed, assign, bare_homes, clean_row, copy_of, home_of_experts
from foremoe.solvers.search.copies import Copies, Rule
from foremoe.solvers.search.prune import count_row, prune_row
from foremoe.solvers.search.settle import nothing_wanted, settle_on
from foremoe.solvers.split.flow import UNLIMITED, split_row

# Letters: N rows, G ranks, S slots per rank, E experts.


# The number of settlings of a row, and the range of the givers' weights in repeated ones.
TRIES, SPREAD = 16, 0.6


class Options(NamedTuple):
    """The options of the row functions."""

    node_only: bool  # whether replicas stay inside their home's node
    tries: int  # settlings per row; with 0, the goal is tried once and nothing is split


@kernel
def level_goal(node_only, node_G, load_G):
    """Returns the mean load of a rank, rounded up, or that of the most loaded node's ranks if replicas must stay inside nodes."""
    num_domains = node_G.max() + 1 if node_only else 1
    goal = np.int64(0)
    for domain in range(num_domains):
        total, num = np.int64(0), 0
        for g in range(load_G.size):
            if not node_only or node_G[g] == domain:
                total += load_G[g]
                num += 1
        goal = max(goal, -(-total // num))
    return goal


@kernel
def _bound(goal, node_only, node_G, num_base, quota_GS):
    """Returns `bound_row` of all ranks or, if replicas stay inside nodes, the largest one of a single node."""
    if not node_only:
        return bound_row(goal, np.ones(node_G.size, np.bool_), num_base, quota_GS)
    for node in range(node_G.max() + 1):
        goal = bound_row(goal, node_G == node, num_base, quota_GS)
    return goal


@inner_kernel
def _draw_weights(state, spread, weight_G):
    """Fills `weight_G` with random numbers around 1.0, `spread` apart at most (xorshift). Returns the generator's next state."""
    for g in range(weight_G.size):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        weight_G[g] = 1.0 + spread * (np.float64(state >> np.uint64(11)) / 9007199254740992.0 - 0.5)
    return state


@kernel
def search_row(goal, limit, rule, options, home_quota_GS, placed):
    """Overwrites `placed` with the best of several settlings that start from it, unless all exceed the maximum load `limit`.

    The goal is tried first. If ranks remain above the goal, it rises to the lower bound, and the target is bisected between this
    bound and the best maximum so far. After each failure, an exact split lowers the maximum. When the interval is used up, the
    bisection restarts with random weights of the givers, which are the same in every row. Relays are tried first and, at the best
    maximum, again at the end, because they reach the same balance with fewer replicas across nodes. The search sets `relay` and
    `weight_G` of `rule` itself. `home_quota_GS` holds the pairs at home before any pairs are moved.
    """
    most, tries, num_base = placed.load_G.max(), options.tries, rule.num_base
    if most <= goal:
        return
    limit = limit if limit < most else most - 1
    relays = not rule.node_only and rule.node_G.min() != rule.node_G.max()
    first, tried = copy_of(placed), copy_of(placed)
    G = placed.load_G.size
    weight_G, copies = np.ones(G), Copies(UNLIMITED, UNLIMITED, np.zeros(G, np.int64), np.zeros(G, np.int64))
    nowhere, state = nothing_wanted(), np.uint64(88172645463325252)
    bottom = target = goal
    relayed = found = False
    for t in range(tries + 1):
        last = t >= tries > 0 or limit < goal
        if last:
            if relayed or not relays or not found:
                break
            limit += 1
            target = limit
            weight_G[:] = 1.0
        relay = relays if t == 0 or last else False
        this_rule = Rule(rule.node_G, num_base, rule.node_only, relay, False, weight_G)
        copies.near_G[:], copies.far_G[:] = 0, 0
        assign(tried, first)
        settle_on(target, this_rule, copies, nowhere, tried)
        reached = tried.load_G.max()
        if reached > goal and tries > 0 and not (last and reached <= limit):
            reached = split_row(goal, limit, num_base, tried)
        if 0 <= reached <= limit:
            limit, relayed, found = reached - 1, relay, True
            assign(placed, tried)
        if last or tries == 0:
            break
        if t == 0 and limit >= goal:
            goal = bottom = _bound(goal, rule.node_only, rule.node_G, num_base, home_quota_GS)
        elif reached < 0 or reached > target:
            bottom = target if target > bottom else bottom
        if limit - bottom <= goal // 4096:
            bottom = goal
            state = _draw_weights(state, SPREAD, weight_G)
        target = max(goal, (bottom + limit) // 2)


@kernel
def balanced_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """Overwrites the placement of one row with the most even placement found. `RowSolver.edit` describes the arguments."""
    best = Placed(expert_GS, quota_GS, np.empty(node_G.size, np.int64))
    clean_row(num_base, best)
    home_E = home_of_experts(num_base, expert_GS)
    goal = level_goal(options.node_only, node_G, best.load_G)
    far, num = count_row(home_E, node_G, num_base, expert_GS)
    most, start_far, replicated = max(goal, best.load_G.max()), far, num > 0
    home, start = bare_homes(load_E, num_base, expert_GS), copy_of(best)
    rule, tried = Rule(node_G, num_base, options.node_only, False, False, np.ones(node_G.size)), copy_of(best)
    for keep in (False, True):
        if keep and not replicated:
            break
        assign(tried, start if keep else home)
        tries = options.tries
        if keep and most == goal:
            if far <= start_far:
                break  # nothing to gain, because all replicas of the start across nodes would remain
            tries = 0
        search_row(goal, most, rule, Options(options.node_only, tries), home.quota_GS, tried)
        clean_row(num_base, tried)
        reached = max(tried.load_G.max(), goal)
        prune_row(reached, load_E, num_base, tried)
        try_far, try_num = count_row(home_E, node_G, num_base, tried.expert_GS)
        if (reached, try_far, try_num) < (most, far, num):
            most, far, num = reached, try_far, try_num
            assign(best, tried)


@kernel
def balanced_rows(low, high, load_NE, node_G, num_base, options, expert_NGS, quota_NGS):
    """Calls `balanced_row` for rows [low, high)."""
    for n in range(low, high):
        balanced_row(load_NE[n], node_G, num_base, options, expert_NGS[n], quota_NGS[n])
