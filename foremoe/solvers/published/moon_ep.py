"""`MoonEp`: balances the ranks of a node exactly. Every receiving rank gets load from one other home rank."""

from dataclasses import dataclass

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.base import RowSolver
from foremoe.solvers.split.kernels import even_targets, start_at_home

# Letters: G ranks, V nodes, S slots per rank, E experts.


@kernel
def moon_ep_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """Solves one row of `MoonEp` (see `RowSolver.edit`)."""
    G, S = expert_GS.shape
    _, load_G = start_at_home(load_E, num_base, expert_GS, quota_GS)
    over_G = load_G - even_targets(load_G, node_G)
    received_G = np.zeros(G, np.bool_)
    while True:
        to = -1
        for g in range(G):
            if not received_G[g] and over_G[g] < 0 and (to < 0 or over_G[g] < over_G[to]):
                to = g
        if to < 0:
            break
        received_G[to] = True
        giver = to
        for g in range(G):
            if node_G[g] == node_G[to] and over_G[g] > over_G[giver]:
                giver = g
        if over_G[giver] <= 0:
            continue
        # Fill the receiver even if that puts the giver below its target, because the giver is filled later.
        for s in range(num_base, S):
            b = np.argmax(quota_GS[giver, :num_base])
            amount = min(np.int64(quota_GS[giver, b]), -over_G[to])
            if amount == 0:
                break
            expert_GS[to, s], quota_GS[to, s] = expert_GS[giver, b], amount
            quota_GS[giver, b] -= amount
            over_G[giver] -= amount
            over_G[to] += amount


@dataclass(frozen=True)
class MoonEp(RowSolver):
    """Gives every rank of a node the node's mean load by repeatedly filling the least loaded rank from the busiest rank.

    This follows MoonEP (MoonshotAI, 2026), whose planner is published as code. A rank receives load once, from one other home
    rank. It is filled to the mean even if that puts the giver below the mean. The giver is then filled later. The pairs are taken
    from the giver's experts with the most pairs left. E/G redundant slots are therefore enough for exact balance. With fewer
    slots, load without a free slot stays at home.

    Load is balanced inside a node, the NVLink domain, regardless of `Problem.replicas`, but not between nodes. The published
    planner runs EP groups of a single domain. Here, receivers are filled one after the other. The published order alternates
    between the receivers of one giver. Three features are not reproduced: kernels that write tokens to their slots without host
    synchronisation, static shapes, and weight multicast. The solver starts from the homes and never returns a placement that is
    worse than the homes.
    """

    edit = staticmethod(moon_ep_row)
