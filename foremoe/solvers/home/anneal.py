"""`Anneal`: finds homes by simulated annealing with swaps that lower the largest load, summed over micro-steps."""

import math
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.fields import real, whole
from foremoe.base.parallel import for_rows
from foremoe.levels import HomeSolver
from foremoe.problem.estimate import problem_rates
from foremoe.problem.problem import Problem
from foremoe.problem.rates import Rates
from foremoe.solvers.home.assign import few_moves, home_slots
from foremoe.solvers.home.price import move_seconds, price_L, row_seconds_L
from foremoe.solvers.home.swaps import Cooling, anneal, scaled, settle_inside
from foremoe.solvers.search.search import Search

# Letters: M micro-steps, L layers, G ranks, V domains, E experts.

# The first temperature as a share of the balanced sum, and the last one divided by the first. The schedule is geometric.
_HEAT, _COOLING = 0.002, 0.01
# If distance to tokens counts, most of the objective is a sum over experts, so a shorter and colder search finds as much.
_FEWER, _COLDER = 4, 10.0
# Weight of the sum of squares, and that of the largest rank load under "time" if replicas may go anywhere.
_SMOOTH, _SKEW_WEIGHT = 2.0, 0.1
# Under "time", this solver plans this number of micro-steps with the present and with the new homes.
TRIAL, TRIAL_STEPS = Search(effort=0), 8


@dataclass(frozen=True)
class Anneal(HomeSolver):
    """Swaps experts between nodes in each layer by simulated annealing, starting from the current homes.

    Replicas inside a node balance its ranks, but only replicas between nodes balance the nodes. The objective is therefore the
    largest node load per rank, summed over the micro-steps of the step. If there are no redundant slots, the objective is the
    largest rank load instead. A sum of squares smooths the objective. Afterwards, experts are placed on the ranks of their node
    so that few replicas are needed to balance these ranks.

    Under ``"time"``, if source ranks are known, homes also move closer to their tokens. The objective then adds the time to
    dispatch every expert's pairs and is not smoothed. If replicas may go anywhere, balancing the homes costs more than it saves.
    Experts are then placed rank by rank, and the excess of the largest rank load has a weight of 0.1. Moving
    homes closer to tokens gains most after `ExpertAware`, which gathers similar sequences in a node.

    Moving experts has a price. The homes of a layer change only if the gain exceeds the price:

    * Under ``"balance"``, the price of moving all experts is `move_price` times the objective at perfect balance, in equal
      shares. The objective plus the price must fall by `min_gain`. With a single node, homes do not change.
    * Under ``"time"``, the time to move the weights and `state_bytes` per weight counts as exposed. A layer's move takes as long
      as its busiest rank and link class. ``Search(effort=0)`` plans 8 of the micro-steps with the current and with the new homes.
      The time saved over all micro-steps, minus the time of the moves, must reach `min_gain` of the current time. Both times are
      *model, uncalibrated*.

    Source: the annealing with swaps that ReLibra describes (arXiv 2605.08639). Objective, prices, schedule and proposals are our
    own.

    Attributes:
        sweeps: Number of proposed swaps per expert.
        min_gain: Smallest relative gain for which homes change.
        move_price: Price of moving all experts under ``"balance"``, as a share of the objective at perfect balance.
        state_bytes: Bytes that move with every weight of an expert under ``"time"``. Use 12 for fp32 master weights and two fp32
            moments, 4 if only compute homes are swapped and fp32 gradients are sent back, and 0 if only the weights move.
        seed: Seed of the random proposals.
    """

    sweeps: int = 1000
    min_gain: float = 0.002
    move_price: float = 0.04
    state_bytes: float = 12.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self.sweeps, "sweeps of Anneal", 0, 10**6)
        whole(self.seed, "seed of Anneal", -(2**63), 2**63 - 1)
        for name in ("move_price", "state_bytes", "min_gain"):
            real(getattr(self, name), f"{name} of Anneal", 0.0, 1.0 if name == "min_gain" else math.inf, open_low=False)

    def solve(self, problem: Problem) -> Array:
        """Returns ``home_LE``, int32. Layers that a cancellation skips keep their homes."""
        home_LE, toll_L2 = problem.home_LE.copy(), self._toll_L2(problem)
        timed, rates = problem.cost.objective == "time", problem_rates(problem)

        def block(layer: int, _: int) -> None:
            home_LE[layer] = self._layer(problem, layer, toll_L2[layer], rates)

        for_rows(block, problem.L, rows_per_block=1)
        changed_L = (home_LE != problem.home_LE).any(axis=1)
        if timed and changed_L.any():
            now_L, new_L = (row_seconds_L(problem, h, TRIAL, TRIAL_STEPS) for h in (problem.home_LE, home_LE))
            pays_L = new_L + price_L(problem, home_LE, self.state_bytes) <= (1.0 - self.min_gain) * now_L
            home_LE = np.where(pays_L[:, None], home_LE, problem.home_LE)
        return home_LE

    def value(self, load_ME: Array, rank_E: Array, domain_G: Array) -> float:
        """Returns the largest domain load per rank, summed over micro-steps and divided by its value at perfect balance.

        A perfect balance gives 1, and a layer without load gives 0. `load_ME` holds the pairs of one layer. A domain is a node
        or a rank.
        """
        total = load_ME.sum(dtype=np.float64)
        if total == 0.0:
            return 0.0
        size_V = np.bincount(domain_G)
        largest = sum((np.bincount(domain_G[rank_E], load_E, len(size_V)) / size_V).max() for load_E in load_ME)
        return float(largest * len(domain_G) / total)

    def domains(self, problem: Problem) -> Array:
        """Returns the domain of every rank, int64 [G].

        The domain is usually the node of the rank. The domain is the rank itself if there are no redundant slots, or if homes
        move closer to their tokens and replicas may go anywhere.
        """
        by_rank = problem.R == 0 or (_located(problem) and not _bound(problem))
        return np.arange(problem.G) if by_rank else problem.cluster.node_of_rank_G.astype(np.int64)

    def _toll_L2(self, problem: Problem) -> Array:
        """Returns the cost of moving one expert inside its node and between nodes, float64 [L, 2].

        The cost is relative to the layer's objective at perfect balance.
        """
        if problem.cost.objective == "balance":
            return np.full((problem.L, 2), self.move_price / problem.E)
        # Moves are spread over the ranks, so each move delays all ranks for its share of the time.
        move_2 = np.array(move_seconds(problem, self.state_bytes)) / problem.G
        mean_L1 = problem.load_MLE.sum(axis=(0, 2), dtype=np.float64)[:, None] / problem.G
        balanced_L1 = problem_rates(problem).pair_s * mean_L1
        return np.divide(move_2, balanced_L1, out=np.zeros((problem.L, 2)), where=balanced_L1 > 0.0)

    def _send_EV(self, problem: Problem, layer: int, domain_G: Array, rates: Rates) -> Array:
        """Returns seconds over all micro-steps to dispatch every expert's pairs if one domain serves them all, float64 [E, V]."""
        assert problem.load_MLGE is not None
        node_G = problem.cluster.node_of_rank_G
        load_GE = problem.load_MLGE[:, layer].sum(axis=0, dtype=np.float64)
        in_node_GG = (node_G[:, None] == node_G).astype(np.float64)
        node_GE = in_node_GG @ load_GE
        send_GE = rates.rdma_pair_s * (load_GE.sum(axis=0) - node_GE) + rates.peer_pair_s * (node_GE - load_GE)
        size_V = np.bincount(domain_G)
        mean_VG = (domain_G == np.arange(len(size_V))[:, None]) / size_V[:, None]
        return (mean_VG @ send_GE).T

    def _layer(self, problem: Problem, layer: int, toll_2: Array, rates: Rates) -> Array:
        """Returns the layer's new home slots, or the current ones if changing them cannot pay."""
        load_ME, home_E, domain_G = problem.load_MLE[:, layer], problem.home_LE[layer], self.domains(problem)
        node_G, located, timed = problem.cluster.node_of_rank_G, _located(problem), problem.cost.objective == "time"
        now_E = (home_E // problem.B).astype(np.int64)
        before = self.value(load_ME, now_E, domain_G)
        several = int(domain_G.max()) > 0
        if before == 0.0 or problem.G == 1:
            return home_E
        # Perfect balance is a lower bound. Under "time", homes may still move closer to tokens or need fewer replicas in a node.
        if not located and (several or not timed) and (1.0 - self.min_gain) * before < 1.0:
            return home_E
        loads, domain_E = scaled(load_ME, domain_G), domain_G[now_E]
        if several:
            balanced = loads.even * problem.M
            node_V = np.zeros(len(loads.weight_V), np.int64)
            node_V[domain_G] = node_G
            cost_EV = balanced * toll_2[(node_G[now_E][:, None] != node_V).astype(np.int64)]
            cost_EV[np.arange(problem.E), domain_E] = 0.0
            if located:
                unit_s = rates.pair_s * load_ME.sum(dtype=np.float64) / (problem.G * balanced)
                cost_EV += self._send_EV(problem, layer, domain_G, rates) / unit_s
            # A smaller weight of loads is expressed as a larger weight of all other terms.
            weight = _SKEW_WEIGHT if located and problem.R > 0 and not _bound(problem) else 1.0
            cost_EV = np.rint(np.minimum(cost_EV, 1e6 * balanced) / weight).astype(np.int64)
            smooth, sweeps, heat = _SMOOTH, self.sweeps, _HEAT * balanced
            if located:
                smooth, sweeps, heat = 0.0, -(-sweeps // _FEWER), heat / (_COLDER * weight)
            # The seed depends on the model's own layer number, so a layer's homes do not depend on the other planned layers.
            seed = np.uint64((self.seed * 0x9E3779B97F4A7C15 + int(problem.moe_layer_L[layer])) % 2**64)
            anneal(loads, cost_EV, smooth, Cooling(sweeps * problem.E, heat, _COOLING), seed, domain_E)
        by_rank = len(loads.weight_V) == problem.G
        rank_E = domain_E if by_rank else settle_inside(loads.load_EM, domain_E, now_E, node_G)
        if not (by_rank and located):
            rank_E = few_moves(rank_E, now_E, node_G, rename_nodes=not located)
        if not timed:
            away = float((domain_G[rank_E] != domain_G[now_E]).sum())
            if self.value(load_ME, rank_E, domain_G) + float(toll_2[0]) * away > (1.0 - self.min_gain) * before:
                return home_E
        return home_slots(rank_E, home_E, problem.B)


def _located(problem: Problem) -> bool:
    """Returns True if the distance between homes and tokens counts."""
    return problem.cost.objective == "time" and problem.load_MLGE is not None


def _bound(problem: Problem) -> bool:
    """Returns True if there are several nodes and replicas must stay inside their home's node."""
    return problem.replicas == "node" and problem.cluster.num_nodes > 1
