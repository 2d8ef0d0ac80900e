"""Level pack: micro-steps and ranks by the predicted time of the stage: attention, rank load and dispatch."""

from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.fields import flag, real, whole
from foremoe.levels import PackSolver
from foremoe.machine.cluster import Cluster
from foremoe.routing.trace import RoutingTrace
from foremoe.solvers.pack import kernels as kernels
from foremoe.solvers.pack.balanced_tokens import BalancedTokens, rank_tokens
from foremoe.solvers.pack.value import PackValue
from foremoe.workload.packing import AsGiven, sample_groups

# Letters: M micro-steps, L layers, G ranks, E experts, Q sequences.


@dataclass(frozen=True, slots=True)
class ExpertAware(PackSolver):
    """Packs for the shortest predicted stage, with annealed moves and swaps of sequences between micro-steps and ranks.

    The objective is the cost model's: per micro-step the attention of the slowest rank, per row the load of the busiest rank, and
    the pairs that leave their rank or node, which fall when a sequence starts where its experts live. Replicas
    make loads nearly even under any packing, so only `skew_weight` of the busiest rank's excess over the mean counts. They also
    shorten the way of tokens: each of several nodes is assumed to serve its own experts and, one per redundant slot, those that
    its sequences want most over the whole step. So sequences of like expert use gather in a node, and the home level can
    move experts to them. The search alternates: sequences for given replicas, then replicas for given sequences. It starts from
    `AsGiven` or `BalancedTokens`, whichever is better under the objective, and is never worse than either.

    Homes are contiguous unless `solve` is given others. Holds tables of 4 * Q * L * G and 4 * Q * min(L, 16) * E bytes. The model
    is the trace's own (where it names no preset, qwen3-30b-a3b stands in: only ratios matter), the stage an update.

    Attributes:
        skew_weight: price of a pair by which the busiest rank exceeds the mean, as a part of its price without replicas.
            1: packing alone, no replicas. The default suits one redundant slot per rank.
        redundant: slots per rank whose replicas bring tokens nearer; 0: none do.
        rounds: times that replicas are foreseen; `sweeps` are divided among the rounds.
        cluster: a preset of `Cluster`: what attention, expert compute and links cost.
        ranks_per_node: None: the preset's own.
        locality: Whether to price the pairs that leave their rank and node; packers that see loads only do not.
        sweeps: proposed changes per sequence.
        temperature: at the start, as a part of the mean cost of one sequence; it falls geometrically to a hundredth.
    """

    skew_weight: float = 0.1
    redundant: int = 1
    rounds: int = 3
    cluster: str = "8xh100"
    ranks_per_node: int | None = None
    locality: bool = True
    sweeps: int = 500
    temperature: float = 0.03

    def __post_init__(self) -> None:
        for name, least in (("redundant", 0), ("rounds", 1), ("sweeps", 0)):
            whole(getattr(self, name), f"{name} of ExpertAware", least, 10**6)
        real(self.skew_weight, "skew_weight of ExpertAware", 0.0, 1.0, open_low=False)
        real(self.temperature, "temperature of ExpertAware")
        flag(self.locality, "locality of ExpertAware")
        Cluster.preset(self.cluster, num_ranks=1, ranks_per_node=self.ranks_per_node)

    def solve(
        self, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, sample_group_Q: Array | None = None, seed: int = 0,
        home_LE: Array | None = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """As `PackSolver.solve`, with homes; `seed` is of the proposals.

        No rank of a micro-step within the budget holds more tokens than tokens_per_rank or the fullest rank of the start.

        Args:
            home_LE: home slots [L, E] if they are known already; default: contiguous.
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
        # Sequences of like length are neighbours in their group: most swaps that keep to the limits are of such.
        order_Q = np.lexsort((trace.seq_len_Q, group_Q))
        low_Q = np.searchsorted(group_Q, group_Q, side="left")
        high_Q = np.searchsorted(group_Q, group_Q, side="right")
        len_X, attention_X, place_Q = _padded(trace.seq_len_Q), _padded(value.attention_Q), np.argsort(order_Q)
        terms = kernels.Terms(value.window_s, self.skew_weight * value.pair_s, budget, room)
        rounds = self.rounds if value.foresees else 1
        for i in range(rounds):
            send_QG = value.send_QG(best[1])
            micro_step_Q, rank_Q = (array.astype(np.int64) for array in best)
            num_proposals = (self.sweeps * (i + 1) // rounds - self.sweeps * i // rounds) * trace.Q
            kernels.anneal(
                kernels.Sequences(len_X, attention_X, value.pairs_XLG, _padded(send_QG), order_Q, place_Q, low_Q, high_Q),
                terms, num_proposals,
                self.temperature * value.seconds(*best, send_QG) / trace.Q, np.uint64((seed + i) % 2**64), micro_step_Q, rank_Q,
                rank_tokens(trace.seq_len_Q, *best, num_ranks),
            )  # fmt: skip
            found = micro_step_Q.astype(np.int32), rank_Q.astype(np.int32)
            # The search never ends worse than it began, but adds up in another order.
            if value.seconds(*found) < value.seconds(*best):
                best = found
        return best

    def objective(
        self, trace: RoutingTrace, micro_step_Q: Array, rank_Q: Array, *, num_ranks: int, home_LE: Array | None = None
    ) -> float:
        """Returns the predicted seconds of an update stage, uncalibrated, which the packer minimises.

        With ``skew_weight=1, redundant=0`` they are those of `CostModel` without replicas, where every expert of the busiest rank
        has load.
        """
        return self._value(trace, num_ranks, home_LE).seconds(micro_step_Q, rank_Q)

    def _value(self, trace: RoutingTrace, num_ranks: int, home_LE: Array | None) -> PackValue:
        cluster = Cluster.preset(self.cluster, num_ranks=num_ranks, ranks_per_node=self.ranks_per_node)
        return PackValue(trace, cluster, home_LE, self.skew_weight, self.locality, self.redundant)


def _padded(array_Q: Array) -> Array:
    """`array_Q` with a last entry of zeros: no sequence."""
    return np.concatenate([array_Q, np.zeros((1, *array_Q.shape[1:]), array_Q.dtype)])
