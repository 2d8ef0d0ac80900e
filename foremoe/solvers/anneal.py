"""Anneal: homes by annealed swaps on a smoothed sum over micro-steps of the largest load."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit

from foremoe.arrays import Array
from foremoe.errors import InputError
from foremoe.parallel import for_rows
from foremoe.problem import Problem
from foremoe.solvers.base import HomeSolver
from foremoe.solvers.lpt import few_moves, home_slots, lpt_ranks

# Below this share of a sum of powers, what two subtractions leave of it is rounding and no longer a sum of the others.
_CANCELLED = 1e-9

# Letters: M micro-steps, L layers, G ranks, V nodes, E experts, B base slots per rank; K groups, ranks or nodes.


@dataclass(frozen=True)
class Anneal(HomeSolver):
    """Per layer, swaps two experts of different ranks, one swap after the other, by simulated annealing.

    Minimises, over the step's micro-steps, the sum of the largest rank load plus `node_weight` times the sum of the largest
    node load (per rank of that node). Replicas inside a node even out its ranks, so with several nodes the nodes count most.
    A norm of power 32 stands for the maximum: it tells a swap that helps the second most loaded rank from one that is of no use.

    Starts from `Lpt` or the present homes, whichever is better; keeps the present homes unless the gain is worth the moves.
    Source: the swap annealing described for ReLibra (arXiv 2605.08639); norm, schedule and proposals are our own.

    Attributes:
        sweeps: proposed swaps per expert.
        temperature: at the start, as a share of the perfectly balanced objective.
        cooling: final temperature over the first; the schedule is geometric.
        node_weight: weight of nodes against ranks; acts with several nodes only.
        min_gain: smallest relative gain for which homes change at all.
        seed: of the proposals.
    """

    sweeps: int = 250
    temperature: float = 0.002
    cooling: float = 0.01
    node_weight: float = 4.0
    min_gain: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.sweeps, int) or not isinstance(self.seed, int) or not 0 <= self.sweeps <= 10**9:
            raise InputError(
                f"Anneal needs whole numbers, sweeps from 0 to {10**9}, seed any; got {self.sweeps!r} and {self.seed!r}."
            )
        if not (self.temperature > 0.0 and math.isfinite(self.temperature) and 0.0 < self.cooling <= 1.0):
            raise InputError(
                f"Anneal needs a temperature above 0 and a cooling in (0, 1]; got {self.temperature} and {self.cooling}."
            )
        if not (0.0 <= self.node_weight < math.inf and 0.0 <= self.min_gain <= 1.0):
            raise InputError(
                f"Anneal needs a finite node_weight from 0 and a min_gain in [0, 1]; got {self.node_weight} and {self.min_gain}."
            )

    def solve(self, problem: Problem) -> Array:
        """Returns ``home_LE`` int32; layers that a cancel left out keep their homes."""
        home_LE, node_G = problem.home_LE.copy(), problem.cluster.node_of_rank_G

        def block(low: int, high: int) -> None:
            for layer in range(low, high):
                # Seeded by the model's own layer number: a layer's homes do not depend on which others are planned with it.
                number = int(problem.moe_layer_L[layer])
                home_LE[layer] = self._layer(problem.load_MLE[:, layer], problem.home_LE[layer], node_G, number)

        for_rows(block, problem.L, rows_per_block=1)
        return home_LE

    def objective(self, load_ME: Array, rank_E: Array, node_G: Array) -> float:
        """What is minimised, for one layer: 1 + node_weight (or 1 on one node) if perfectly balanced and the norm a maximum.

        Args:
            load_ME: pairs of one layer.
            rank_E: home rank of every expert.
            node_G: node of every rank.
        """
        load_EM, rank_G, node_V = self._scaled(load_ME, node_G)
        rank_E = np.asarray(rank_E, np.int64)
        return float(_value(load_EM, rank_E, rank_G, node_G, node_V, float(self.node_weight)))

    def _scaled(self, load_ME: Array, node_G: Array) -> tuple[Array, Array, Array]:
        """Loads so that perfect balance costs 1 per term, the scale of a rank and of every node."""
        M, G = len(load_ME), len(node_G)
        mean = load_ME.sum(dtype=np.float64) / (M * G)
        load_EM = np.ascontiguousarray(load_ME.T, np.float64) / (mean if mean > 0.0 else 1.0)
        return load_EM, np.ones(G), 1.0 / np.bincount(node_G)

    def _layer(self, load_ME: Array, home_E: Array, node_G: Array, number: int) -> Array:
        base = len(home_E) // len(node_G)
        now_E = (home_E // base).astype(np.int64)
        before = self.objective(load_ME, now_E, node_G)
        if before == 0.0 or len(node_G) == 1:
            return home_E
        lpt_E = lpt_ranks(load_ME.sum(axis=0, dtype=np.int64), now_E, node_G)
        rank_E = lpt_E if self.objective(load_ME, lpt_E, node_G) < before else now_E.copy()
        load_EM, rank_G, node_V = self._scaled(load_ME, node_G)
        by_load_E = np.argsort(load_EM.sum(axis=1), kind="stable")
        _anneal(
            load_EM, by_load_E, np.argsort(by_load_E), rank_E, rank_G, node_G, node_V, float(self.node_weight),
            self.sweeps * len(home_E), float(self.temperature), float(self.cooling),
            np.uint64((self.seed * 0x9E3779B97F4A7C15 + number) % 2**64),
        )  # fmt: skip
        if self.objective(load_ME, rank_E, node_G) > (1.0 - self.min_gain) * before:
            return home_E
        return home_slots(few_moves(rank_E, now_E, node_G), home_E, base)


@njit(nogil=True, cache=True)
def _random(state):  # type: ignore[no-untyped-def]
    """SplitMix64 (Steele, Lea, Flood 2014): one uint64, the state moves on."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(nogil=True, cache=True)
def _below(state, num):  # type: ignore[no-untyped-def]
    return np.int64(_random(state) % np.uint64(num))


@njit(nogil=True, cache=True)
def _power(x):  # type: ignore[no-untyped-def]
    """x ** 32; squarings vectorise and a general power does not."""
    x *= x
    x *= x
    x *= x
    x *= x
    return x * x


@njit(nogil=True, cache=True)
def _root(x):  # type: ignore[no-untyped-def]
    """x ** (1 / 32)."""
    return math.sqrt(math.sqrt(math.sqrt(math.sqrt(math.sqrt(x)))))


@njit(nogil=True, cache=True)
def _norms(power_KM, sum_M):  # type: ignore[no-untyped-def]
    """Fills `sum_M` with the sum of powers of each micro-step and returns the norms' sum."""
    sum_M[:] = 0.0
    for k in range(power_KM.shape[0]):
        for m in range(sum_M.size):
            sum_M[m] += power_KM[k, m]
    total = 0.0
    for m in range(sum_M.size):
        total += _root(sum_M[m])
    return total


@njit(nogil=True, cache=True)
def _fill(load_EM, group_E, scale_K, load_KM, power_KM, sum_M):  # type: ignore[no-untyped-def]
    """Loads and powers of all groups from scratch; returns the norms' sum."""
    load_KM[:] = 0.0
    for e in range(group_E.size):
        k = group_E[e]
        for m in range(sum_M.size):
            load_KM[k, m] += load_EM[e, m] * scale_K[k]
    for k in range(scale_K.size):
        for m in range(sum_M.size):
            power_KM[k, m] = _power(load_KM[k, m])
    return _norms(power_KM, sum_M)


@njit(nogil=True, cache=True)
def _swapped(delta_M, a, b, scale_K, load_KM, power_KM, sum_M, work_M):  # type: ignore[no-untyped-def]
    """The norms' sum if group `a` gained `delta_M` and `b` lost it; only `work_M` is written."""
    up, down = scale_K[a], scale_K[b]
    load_a_M, load_b_M, power_a_M, power_b_M = load_KM[a], load_KM[b], power_KM[a], power_KM[b]
    cancelled = 0
    for m in range(delta_M.size):
        rest = sum_M[m] - power_a_M[m] - power_b_M[m]
        cancelled += rest < _CANCELLED * sum_M[m]
        work_M[m] = _root(max(rest, 0.0) + _power(load_a_M[m] + delta_M[m] * up) + _power(load_b_M[m] - delta_M[m] * down))
    if cancelled > 0:
        for m in range(delta_M.size):
            if sum_M[m] - power_a_M[m] - power_b_M[m] < _CANCELLED * sum_M[m]:
                rest = _power(load_a_M[m] + delta_M[m] * up) + _power(load_b_M[m] - delta_M[m] * down)
                for k in range(scale_K.size):
                    if k != a and k != b:
                        rest += power_KM[k, m]
                work_M[m] = _root(rest)
    total = 0.0
    for m in range(delta_M.size):
        total += work_M[m]
    return total


@njit(nogil=True, cache=True)
def _apply(delta_M, a, b, scale_K, load_KM, power_KM, sum_M):  # type: ignore[no-untyped-def]
    for m in range(delta_M.size):
        load_KM[a, m] += delta_M[m] * scale_K[a]
        load_KM[b, m] -= delta_M[m] * scale_K[b]
        power_KM[a, m] = _power(load_KM[a, m])
        power_KM[b, m] = _power(load_KM[b, m])
    return _norms(power_KM, sum_M)


@njit(nogil=True, cache=True)
def _value(load_EM, rank_E, rank_G, node_G, node_V, node_weight):  # type: ignore[no-untyped-def]
    """The objective of one layer, per micro-step."""
    G, V, M = rank_G.size, node_V.size, load_EM.shape[1]
    sum_M = np.empty(M)
    value = _fill(load_EM, rank_E, rank_G, np.empty((G, M)), np.empty((G, M)), sum_M)
    if V > 1:
        value += node_weight * _fill(load_EM, node_G[rank_E], node_V, np.empty((V, M)), np.empty((V, M)), sum_M)
    return value / M


@njit(nogil=True, cache=True)
def _anneal(  # type: ignore[no-untyped-def]
    load_EM, by_load_E, place_E, rank_E, rank_G, node_G, node_V, node_weight, num_proposals, temperature, cooling, seed
):
    """Improves `rank_E` in place; it ends at the best assignment met, the start included."""
    E, M = load_EM.shape
    G, V = rank_G.size, node_V.size
    load_GM, power_GM, sum_M = np.empty((G, M)), np.empty((G, M)), np.empty(M)
    load_VM, power_VM, node_sum_M = np.empty((V, M)), np.empty((V, M)), np.empty(M)
    delta_M, work_M = np.empty(M), np.empty(M)
    ranks = _fill(load_EM, rank_E, rank_G, load_GM, power_GM, sum_M)
    nodes = 0.0
    if V > 1:
        nodes = _fill(load_EM, node_G[rank_E], node_V, load_VM, power_VM, node_sum_M)
    best, best_E = ranks + node_weight * nodes, rank_E.copy()
    reach = max(1, E // 20)
    state = np.array([seed], np.uint64)
    heat = temperature * M * (1.0 + (node_weight if V > 1 else 0.0))
    step = cooling ** (1.0 / max(1, num_proposals))
    for i in range(num_proposals):
        heat *= step
        e = _below(state, E)
        # Experts of like load: late in the schedule nearly all swaps that still help are such.
        if i % 2 == 1:
            place = place_E[e] + _below(state, 2 * reach + 1) - reach
            if place < 0 or place >= E:
                continue
            f = by_load_E[place]
        else:
            f = _below(state, E)
        a, b = rank_E[e], rank_E[f]
        if a == b:
            continue
        uniform = (np.float64(_random(state) >> np.uint64(11)) + 1.0) * (1.0 / 9007199254740992.0)
        limit = ranks + node_weight * nodes - heat * math.log(uniform)
        for m in range(M):
            delta_M[m] = load_EM[f, m] - load_EM[e, m]
        v, w = node_G[a], node_G[b]
        new_nodes = nodes
        if v != w:
            new_nodes = _swapped(delta_M, v, w, node_V, load_VM, power_VM, node_sum_M, work_M)
            # No rank norm is below its mean, and those of all micro-steps add up to M.
            if node_weight * new_nodes + M > limit:
                continue
        new_ranks = _swapped(delta_M, a, b, rank_G, load_GM, power_GM, sum_M, work_M)
        if new_ranks + node_weight * new_nodes > limit:
            continue
        ranks = _apply(delta_M, a, b, rank_G, load_GM, power_GM, sum_M)
        if v != w:
            nodes = _apply(delta_M, v, w, node_V, load_VM, power_VM, node_sum_M)
        rank_E[e], rank_E[f] = b, a
        if ranks + node_weight * nodes < best:
            best = ranks + node_weight * nodes
            best_E[:] = rank_E
    rank_E[:] = best_E
