"""The start of a row's search, from two settlings with exact splits and from sets of replicas near tokens."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import inlined_kernel, inner_kernel, kernel
from foremoe.problem.rates import exposed_s, free_fans
from foremoe.solvers.rows import assign, bare_homes, clean_row, copy_of
from foremoe.solvers.search.bring import bring_row
from foremoe.solvers.search.copies import Copies, Rule
from foremoe.solvers.search.level import level_goal
from foremoe.solvers.search.parts import BRING, COPY_LIMITS, NEAREST, NODE_FIRST, PRUNE, SPLIT
from foremoe.solvers.search.prune import prune_row
from foremoe.solvers.search.settle import Wants, nothing_wanted, settle_on
from foremoe.solvers.search.state import price_of
from foremoe.solvers.split.flow import UNLIMITED, split_row

# Letters: G ranks, S slots per rank, V nodes, X places.


@inner_kernel
def _wider(near, far, one_node, num_slots, rates):
    """Returns the next limits on copies out of a home, in its node and to other nodes, and the exposed seconds they allow.

    Only a limit that can bind is raised, that is, one below the number of redundant slots.
    """
    more_near, more_far = near + 1 + near // 4, far + 1 + far // 4
    none = np.int64(0)
    near_s, far_s = exposed_s(more_near, none, rates), exposed_s(none, more_far, rates)
    if one_node or (near < num_slots and (near_s <= far_s or far >= num_slots)):
        return more_near, far, max(near_s, exposed_s(none, far, rates))
    return near, more_far, max(far_s, exposed_s(near, none, rates))


@inner_kernel
def _binds(near, far, one_node, num_slots):
    """Returns whether a limit on copies out of a home can bind, that is, whether it is below the number of redundant slots."""
    return near < num_slots or (far < num_slots and not one_node)


@inlined_kernel
def _settled(goal, blind, s, placed):
    """Settles from bare homes, first with copies that overlap with compute, then with more while balance can pay for them."""
    node_G, num_base, rates = s.row.ranks.node_G, s.home_GB.shape[1], s.rates
    G, S = placed.expert_GS.shape
    near_G, far_G = np.zeros(G, np.int64), np.zeros(G, np.int64)
    one_rack, one_node = node_G.max() == 0, s.node_only or node_G.min() == node_G.max()
    wants = nothing_wanted()
    if blind and s.located:
        # Sources are counted per node, or per rank if there is one node.
        wants = Wants(
            np.arange(G) if one_rack else node_G, np.ascontiguousarray(s.row.load_EG.T) if one_rack else s.row.demand_VE.copy()
        )
    rule = Rule(node_G, num_base, s.node_only, not blind, blind, np.ones(G))
    near, far = free_fans(rates)
    if s.parts & COPY_LIMITS == 0:
        near = far = np.int64(G * S)
    if one_node:
        far = np.int64(0)
    node_goal = goal if one_node else level_goal(np.bool_(True), node_G, placed.load_G)
    while True:
        settle_on(goal if far > 0 else node_goal, rule, Copies(near, far, near_G, far_G), wants, placed)
        over = placed.load_G.max() - goal
        if over <= 0 or not _binds(near, far, one_node, G * s.num_slots):
            break
        near, far, least_s = _wider(near, far, one_node, G * s.num_slots, rates)
        if least_s >= rates.pair_s * over:
            break
    clean_row(num_base, placed)


@kernel
def _keep_cheaper(tried, best_s, best, s):
    """Overwrites `best` with `tried` if `tried` costs less. Returns the seconds of the cheaper one."""
    this_s = price_of(tried, s)
    if this_s < best_s:
        assign(best, tried)
    return min(this_s, best_s)


@kernel
def start_row(s, best):
    """Overwrites `best` with the cheapest placement among `best`, bare homes, the settlings and replicas near tokens.

    The traffic of `s` must be empty before the call.
    """
    num_base, node_G = s.home_GB.shape[1], s.row.ranks.node_G
    num_nodes = node_G.max() + 1
    clean_row(num_base, best)
    home = bare_homes(s.row.load_E, num_base, best.expert_GS)
    best_s = price_of(best, s)
    if (best.expert_GS[:, num_base:] >= 0).any():
        best_s = _keep_cheaper(home, best_s, best, s)
    goal = level_goal(s.node_only, node_G, home.load_G)
    tried = copy_of(home)
    for blind in (True, False):
        if home.load_G.max() <= goal:
            break
        if blind and (s.node_only or (num_nodes == 1 and not s.located)):
            continue
        if s.parts & (NEAREST if blind else NODE_FIRST) == 0:
            continue
        assign(tried, home)
        _settled(goal, blind, s, tried)
        reached = split_row(goal, UNLIMITED, num_base, tried) if s.parts & SPLIT else tried.load_G.max()
        clean_row(num_base, tried)
        if s.parts & PRUNE:
            prune_row(reached, s.row.load_E, num_base, tried)
        best_s = _keep_cheaper(tried, best_s, best, s)
    if s.parts & BRING and s.located and not s.node_only and num_nodes > 1 and s.num_slots > 0 and goal > 0:
        bring_row(goal, home, tried, best_s, best, s)
