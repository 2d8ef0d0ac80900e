"""`ExpertAware`: packs sequences for the shortest predicted stage, from attention, rank load and dispatch."""

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
    """Packs sequences for the shortest predicted stage, with annealed moves and swaps between micro-steps and ranks.

    The objective follows the cost model. It adds the attention of the slowest rank per micro-step, the load of the busiest rank
    per row, and the dispatch of pairs that leave their rank or node. Dispatch falls if a sequence is on the node of its experts.
    Replicas make loads nearly even under any packing, so the busiest rank's excess over the mean counts only with `skew_weight`.
    Replicas also shorten dispatch. With several nodes, each node is assumed to serve its own experts and, one per redundant
    slot, those that its sequences use most over the whole step. Sequences with similar expert use therefore gather in a node,
    and the home level can move experts to them.

    The search alternates between optimising sequences for given replicas and choosing replicas for given sequences. It starts
    from `AsGiven` or `BalancedTokens`, whichever is better under the objective, and is never worse than either.

    Homes are contiguous unless they are passed to `solve`. The tables take 4 * Q * L * G and 4 * Q * min(L, 16) * E bytes. The
    objective is computed for an update of the trace's own model. If the trace does not name a preset, qwen3-30b-a3b is used
    instead, because only ratios matter.

    Attributes:
        skew_weight: Price of the pairs by which the busiest rank exceeds the mean, relative to their price without replicas.
            1 suits packing alone, without replicas. The default suits one redundant slot per rank.
        redundant: Redundant slots per rank whose replicas are assumed to shorten dispatch. 0 assumes no replicas.
        rounds: Number of rounds in which replicas are chosen again. The `sweeps` are divided among the rounds.
        cluster: Name of a `Cluster` preset, from which the costs of attention, expert compute and links are taken.
        ranks_per_node: Ranks per node. Defaults to those of the preset.
        locality: Whether to price the pairs that leave their rank and node. With False, only loads count.
        sweeps: Number of proposed changes per sequence.
        temperature: Initial temperature relative to the mean cost of one sequence. It falls geometrically to a hundredth.
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
        """Packs the sequences as described in `PackSolver.solve`, optionally for given homes.

        In a micro-step within the budget, no rank holds more tokens than tokens_per_rank or the fullest rank of the start.

        Args:
            seed: Seed of the proposals.
            home_LE: Home slots [L, E], if they are already known. Defaults to contiguous homes.
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
            # The search never ends worse than it began, but its sums are rounded differently.
            if value.seconds(*found) < value.seconds(*best):
                best = found
        return best

    def objective(
        self, trace: RoutingTrace, micro_step_Q: Array, rank_Q: Array, *, num_ranks: int, home_LE: Array | None = None
    ) -> float:
        """Returns the predicted seconds of an update stage, uncalibrated, which the packer minimises.

        With ``skew_weight=1, redundant=0`` the result equals that of `CostModel` without replicas, provided that every expert of
        the busiest rank has load.
        """
        return self._value(trace, num_ranks, home_LE).seconds(micro_step_Q, rank_Q)

    def _value(self, trace: RoutingTrace, num_ranks: int, home_LE: Array | None) -> PackValue:
        cluster = Cluster.preset(self.cluster, num_ranks=num_ranks, ranks_per_node=self.ranks_per_node)
        return PackValue(trace, cluster, home_LE, self.skew_weight, self.locality, self.redundant)


def _padded(array_Q: Array) -> Array:
    """Returns `array_Q` with a last entry of zeros, which stands for no sequence."""
    return np.concatenate([array_Q, np.zeros((1, *array_Q.shape[1:]), array_Q.dtype)])
