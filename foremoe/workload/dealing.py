"""Assigns every token of a trace to a micro-step and a source rank, and counts all pairs in one pass."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.budget import require_budget
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.packing import PackSolver, sample_groups

# Letters: M micro-steps, L MoE layers, G ranks, E experts, K top-k, Q sequences, T tokens.


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Record of how whole sequences were assigned to micro-steps and ranks.

    Attributes:
        tokens_per_rank: Maximum number of tokens of a micro-step, divided by the number of ranks.
        packer: The `repr` of the pack solver.
        seed: Seed of the pack solver.
        over_budget: Indices of the sequences that are longer than the budget of a micro-step. Each of these sequences is a
            micro-step of its own.
        dropped_micro_steps: Number of micro-steps that ``max_micro_steps`` left out. The sequences of these micro-steps are left
            out too.
    """

    tokens_per_rank: int
    packer: str
    seed: int
    over_budget: tuple[int, ...] = ()
    dropped_micro_steps: int = 0

    def __post_init__(self) -> None:
        whole(self.tokens_per_rank, "tokens_per_rank")
        for name, value in (("seed", self.seed), ("dropped_micro_steps", self.dropped_micro_steps)):
            whole(value, name, 0, 2**63 - 1)
        if not isinstance(self.packer, str):
            raise InputError(f"packer must be the text of a pack solver; got {type(self.packer).__name__}.")
        for q in self.over_budget:
            whole(q, "a sequence over the budget", 0)


def deal(
    trace: RoutingTrace, packer: PackSolver, num_ranks: int, tokens_per_rank: int, seed: int, sample_group_Q: Any,
    max_micro_steps: int | None,
) -> tuple[Array, Array, Dealt]:  # fmt: skip
    """Returns the micro-step and the rank of every sequence, int32 [Q] each, as described in `Workload.from_trace`.

    Both numbers are -1 for a sequence in a micro-step that is left out.
    """
    tokens_per_rank, seed = whole(tokens_per_rank, "tokens_per_rank"), whole(seed, "seed", 0)
    group_Q = sample_groups(sample_group_Q, trace.Q)
    if not isinstance(packer, PackSolver):
        raise InputError(f"packer must be a pack solver such as AsGiven(); got {packer!r}.")
    found = packer.solve(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, sample_group_Q=group_Q, seed=seed)
    micro_step_Q = frozen_array(found[0], np.int32, f"the micro_step_Q of {packer!r}", (trace.Q,))
    rank_Q = frozen_array(found[1], np.int32, f"the rank_Q of {packer!r}", (trace.Q,))
    if rank_Q.min() < 0 or rank_Q.max() >= num_ranks:
        raise InputError(f"{packer!r} names ranks from {rank_Q.min()} to {rank_Q.max()}; they must lie in [0, {num_ranks}).")
    numbers = np.unique(micro_step_Q)
    M = len(numbers)
    if numbers[0] != 0 or numbers[-1] != M - 1:
        have = f"{M} micro-steps numbered from {numbers[0]} to {numbers[-1]}"
        raise InputError(f"{packer!r} has {have}; number them without gaps.")
    # Groups are non-decreasing in the file, so a micro-step has one group if its smallest and largest group are equal.
    low_M, high_M = np.full(M, group_Q[-1]), np.full(M, group_Q[0])
    np.minimum.at(low_M, micro_step_Q, group_Q)
    np.maximum.at(high_M, micro_step_Q, group_Q)
    if (low_M != high_M).any():
        m = int(np.argmax(low_M != high_M))
        raise InputError(f"{packer!r} put groups {low_M[m]} and {high_M[m]} into micro-step {m}; do not mix groups.")
    budget = num_ranks * tokens_per_rank
    sequences_M = np.bincount(micro_step_Q, minlength=M)
    tokens_M = np.bincount(micro_step_Q, weights=trace.seq_len_Q, minlength=M)
    over_M = (tokens_M > budget) & (sequences_M > 1)
    if over_M.any():
        m = int(over_M.argmax())
        put = f"{int(tokens_M[m])} tokens in {sequences_M[m]} sequences into micro-step {m}"
        raise InputError(f"{packer!r} put {put}, over the budget of {budget}; only a single sequence may exceed it.")
    limit = M if max_micro_steps is None else min(M, whole(max_micro_steps, "max_micro_steps"))
    kept_Q = micro_step_Q < limit
    over_budget = tuple(np.flatnonzero(kept_Q & (trace.seq_len_Q > budget)).tolist())
    dealt = Dealt(
        tokens_per_rank=tokens_per_rank, packer=repr(packer), seed=seed, over_budget=over_budget, dropped_micro_steps=M - limit
    )
    left_out = np.int32(-1)
    return np.where(kept_Q, micro_step_Q, left_out), np.where(kept_Q, rank_Q, left_out), dealt


def require_counts(shape: tuple[int, int, int, int], source_bytes: int) -> None:
    """Raises InputError if counts of this shape, in int32, would be too large for routing that takes `source_bytes` bytes."""
    what = "counts of {} micro-steps x {} layers x {} ranks x {} experts".format(*shape)
    cure = "give fewer ranks or more tokens per rank, or correct the routing's sizes"
    require_budget(4 * math.prod(shape), what, cure, source_bytes)


def sum_cells(micro_step_X: Array, rank_X: Array, num_ranks: int, weight_X: Array | None = None) -> Array:
    """Returns the sum of weights for each micro-step and rank, [M, G]. Skips entries that are left out. Weights default to 1."""
    kept_X = micro_step_X >= 0
    M = int(micro_step_X.max()) + 1
    cell = micro_step_X[kept_X].astype(np.int64) * num_ranks + rank_X[kept_X]
    weights = None if weight_X is None else weight_X[kept_X].astype(np.float64)
    return np.bincount(cell, weights, minlength=M * num_ranks).reshape(M, num_ranks)


def count_tokens(trace: RoutingTrace, micro_step_T: Array, rank_T: Array, num_ranks: int) -> tuple[Array, Array]:
    """Counts pairs (int32 [M, L, G, E]) and unknown tokens (int64 [M, L]) for a given assignment of tokens."""
    if trace.known_T is not None and not trace.known_T.any():
        cure = "let the rollout engine return routing (docs/recording.md)"
        raise InputError(f"none of the {trace.T} tokens has a known routing, so there is nothing to plan; {cure}.")
    M = int(micro_step_T.max()) + 1
    shape = M, trace.L, num_ranks, trace.num_experts
    require_counts(shape, trace.num_bytes)
    load_MLGE = np.zeros(shape, np.int32)
    known_T = frozen_array(np.empty(0, np.bool_) if trace.known_T is None else trace.known_T, np.bool_, "known_T")
    micro_step_T, rank_T = (frozen_array(place_T, np.int32, "places") for place_T in (micro_step_T, rank_T))
    count_pairs(trace.topk_TLK, known_T, micro_step_T, rank_T, load_MLGE)
    unknown_T = np.zeros(trace.T, bool) if trace.known_T is None else ~trace.known_T
    unknown_M = np.bincount(micro_step_T[unknown_T & (micro_step_T >= 0)], minlength=M)
    return load_MLGE, np.repeat(unknown_M[:, None], trace.L, axis=1)


@kernel
def count_pairs(topk_TLK, known_T, micro_step_T, rank_T, load_MLGE):
    """Adds every pair of checked ids to the counts, except pairs in micro-step -1 and pairs of unknown tokens.

    If `known_T` is empty, all tokens are known.
    """
    num_tokens, num_layers, num_topk = topk_TLK.shape
    for t in range(num_tokens):
        m, g = micro_step_T[t], rank_T[t]
        if m < 0 or (known_T.size and not known_T[t]):
            continue
        for layer in range(num_layers):
            for k in range(num_topk):
                load_MLGE[m, layer, g, np.int64(topk_TLK[t, layer, k])] += 1
