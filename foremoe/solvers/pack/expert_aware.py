"""`ExpertAware`: packs sequences for the shortest predicted stage, with regard to attention, rank load and dispatch."""

from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.fields import real, whole
from foremoe.levels import PackSolver
from foremoe.machine.cluster import Cluster
from foremoe.routing.trace import RoutingTrace
from foremoe.solvers.pack import kernels as kernels
from foremoe.solvers.pack.balanced_tokens import BalancedTokens, rank_tokens
from foremoe.solvers.pack.value import PackValue
from foremoe.workload.packing import AsGiven, sample_groups

# Letters: M micro-steps, L layers, G ranks, E experts, Q sequences.

# Rounds, each of which chooses replicas again. The first temperature as a share of the mean cost of a sequence. It falls
# geometrically to a hundredth.
_ROUNDS, _HEAT = 3, 0.03


@dataclass(frozen=True, slots=True)
class ExpertAware(PackSolver):
    """Packs sequences for the shortest predicted stage. Simulated annealing moves and swaps them between micro-steps and ranks.

    The objective follows the cost model. It adds up three times: attention of the slowest rank per micro-step, experts of the
    busiest rank per row, and dispatch of pairs that leave their rank or node. Dispatch takes less time if a sequence is on the
    node of its experts. Replicas make loads nearly even with any packing, so the excess of the busiest rank over the mean counts
    only with the factor `skew_weight`. Replicas also shorten dispatch. With several nodes, each node is assumed to serve its own
    experts and, for each redundant slot, one further expert that its sequences use most over the whole step. Sequences that use
    similar experts therefore gather in a node, and the home level can move these experts there.

    The search alternates between packing sequences for given replicas and choosing replicas for given sequences. It starts from
    the better of the packings of `AsGiven` and `BalancedTokens`. The result is never worse than this start.

    Homes are contiguous unless they are passed to `solve`. The tables take 4 * Q * L * G and 4 * Q * min(L, 16) * E bytes. The
    objective is computed for an update stage of the trace's model. If the trace does not name a preset, qwen3-30b-a3b is used
    instead, because only ratios matter.

    Attributes:
        skew_weight: Price of the pairs by which the busiest rank exceeds the mean, relative to their price without replicas. Use
            1 if packing is the only means of balancing. The default is for one redundant slot per rank.
        redundant: Number of redundant slots per rank whose replicas are assumed to shorten dispatch. 0 means no replicas.
        cluster: Name of a `Cluster` preset, from which the costs of attention, expert compute and links are taken.
        ranks_per_node: Number of ranks per node. Defaults to the number in the preset.
        sweeps: Number of proposed changes per sequence.
    """

    skew_weight: float = 0.1
    redundant: int = 1
    cluster: str = "8xh100"
    ranks_per_node: int | None = None
    sweeps: int = 500

    def __post_init__(self) -> None:
        for name, least in (("redundant", 0), ("sweeps", 0)):
            whole(getattr(self, name), f"{name} of ExpertAware", least, 10**6)
        real(self.skew_weight, "skew_weight of ExpertAware", 0.0, 1.0, open_low=False)
        Cluster.preset(self.cluster, num_ranks=1, ranks_per_node=self.ranks_per_node)

    def solve(
        self, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, sample_group_Q: Array | None = None, seed: int = 0,
        home_LE: Array | None = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Packs the sequences as `PackSolver.solve` describes, for given homes if `home_LE` is passed.

        In a micro-step within the budget, no rank holds more tokens than the larger of tokens_per_rank and the start's fullest
        rank.

        Args:
            seed: Seed of the random proposals.
            home_LE: Home slots [L, E], if they have already been chosen. Defaults to contiguous homes.
        """
        starts = [
            packer.solve(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, sample_group_Q=sample_group_Q)
            for packer in (BalancedTokens(), AsGiven())
        ]
        value = self._value(trace, num_ranks, home_LE)
        best = min(starts, key=lambda found: value.seconds(*found))
        if self.sweeps == 0 or (num_ranks == 1 and best[0].max() == 0):
            return best
        group_Q = sample_groups(sample_group_Q, trace.Q)
        budget = num_ranks * tokens_per_rank
        tokens_MG = rank_tokens(trace.seq_len_Q, *best, num_ranks)
        room = max(tokens_per_rank, int(tokens_MG[tokens_MG.sum(axis=1) <= budget].max(initial=0)))
        # Sequences of similar length are neighbours in their group, because most swaps within the limits exchange such sequences.
        order_Q = np.lexsort((trace.seq_len_Q, group_Q))
        low_Q = np.searchsorted(group_Q, group_Q, side="left")
        high_Q = np.searchsorted(group_Q, group_Q, side="right")
        len_X, attention_X, place_Q = _padded(trace.seq_len_Q), _padded(value.attention_Q), np.argsort(order_Q)
        terms = kernels.Terms(value.window_s, self.skew_weight * value.pair_s, budget, room)
        rounds = _ROUNDS if value.foresees else 1
        for i in range(rounds):
            send_QG = value.send_QG(best[1])
            micro_step_Q, rank_Q = (array.astype(np.int64) for array in best)
            num_proposals = (self.sweeps * (i + 1) // rounds - self.sweeps * i // rounds) * trace.Q
            kernels.anneal(
                kernels.Sequences(len_X, attention_X, value.pairs_XLG, _padded(send_QG), order_Q, place_Q, low_Q, high_Q),
                terms, num_proposals,
                _HEAT * value.seconds(*best, send_QG) / trace.Q, np.uint64((seed + i) % 2**64), micro_step_Q, rank_Q,
                rank_tokens(trace.seq_len_Q, *best, num_ranks),
            )  # fmt: skip
            found = micro_step_Q.astype(np.int32), rank_Q.astype(np.int32)
            # The search never ends worse than it began, but its sums are rounded differently.
            if value.seconds(*found) < value.seconds(*best):
                best = found
        return best

    def objective(
        self, trace: RoutingTrace, micro_step_Q: Array, rank_Q: Array, *, num_ranks: int, home_LE: Array | None = None
    ) -> float:
        """Returns the objective that this solver minimises: the predicted, uncalibrated seconds of an update stage.

        With ``skew_weight=1, redundant=0``, the result equals the price of `CostModel` without replicas, provided that every
        expert of the busiest rank has load.
        """
        return self._value(trace, num_ranks, home_LE).seconds(micro_step_Q, rank_Q)

    def _value(self, trace: RoutingTrace, num_ranks: int, home_LE: Array | None) -> PackValue:
        cluster = Cluster.preset(self.cluster, num_ranks=num_ranks, ranks_per_node=self.ranks_per_node)
        return PackValue(trace, cluster, home_LE, self.skew_weight, self.redundant)


def _padded(array_Q: Array) -> Array:
    """Returns `array_Q` with a last entry of zeros, which stands for no sequence."""
    return np.concatenate([array_Q, np.zeros((1, *array_Q.shape[1:]), array_Q.dtype)])
