"""`Taot`, the policy of the TAOT-like rows: optimal transport of load from overloaded ranks, with a price for crossing nodes."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.fields import real, whole
from foremoe.problem.problem import Problem
from foremoe.solvers.base import RowSolver
from foremoe.solvers.split.kernels import even_targets, start_at_home

# Letters: G ranks, S slots per rank, E experts.


class Options(NamedTuple):
    node_only: bool  # whether replicas must stay inside their home's node
    far: float  # Gibbs kernel of a copy between nodes, relative to 1 inside a node
    rounds: int  # number of Sinkhorn iterations


@kernel
def _flows(over_G: Array, node_G: Array, options: Options) -> Array:
    """Returns the pairs to move from every overloaded rank to every rank below its target, float64 [G, G], after Sinkhorn."""
    G = over_G.size
    near_GG = np.zeros((G, G))
    for g in range(G):
        for h in range(G):
            if over_G[g] > 0 and over_G[h] < 0:
                near_GG[g, h] = 1.0 if node_G[g] == node_G[h] else 0.0 if options.node_only else options.far
    give_G, take_G = np.ones(G), np.ones(G)
    for _ in range(options.rounds):
        for g in range(G):
            reach = 0.0
            for h in range(G):
                reach += near_GG[g, h] * take_G[h]
            give_G[g] = over_G[g] / reach if reach > 0.0 else 0.0
        for h in range(G):
            reach = 0.0
            for g in range(G):
                reach += near_GG[g, h] * give_G[g]
            take_G[h] = -over_G[h] / reach if reach > 0.0 else 0.0
    for g in range(G):
        for h in range(G):
            near_GG[g, h] *= give_G[g] * take_G[h]
    return near_GG


@kernel
def taot_row(load_E: Array, node_G: Array, num_base: int, options: Options, expert_GS: Array, quota_GS: Array) -> None:
    """Solves one row of `Taot` (see `RowSolver.edit`)."""
    G, S = expert_GS.shape
    _, load_G = start_at_home(load_E, num_base, expert_GS, quota_GS)
    over_G = load_G - even_targets(load_G, np.zeros(G, np.int64))
    flow_GG = _flows(over_G, node_G, options)
    used_G = np.full(G, num_base)
    while True:
        giver, taker, most = -1, -1, 1.0
        for g in range(G):
            for h in range(G):
                if flow_GG[g, h] > most and over_G[g] > 0 and over_G[h] < 0 and used_G[h] < S:
                    giver, taker, most = g, h, flow_GG[g, h]
        if giver < 0:
            break
        want, best = min(over_G[giver], -over_G[taker]), -1
        for b in range(num_base):
            there = False
            for s in range(num_base, used_G[taker]):
                there |= expert_GS[taker, s] == expert_GS[giver, b]
            if there or quota_GS[giver, b] == 0:
                continue
            # Choose the smallest expert that fills the flow, or else the largest one.
            if best < 0 or (
                quota_GS[giver, b] > quota_GS[giver, best]
                if quota_GS[giver, best] < want
                else want <= quota_GS[giver, b] < quota_GS[giver, best]
            ):
                best = b
        if best < 0:
            flow_GG[giver, taker] = 0.0
            continue
        amount = min(want, np.int64(quota_GS[giver, best]))
        expert_GS[taker, used_G[taker]], quota_GS[taker, used_G[taker]] = expert_GS[giver, best], amount
        used_G[taker] += 1
        quota_GS[giver, best] -= amount
        over_G[giver] -= amount
        over_G[taker] += amount
        flow_GG[giver, taker] -= amount


@dataclass(frozen=True)
class Taot(RowSolver):
    """Moves excess load to less loaded ranks by entropic optimal transport with a price for distance and one expert per flow.

    This follows the abstract of TAOT (arXiv 2608.03676). Overload and spare capacity are the two sides of a balanced transport
    problem with a communication-cost matrix. Sinkhorn iterations give flows between ranks, which are matched to whole replicas
    and their tokens. The following rules are our own. The cost of a copy is its time in seconds, inside a node or between nodes.
    The largest flow is served first, by the smallest expert that fills it. A receiver takes load up to its spare capacity. The
    solver starts from the homes and never returns a placement that is worse than the homes.

    Attributes:
        epsilon: Weight of the entropy, as a share of the cost of the most expensive copy.
        rounds: Number of Sinkhorn iterations.
    """

    epsilon: float = 0.1
    rounds: int = 50

    edit = staticmethod(taot_row)
    Options = Options

    def __post_init__(self) -> None:
        real(self.epsilon, "epsilon of Taot", 0.0)
        whole(self.rounds, "rounds of Taot", 1, 10**6)

    def options(self, node_only: bool, problem: Problem) -> Any:
        """Returns the options, including the Gibbs kernel of a copy between nodes relative to a copy inside a node."""
        cluster = problem.cluster
        near = min(1.0, cluster.rdma_bytes_per_s / cluster.nic_sharing / cluster.peer_bytes_per_s)
        return Options(node_only, math.exp(-(1.0 - near) / self.epsilon), self.rounds)
