"""Taot: optimal transport from overloaded to idle ranks, with a price on crossing nodes."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.base.fields import real, whole
from foremoe.problem.problem import Problem
from foremoe.solvers.base import RowSolver
from foremoe.solvers.split.kernels import even_targets, start_at_home

# Letters: G ranks, S slots per rank, E experts.


class Options(NamedTuple):
    node_only: bool  # whether replicas stay inside their home's node
    far: float  # Gibbs kernel of a copy between nodes; that of a copy inside a node is 1
    rounds: int  # Sinkhorn iterations


@kernel
def _flows(over_G, node_G, options):
    """float64 [G, G]: pairs from every overloaded to every idle rank, by Sinkhorn's iterations."""
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
def taot_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """One row of `Taot`; see `RowSolver.edit`."""
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
            # The smallest expert that fills the flow, or else the largest one.
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
    """Moves excess load to idle ranks as entropic optimal transport with a price on distance, one expert per planned flow.

    After TAOT (arXiv 2608.03676) as its abstract describes it: overload and spare capacity are the two sides of a balanced
    transport problem with a communication-cost matrix; Sinkhorn's iterations give flows between ranks; flows are matched to whole
    replicas and their tokens. Our own: the cost of a copy is its seconds, inside a node or between nodes; the largest flow is
    served first, by the smallest expert that fills it, and a receiver takes up to its spare capacity. Starts from the homes
    and never returns a worse placement.

    Attributes:
        epsilon: weight of the entropy, as a share of the dearest copy.
        rounds: Sinkhorn iterations.
    """

    epsilon: float = 0.1
    rounds: int = 50

    edit = staticmethod(taot_row)
    Options = Options

    def __post_init__(self) -> None:
        real(self.epsilon, "epsilon of Taot", 0.0)
        whole(self.rounds, "rounds of Taot", 1, 10**6)

    def options(self, node_only: bool, problem: Problem) -> Any:
        """The Gibbs kernel of a copy between nodes, relative to one inside a node."""
        cluster = problem.cluster
        near = min(1.0, cluster.rdma_bytes_per_s / cluster.nic_sharing / cluster.peer_bytes_per_s)
        return Options(node_only, math.exp(-(1.0 - near) / self.epsilon), self.rounds)
