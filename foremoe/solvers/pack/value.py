"""The price of a packing, which `ExpertAware` minimises: the predicted seconds of an update stage, from tables of sequences."""

import dataclasses
import math

import numpy as np

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.budget import require_budget
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.machine.cluster import Cluster
from foremoe.machine.elements import pair_overhead_seconds
from foremoe.machine.window import window_seconds
from foremoe.problem.exchange import pair_prices
from foremoe.problem.kernels.demand import add_rows
from foremoe.routing.trace import RoutingTrace
from foremoe.solvers.pack import kernels as kernels
from foremoe.solvers.pack.balanced_tokens import model_of, slowest_attention

# Letters: M micro-steps, L layers, J layers of a sample, G ranks, V nodes, E experts, R replicas, Q sequences,
# X = Q + 1: the last entry is no sequence.

# Number of exchanges in an update: dispatch and combine, forward and backward.
_EXCHANGES = 4.0
# Number of sampled layers for which replicas are predicted. They represent all layers.
_SAMPLED_LAYERS = 16
# Number of sequences converted to float64 at once.
_BLOCK = 512


class PackValue:
    """Tables of one trace on one cluster, from which prices of packings are computed. `ExpertAware` describes the options."""

    def __init__(self, trace: RoutingTrace, cluster: Cluster, home_LE: Array | None, skew_weight: float, redundant: int) -> None:
        model, G, E = model_of(trace), cluster.num_ranks, trace.num_experts
        passes, window_passes = 1.0 + cluster.backward_ratio, 1.0 + cluster.window_backward_ratio
        self.skew_weight, prices = skew_weight, pair_prices(model, cluster)
        rank_LE = home_ranks(trace, G, home_LE)
        self.pairs_XLG = home_pairs(trace, G, rank_LE)
        # All work of a token on its own rank, as FLOPs at the speed of attention. `micro_step_s` holds the fixed part of a layer.
        lengths_Q, bare = trace.seq_len_Q.astype(np.float64), dataclasses.replace(cluster, layer_overhead_s=0.0)
        window_Q = window_seconds(model, bare, lengths_Q, lengths_Q**2)
        self.attention_Q = np.rint(window_Q * cluster.attention_flops_per_s)
        # Seconds per attention FLOP of the slowest rank, per pair of the mean load, and per pair by which the largest rank load
        # exceeds the mean. Exchanges also wait for the latter; see `pair_prices`.
        self.window_s = trace.L * window_passes / cluster.attention_flops_per_s
        self.work_s = passes * (model.flops_per_pair / cluster.expert_flops_per_s + pair_overhead_seconds(model, cluster))
        self.pair_s = self.work_s + _EXCHANGES * prices.late_s
        self.micro_step_s = trace.L * (
            _EXCHANGES * cluster.exchange_latency_s
            + (cluster.slot_overhead_s + cluster.backward_slot_s) * -(-E // G)
            + window_passes * cluster.layer_overhead_s
        )
        peer_s, rdma_s = _EXCHANGES * prices.peer_s, _EXCHANGES * prices.rdma_s
        pairs_QG = self.pairs_XLG[:-1].sum(axis=1, dtype=np.float64)
        node_QG = pairs_QG @ (cluster.node_of_rank_G[:, None] == cluster.node_of_rank_G).astype(np.float64)
        self._send_QG = rdma_s * (pairs_QG.sum(axis=1, keepdims=True) - node_QG) + peer_s * (node_QG - pairs_QG)
        self._node_G = cluster.node_of_rank_G.astype(np.int64)
        self._num_replicas_V = np.minimum(redundant * np.bincount(self._node_G), E)
        # A rank's own replicas change with every micro-step, so gathering sequences on a rank gains nothing.
        self.foresees = redundant > 0 and cluster.num_nodes > 1
        if self.foresees:
            sample_J = np.unique(np.linspace(0, trace.L - 1, min(trace.L, _SAMPLED_LAYERS)).round().astype(np.int64))
            self._nearer_s = (rdma_s - peer_s) * trace.L / len(sample_J)
            self._node_JE = self._node_G[rank_LE[sample_J]]
            self._pairs_QJE = expert_pairs(trace, sample_J)

    def send_QG(self, rank_Q: Array) -> Array:
        """Returns the seconds to dispatch each sequence's pairs from every rank, float64 [Q, G], with replicas for `rank_Q`.

        Every node is assumed to serve the experts at home there and, for each redundant slot, one other expert that its sequences
        use most. Only sampled layers are considered. Replicas are the same in all micro-steps.
        """
        if not self.foresees:
            return self._send_QG
        V, Q, (J, E) = len(self._num_replicas_V), len(rank_Q), self._node_JE.shape
        wanted_VJE = np.zeros((V, J, E), np.int64)
        add_rows(self._pairs_QJE.reshape(Q, -1), self._node_G[rank_Q], wanted_VJE.reshape(V, -1))
        wanted_VJE[self._node_JE, np.arange(J)[:, None], np.arange(E)] = -1  # at home
        held_VJE = np.zeros((V, J, E))
        for v, num in enumerate(self._num_replicas_V):
            most_JR = np.argsort(-wanted_VJE[v], axis=1, kind="stable")[:, :num]
            held_VJE[v, np.arange(J)[:, None], most_JR] = 1.0
        held_VJE[wanted_VJE < 0] = 0.0
        # These are integers in float64, so sums do not depend on their order.
        served_QV = np.empty((Q, V))
        for low in range(0, Q, _BLOCK):
            block = self._pairs_QJE[low : low + _BLOCK].reshape(-1, J * E).astype(np.float64)
            served_QV[low : low + _BLOCK] = block @ held_VJE.reshape(V, -1).T
        return self._send_QG - self._nearer_s * served_QV[:, self._node_G]

    def seconds(self, micro_step_Q: Array, rank_Q: Array, send_QG: Array | None = None) -> float:
        """Returns the predicted seconds of a packing. Without `send_QG`, the best replicas for the packing are assumed."""
        M, (Q, G) = int(micro_step_Q.max()) + 1, self._send_QG.shape
        load_MLG = np.zeros((M, *self.pairs_XLG.shape[1:]), np.int64)
        add_rows(self.pairs_XLG[:-1].reshape(Q, -1), micro_step_Q.astype(np.int64), load_MLG.reshape(M, -1))
        mean = load_MLG.sum() / G
        excess = load_MLG.max(axis=2).sum() - mean
        send_QG = self.send_QG(rank_Q) if send_QG is None else send_QG
        send_s = send_QG[np.arange(Q), rank_Q].sum()
        window_s = self.window_s * slowest_attention(self.attention_Q, micro_step_Q, rank_Q, G)
        experts_s = self.work_s * mean + self.skew_weight * self.pair_s * excess
        return float(window_s + experts_s + M * self.micro_step_s + send_s)


def home_ranks(trace: RoutingTrace, num_ranks: int, home_LE: Array | None) -> Array:
    """Returns the home rank of every expert, int64 [L, E]. If `home_LE` is None, homes are contiguous and as even as possible."""
    L, E = trace.L, trace.num_experts
    if home_LE is None:
        return np.tile(np.arange(E) * num_ranks // E, (L, 1))
    home_LE = frozen_array(home_LE, np.int32, "home_LE", (L, E))
    if (np.sort(home_LE, axis=1) != np.arange(E)).any():
        raise InputError(f"home_LE must be a permutation of the {E} home slots in every layer.")
    return home_LE.astype(np.int64) * num_ranks // E


def home_pairs(trace: RoutingTrace, num_ranks: int, rank_LE: Array) -> Array:
    """Returns the number of pairs of every sequence by home rank of the expert, int32 [Q + 1, L, G]. The last row is zero."""
    return _count_by_group(trace, np.arange(trace.L), rank_LE, num_ranks, trace.Q + 1)


def expert_pairs(trace: RoutingTrace, sample_J: Array) -> Array:
    """Returns the number of every sequence's pairs by expert, in the layers `sample_J`, int32 [Q, J, E]."""
    E, J = trace.num_experts, len(sample_J)
    return _count_by_group(trace, sample_J, np.tile(np.arange(E), (J, 1)), E, trace.Q)


def _count_by_group(trace: RoutingTrace, layer_J: Array, group_JE: Array, num_groups: int, num_rows: int) -> Array:
    """Returns pairs of every sequence by the group of their expert, int32 [num_rows, J, num_groups]. Surplus entries are zero."""
    shape = num_rows, len(layer_J), num_groups
    what = f"this packer's counts of {trace.Q} sequences x {len(layer_J)} layers x {num_groups} experts or ranks"
    require_budget(4 * math.prod(shape), what, "pack such short sequences with AsGiven or BalancedTokens", trace.num_bytes)
    out_QJG = np.zeros(shape, np.int32)
    known_T = np.empty(0, np.bool_) if trace.known_T is None else trace.known_T
    tokens = trace.topk_TLK, frozen_array(known_T, np.bool_, "known_T"), trace.cuts
    for_rows(lambda low, high: kernels.count_pairs(low, high, *tokens, layer_J, group_JE, out_QJG), trace.Q, whole=True)
    return out_QJG
