"""The *pack* level, which assigns whole sequences to micro-steps and ranks. The default packs like common trainers."""

import abc
import heapq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.errors import InputError
from foremoe.routing.trace import RoutingTrace

# Letters: Q sequences.


class PackSolver(abc.ABC):
    """Base class of solvers of the *pack* level, which choose the micro-step and the source rank of each sequence.

    `solve` must depend only on its arguments.
    """

    level: ClassVar[str] = "pack"

    @abc.abstractmethod
    def solve(
        self, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, sample_group_Q: Array | None = None, seed: int = 0
    ) -> tuple[Array, Array]:
        """Assigns every sequence to one micro-step and one rank.

        Args:
            trace: Trace with the sequences.
            num_ranks: Number of source ranks, at least 1.
            tokens_per_rank: Token budget per rank, at least 1. A micro-step has at most num_ranks * tokens_per_rank tokens,
                unless it consists of a single longer sequence.
            sample_group_Q: Group of each sequence, for example its mini-batch, as non-decreasing integers. All sequences of a
                micro-step belong to one group.
            seed: Seed of random choices.

        Returns:
            ``(micro_step_Q, rank_Q)``, both int32. Micro-steps are numbered from 0 without gaps.

        Raises:
            InputError: A number is below 1, or `sample_group_Q` has the wrong length or order.
        """


def sample_groups(sample_group_Q: Array | None, num_sequences: int) -> Array:
    """Returns the group of each sequence as non-decreasing int64 [Q], or zeros if `sample_group_Q` is None."""
    if sample_group_Q is None:
        return np.zeros(num_sequences, np.int64)
    group_Q = frozen_array(sample_group_Q, np.int64, "sample_group_Q", (num_sequences,))
    if (np.diff(group_Q) < 0).any():
        q = int(np.argmax(np.diff(group_Q) < 0)) + 1
        fall = f"sample_group_Q falls from {group_Q[q - 1]} to {group_Q[q]} at sequence {q}"
        raise InputError(f"{fall}; order the sequences by group first.")
    return group_Q


@dataclass(frozen=True, slots=True)
class AsGiven(PackSolver):
    """A pack solver that keeps the order of the file, like a trainer that packs only according to the number of tokens.

    The solver uses next-fit. A micro-step ends when the next sequence would bring it above num_ranks * tokens_per_rank tokens. In
    a micro-step, each sequence goes to the rank with the fewest tokens so far. If several ranks have the fewest tokens, it goes
    to the first of them. One rank may therefore hold more than tokens_per_rank tokens. A sequence longer than the whole budget is
    a micro-step of its own.

    Attributes:
        shuffle: Whether to shuffle the sequences of each group before packing, with `seed`.
    """

    shuffle: bool = False

    def solve(
        self, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, sample_group_Q: Array | None = None, seed: int = 0
    ) -> tuple[Array, Array]:
        """Assigns sequences as described in `PackSolver.solve`. `seed` has an effect only with `shuffle`."""
        for name, value in (("num_ranks", num_ranks), ("tokens_per_rank", tokens_per_rank)):
            if value < 1:
                raise InputError(f"{name} must be at least 1; got {value}.")
        group_Q = sample_groups(sample_group_Q, trace.Q)
        order = np.arange(trace.Q)
        if self.shuffle:
            order = np.random.default_rng(seed).permutation(trace.Q)
            order = order[np.argsort(group_Q[order], kind="stable")]
        micro_step_Q, rank_Q = np.empty(trace.Q, np.int32), np.empty(trace.Q, np.int32)
        budget = num_ranks * tokens_per_rank
        micro_step, used, group, heap = -1, 0, 0, [(0, 0)]
        for q, length, of_group in zip(order.tolist(), trace.seq_len_Q[order].tolist(), group_Q[order].tolist(), strict=True):
            if micro_step < 0 or used + length > budget or of_group != group:
                micro_step, used, group = micro_step + 1, 0, of_group
                heap = [(0, g) for g in range(num_ranks)]  # (tokens, rank), ascending, which is a valid heap
            tokens, rank = heap[0]
            heapq.heapreplace(heap, (tokens + length, rank))
            micro_step_Q[q], rank_Q[q] = micro_step, rank
            used += length
        return micro_step_Q, rank_Q
