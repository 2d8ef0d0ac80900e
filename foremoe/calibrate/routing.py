"""Random routing for measurements, with popular and rare experts. The load of ranks is even, or heaviest on the first rank."""

from typing import NamedTuple, Self

import numpy as np

from foremoe.base.arrays import Array

# Letters: T tokens of a rank, K top-k, E experts, G ranks.

_SPREAD = 0.7  # standard deviation of the log popularity of experts
_HEAVY = 1.5  # added to the log popularity of the first rank's experts


class Routing(NamedTuple):
    """Routing of one layer on all ranks, as int64 arrays."""

    topk_GTK: Array  # distinct experts of every token
    load_GE: Array  # number of pairs by source and expert
    sent_GG: Array  # number of pairs by source and home of the expert

    @classmethod
    def draw(cls, tokens: int, num_ranks: int, num_experts: int, num_topk: int, *, heavy: bool, seed: int) -> Self:
        """Draws the routing of `tokens` tokens for every rank. If `heavy` is True, the first rank gets the most pairs."""
        rng = np.random.default_rng([seed, tokens, int(heavy)])
        popularity_E = _SPREAD * rng.standard_normal(num_experts)
        if heavy:
            popularity_E[: num_experts // num_ranks] += _HEAVY
        # The top-k of log popularity plus Gumbel noise is a draw without repeats in proportion to popularity.
        noisy_GTE = popularity_E + rng.gumbel(size=(num_ranks, tokens, num_experts))
        topk_GTK = np.argpartition(-noisy_GTE, num_topk - 1, axis=2)[:, :, :num_topk].astype(np.int64)
        load_GE = np.stack([np.bincount(topk_TK.ravel(), minlength=num_experts) for topk_TK in topk_GTK])
        return cls(topk_GTK, load_GE, load_GE.reshape(num_ranks, num_ranks, -1).sum(axis=2))

    @property
    def largest(self) -> int:
        """Number of pairs on the busiest rank."""
        return int(self.sent_GG.sum(axis=0).max())

    def busy(self, rank: int) -> list[int]:
        """Returns the number of pairs of every expert at home on a rank."""
        served_E = self.load_GE.sum(axis=0)
        per_rank = len(served_E) // len(self.load_GE)
        return served_E[rank * per_rank : (rank + 1) * per_rank].tolist()

    def off_rank(self, node_of_rank: tuple[int, ...], across: bool) -> int:
        """Returns the number of pairs that a rank sends or receives in the busiest direction.

        Counts pairs between ranks of one node or, if `across`, between ranks of different nodes.
        """
        node_G = np.array(node_of_rank)
        same_GG = node_G[:, None] == node_G
        counted_GG = ~same_GG if across else same_GG & ~np.eye(len(node_G), dtype=bool)
        pairs_GG = np.where(counted_GG, self.sent_GG, 0)
        return int(max(pairs_GG.sum(axis=0).max(), pairs_GG.sum(axis=1).max()))
