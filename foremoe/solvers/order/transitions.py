"""Transitions: the order of micro-steps, and replicas that stay from one to the next."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.fields import flag
from foremoe.base.parallel import for_rows
from foremoe.levels import OrderSolver
from foremoe.plan.cost_in_order import sequence_cost, transfers_in_order, weight_price
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.rates import Rates
from foremoe.problem.schedule import Schedule
from foremoe.solvers.order.walk import Walk, distances, shortest_path, walk_layer
from foremoe.solvers.rows import problem_rows
from foremoe.solvers.search.search import Search

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, S slots per rank, R redundant slots, P buffers of a rank, X hints.

# About what a replica costs per micro-step if it stays for three; other shares from 0.1 to 0.5 came out alike.
_KEPT = 0.3


@dataclass(frozen=True)
class Transitions(OrderSolver):
    """Orders micro-steps so that like follows like, and plans each with what the ones before left in resident slots.

    Order: nearest neighbours and 2-opt on how much the shares of experts differ between two micro-steps, summed over layers; the
    order given stays if it comes out cheaper. Then every layer is walked in that order. A row starts from the cheaper of its own
    placement and the replicas that its buffers hold (balanced anew), and slot by slot takes what the rank holds, what its own
    placement names, or what suits the mean of all micro-steps. Weights that are held cost nothing, their gradients do. A layer
    keeps its placements if they cost no more. The method is our own.

    Attributes:
        reorder: False keeps the order of micro-steps.
        replan: False keeps the placements.
        invest: also tries to fill a layer's slots in the first micro-step with what suits the mean of all, whatever that costs
            there; kept where the layer's micro-steps together are cheaper. That micro-step may cost more than without replicas.
    """

    reorder: bool = True
    replan: bool = True
    invest: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            flag(getattr(self, field.name), f"{field.name} of Transitions")

    def solve(self, problem: Problem, placement: Placement) -> tuple[Array, Placement]:
        """The order and the placements; see `OrderSolver`."""
        orders = [np.arange(problem.M, dtype=np.int32)]
        if self.reorder and problem.M > 2:
            apart_MM = np.zeros((problem.M, problem.M))
            distances(problem.load_MLE, apart_MM)
            orders.append(shortest_path(apart_MM).astype(np.int32))
        best_s, best = np.inf, (orders[0], placement)
        mean = _mean_of(problem)
        suits = Search(effort=0).solve(mean, mean.static()).expert_NGS[:, :, problem.B :]
        # Replicas of the placement, and those that suit the mean of all micro-steps.
        hint_XNGR = np.stack([placement.expert_NGS[:, :, problem.B :], np.tile(suits, (problem.M, 1, 1))])
        for order_M in orders:
            found, cost_L = placement, self._layers(problem, placement, order_M)
            for invest in (False, True)[: self.replan * (1 + self.invest)]:
                other = _walk(problem, placement, order_M, hint_XNGR, invest)
                other_L = self._layers(problem, other, order_M)
                found = other.where(np.tile(other_L < cost_L, problem.M), found)
                cost_L = np.minimum(cost_L, other_L)
            if cost_L.sum() < best_s:
                best_s, best = cost_L.sum(), (order_M, found)
        return best

    @staticmethod
    def _layers(problem: Problem, placement: Placement, order_M: Array) -> Array:
        """float64 [L]: seconds as sent."""
        cost = sequence_cost(problem, placement, transfers_in_order(problem, placement, order_M))
        return cost.total_s.reshape(problem.M, problem.L).sum(axis=0)


class _KeptCopies(CostModel):
    """The time of a row where only a share of what sending weights takes counts: replicas that stay are paid once."""

    def adjust(self, rates: Rates) -> Rates:
        peer, rdma = (1.0 - _KEPT) * weight_price(rates)
        return rates._replace(
            copy_peer_s=_KEPT * rates.copy_peer_s, copy_rdma_s=_KEPT * rates.copy_rdma_s,
            replica_peer_s=rates.replica_peer_s - peer, replica_rdma_s=rates.replica_rdma_s - rdma,
        )  # fmt: skip


def _mean_of(problem: Problem) -> Problem:
    """One micro-step with the mean load of all."""

    def mean(array_M: Array | None) -> Any:
        return None if array_M is None else np.rint(array_M.mean(axis=0, keepdims=True)).astype(np.int32)

    load_MLGE = mean(problem.load_MLGE)
    return dataclasses.replace(
        problem, cost=_KeptCopies(overlap=problem.cost.overlap),
        schedule=Schedule.plain(problem.stage, 1, problem.schedule.reforward), load_MLGE=load_MLGE,
        load_MLE=mean(problem.load_MLE) if load_MLGE is None else load_MLGE.sum(axis=2), tokens_MG=mean(problem.tokens_MG),
        attention_MG=None if problem.attention_MG is None else problem.attention_MG.mean(axis=0, keepdims=True),
        resident_LGS=None,
    )  # fmt: skip


def walk_of(problem: Problem, placement: Placement, hint_XNGR: Array, invest: bool) -> Walk:
    """What `walk_layer` reads, for all layers."""
    rows = problem_rows(problem)
    free = rows.rates._replace(
        copy_peer_s=0.0, copy_rdma_s=0.0, gradient_peer_s=0.0, gradient_rdma_s=0.0, replica_peer_s=0.0, replica_rdma_s=0.0
    )
    peer_s, rdma_s = weight_price(rows.rates).tolist()
    return Walk(rows, free, peer_s, rdma_s, invest, hint_XNGR, placement.expert_NGS, placement.quotas_NGS)


def _walk(problem: Problem, placement: Placement, order_M: Array, hint_XNGR: Array, invest: bool) -> Placement:
    """`walk_layer` on every layer; those that a cancel left out keep the placement."""
    M, L, G, R = problem.M, problem.L, problem.G, problem.R
    expert_NGS, quota_NGS = placement.expert_NGS.copy(), placement.quotas_NGS.copy()
    start_LGP = np.full((L, G, problem.slots.num_buffers(R, 1)), -1, np.int64)
    if problem.resident_LGS is not None:
        start_LGP[:, :, :R] = problem.resident_LGS[:, :, problem.B :]
    walk = walk_of(problem, placement, hint_XNGR, invest)
    done_L = for_rows(
        lambda layer, _: walk_layer(order_M.astype(np.int64) * L + layer, start_LGP[layer], walk, expert_NGS, quota_NGS), L, 1
    )
    found = Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)
    return found.where(np.tile(done_L, M), placement)
