"""Level pack: micro-steps and ranks by the predicted time of the stage: late attention, rank load of experts, and dispatch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from foremoe.arrays import Array, frozen_array
from foremoe.cluster import Cluster
from foremoe.errors import InputError
from foremoe.parallel import for_rows
from foremoe.solvers.as_given import AsGiven, sample_groups
from foremoe.solvers.balanced_tokens import BalancedTokens, attention_flops, model_of, rank_tokens
from foremoe.solvers.base import PackSolver
from foremoe.solvers.kernels import pack as kernels

if TYPE_CHECKING:
    from foremoe.routing import RoutingTrace

# Letters: M micro-steps, L layers, G ranks, E experts, Q sequences, X = Q + 1: the last entry stands for no sequence.

# Passes of an update: forward and two backward GEMMs; one exchange each way.
_GEMM_PASSES, _EXCHANGES = 3.0, 4.0


class _Prices(NamedTuple):
    """Seconds of an update stage: per attention FLOP of a late rank, per pair of a largest rank load, per micro-step; and
    `send_QG` for dispatching a sequence's pairs from every rank."""

    window_s: float
    pair_s: float
    micro_step_s: float
    send_QG: Array


@dataclass(frozen=True, slots=True)
class ExpertAware(PackSolver):
    """Packs for the predicted time of the stage, by annealed moves and swaps of sequences between micro-steps and ranks.

    The objective is the cost model's, without replicas: per micro-step the attention of the late rank, per row the load of the
    busiest rank, and the pairs that leave their rank or node, which fall when a sequence starts where its experts live. With
    replicas to come, loads will be nearly even whatever the packing: `skew_weight` says how much of the excess of the busiest
    rank over the mean is then still paid, and attention and locality decide. Starts from `AsGiven` or `BalancedTokens`,
    whichever is better under the objective, and is never worse than either.

    Homes are contiguous unless `solve` is told others. Holds a table of 4 * Q * L * G bytes. The model is the trace's own
    (where it names no preset, qwen3-30b-a3b stands in: only ratios matter), the stage an update.

    Attributes:
        skew_weight: price of a pair by which the busiest rank exceeds the mean, as a part of its price without replicas.
            1: packing alone, no replicas. The default suits one redundant slot per rank.
        cluster: a preset of `Cluster`: what attention, expert compute and links cost.
        ranks_per_node: None: the preset's own.
        locality: price the pairs that leave their rank and node; False leaves them out, as packers do that see loads only.
        sweeps: proposed changes per sequence.
        temperature: at the start, as a part of the mean cost of one sequence; it falls geometrically to a hundredth.
    """

    skew_weight: float = 0.1
    cluster: str = "8xh100"
    ranks_per_node: int | None = None
    locality: bool = True
    sweeps: int = 500
    temperature: float = 0.03

    def __post_init__(self) -> None:
        if not 0.0 <= self.skew_weight <= 1.0:
            raise InputError(f"ExpertAware needs a skew_weight in [0, 1]; got {self.skew_weight!r}.")
        if not isinstance(self.locality, bool):
            raise InputError(f"locality must be True or False; got {self.locality!r}.")
        if not isinstance(self.sweeps, int) or not 0 <= self.sweeps <= 10**6:
            raise InputError(f"ExpertAware needs a whole number of sweeps from 0 to {10**6}; got {self.sweeps!r}.")
        if not 0.0 < self.temperature < math.inf:
            raise InputError(f"ExpertAware needs a finite temperature above 0; got {self.temperature!r}.")
        Cluster.preset(self.cluster, num_ranks=1, ranks_per_node=self.ranks_per_node)

    def solve(
        self,
        trace: RoutingTrace,
        *,
        num_ranks: int,
        tokens_per_rank: int,
        sample_group_Q: Array | None = None,
        seed: int = 0,
        home_LE: Array | None = None,
    ) -> tuple[Array, Array]:
        """Deals every sequence once; arguments, result and errors as `AsGiven.solve`.

        No rank of a micro-step within the budget holds more tokens than tokens_per_rank or the fullest rank of the packing it
        started from, whichever is more.

        Args:
            seed: of the proposals.
            home_LE: home slots [L, E] if they are known already; default: contiguous.
        """
        starts = [
            packer.solve(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, sample_group_Q=sample_group_Q)
            for packer in (BalancedTokens(), AsGiven())
        ]
        group_Q = sample_groups(sample_group_Q, trace.Q)
        pairs_XLG = home_pairs(trace, num_ranks, home_LE)
        attention_Q = attention_flops(trace)
        prices = self._prices(trace, pairs_XLG, num_ranks)
        value = lambda found: self._value(prices, pairs_XLG, attention_Q, *found)  # noqa: E731
        start = min(starts, key=value)
        micro_step_Q, rank_Q = (array.astype(np.int64) for array in start)
        if self.sweeps == 0 or (num_ranks == 1 and micro_step_Q.max() == 0):
            return start
        tokens_MG = rank_tokens(trace.seq_len_Q, micro_step_Q, rank_Q, num_ranks)
        budget = num_ranks * tokens_per_rank
        within_MG = tokens_MG[tokens_MG.sum(axis=1) <= budget]
        room = max(tokens_per_rank, int(within_MG.max(initial=0)))
        # Sequences of like length stand side by side in their group: most swaps that keep to the limits are of such.
        order_Q = np.lexsort((trace.seq_len_Q, group_Q))
        low_Q = np.searchsorted(group_Q, group_Q, side="left")
        high_Q = np.searchsorted(group_Q, group_Q, side="right")
        pad = lambda array: np.concatenate([array, np.zeros((1, *array.shape[1:]), array.dtype)])  # noqa: E731
        kernels.anneal(
            pad(trace.seq_len_Q), pad(attention_Q), pairs_XLG, pad(prices.send_QG), prices.window_s,
            self.skew_weight * prices.pair_s, order_Q, np.argsort(order_Q), low_Q, high_Q, budget, room, self.sweeps * trace.Q,
            self.temperature * value(start) / trace.Q, np.uint64(seed % 2**64), micro_step_Q, rank_Q, tokens_MG,
        )  # fmt: skip
        found = micro_step_Q.astype(np.int32), rank_Q.astype(np.int32)
        # The search never ends worse than it began, but adds up in another order.
        return found if value(found) < value(start) else start

    def objective(
        self, trace: RoutingTrace, micro_step_Q: Array, rank_Q: Array, *, num_ranks: int, home_LE: Array | None = None
    ) -> float:
        """What is minimised: predicted seconds of an update stage, uncalibrated; see the class.

        With ``skew_weight=1`` they are those of `CostModel` without replicas, where every expert of the busiest rank has load.
        """
        pairs_XLG = home_pairs(trace, num_ranks, home_LE)
        return self._value(self._prices(trace, pairs_XLG, num_ranks), pairs_XLG, attention_flops(trace), micro_step_Q, rank_Q)

    def _prices(self, trace: RoutingTrace, pairs_XLG: Array, num_ranks: int) -> _Prices:
        model, G = model_of(trace), num_ranks
        cluster = Cluster.preset(self.cluster, num_ranks=G, ranks_per_node=self.ranks_per_node)
        flops_per_s = cluster.flops_per_s * cluster.compute_efficiency
        peer_s = _EXCHANGES * model.token_bytes / (G * cluster.peer_bytes_per_s)
        rdma_s = _EXCHANGES * model.token_bytes / (G * cluster.rdma_bytes_per_s_per_rank)
        pairs_QG = pairs_XLG[:-1].sum(axis=1, dtype=np.float64)
        in_node_GG = (cluster.node_of_rank_G[:, None] == cluster.node_of_rank_G).astype(np.float64)
        node_QG = pairs_QG @ in_node_GG
        latency_s = 0.0
        if G > 1:
            latency_s = cluster.rdma_latency_s if cluster.num_nodes > 1 else cluster.peer_latency_s
        row_s = _EXCHANGES * latency_s + _GEMM_PASSES * cluster.slot_overhead_s * -(-trace.num_experts // G)
        return _Prices(
            window_s=trace.L * _GEMM_PASSES / flops_per_s,
            pair_s=_GEMM_PASSES * model.flops_per_pair / flops_per_s,
            micro_step_s=trace.L * row_s,
            send_QG=self.locality * rdma_s * (pairs_QG.sum(axis=1, keepdims=True) - node_QG)
            + self.locality * peer_s * (node_QG - pairs_QG),
        )

    def _value(self, prices: _Prices, pairs_XLG: Array, attention_Q: Array, micro_step_Q: Array, rank_Q: Array) -> float:
        M, (Q, G) = int(micro_step_Q.max()) + 1, prices.send_QG.shape
        attention_MG = np.bincount(micro_step_Q * np.int64(G) + rank_Q, attention_Q, M * G).reshape(M, G)
        load_MLG = np.zeros((M, *pairs_XLG.shape[1:]), np.int64)
        kernels.add_pairs(pairs_XLG, micro_step_Q.astype(np.int64), load_MLG)
        mean = load_MLG.sum() / G
        excess = load_MLG.max(axis=2).sum() - mean
        send_s = prices.send_QG[np.arange(Q), rank_Q].sum()
        late_s = prices.window_s * attention_MG.max(axis=1).sum()
        return float(late_s + prices.pair_s * (mean + self.skew_weight * excess) + M * prices.micro_step_s + send_s)


def home_pairs(trace: RoutingTrace, num_ranks: int, home_LE: Array | None) -> Array:
    """int32 [Q + 1, L, G]: pairs of every sequence by the rank their expert lives on; the last row is zero."""
    L, E = trace.L, trace.num_experts
    if home_LE is None:
        rank_LE = np.tile(np.arange(E) * num_ranks // E, (L, 1))
    else:
        rank_LE = frozen_array(home_LE, np.int32, "home_LE", (L, E)).astype(np.int64) * num_ranks // E
        if (np.sort(home_LE, axis=1) != np.arange(E)).any():
            raise InputError(f"home_LE must be a permutation of the {E} home slots in every layer.")
    pairs_XLG = np.zeros((trace.Q + 1, L, num_ranks), np.int32)
    known_T = np.empty(0, np.bool_) if trace.known_T is None else trace.known_T
    cuts, known_T = trace.cuts, frozen_array(known_T, np.bool_, "known_T")
    for_rows(
        lambda low, high: kernels.count_pairs(low, high, trace.topk_TLK, known_T, cuts, rank_LE, pairs_XLG), trace.Q, whole=True
    )
    return pairs_XLG
