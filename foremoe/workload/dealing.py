"""From a trace to counts: which micro-step and source rank every token goes to, and one pass that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.workload.packing import PackSolver, sample_groups
from foremoe.workload.workload import Dealt, Workload

if TYPE_CHECKING:
    from foremoe.routing.trace import RoutingTrace

# Letters: M micro-steps, L MoE layers, G ranks, E experts, K top-k, Q sequences, T tokens.


def deal(
    trace: RoutingTrace,
    *,
    num_ranks: int,
    tokens_per_rank: int | None,
    packer: PackSolver,
    seed: int,
    stage: str,
    sample_group_Q: npt.ArrayLike | None,
    max_micro_steps: int | None,
    assign: tuple[npt.ArrayLike, npt.ArrayLike] | None,
) -> Workload:
    """The workload of a trace; see `Workload.from_trace`."""
    G = whole(num_ranks, "num_ranks")
    micro_step_Q = rank_Q = dealt = None
    if assign is not None:
        if tokens_per_rank is not None or sample_group_Q is not None or max_micro_steps is not None:
            raise InputError(
                "assign already says where every token goes; leave out tokens_per_rank, sample_group_Q and max_micro_steps."
            )
        micro_step_T, rank_T = _assigned(assign, trace.T, G)
        weight_T = np.repeat(trace.seq_len_Q, trace.seq_len_Q)
        attention = _cells(micro_step_T, rank_T, G, weight_T)
    else:
        if tokens_per_rank is None:
            raise InputError("from_trace needs tokens_per_rank, the budget of a micro-step per rank, or assign.")
        micro_step_Q, rank_Q, dealt = _dealt(
            trace,
            G,
            whole(tokens_per_rank, "tokens_per_rank"),
            packer,
            whole(seed, "seed", 0),
            sample_groups(sample_group_Q, trace.Q),  # type: ignore[arg-type]
            None if max_micro_steps is None else whole(max_micro_steps, "max_micro_steps"),
        )
        micro_step_T, rank_T = np.repeat(micro_step_Q, trace.seq_len_Q), np.repeat(rank_Q, trace.seq_len_Q)
        attention = _cells(micro_step_Q, rank_Q, G, trace.seq_len_Q**2)
    M = int(micro_step_T.max()) + 1
    load_MLGE = np.zeros((M, trace.L, G, trace.num_experts), np.int32)
    known_T = np.empty(0, np.bool_) if trace.known_T is None else trace.known_T
    count_pairs(
        trace.topk_TLK,
        frozen_array(known_T, np.bool_, "known_T"),
        frozen_array(micro_step_T, np.int32, "micro_step_T"),
        frozen_array(rank_T, np.int32, "rank_T"),
        load_MLGE,
    )
    unknown_T = np.zeros(trace.T, bool) if trace.known_T is None else ~trace.known_T
    unknown_M = np.bincount(micro_step_T[unknown_T & (micro_step_T >= 0)], minlength=M)
    return Workload(
        load_MLGE=load_MLGE,
        tokens_MG=_cells(micro_step_T, rank_T, G, None),
        attention_MG=attention,
        unknown_ML=np.repeat(unknown_M[:, None], trace.L, axis=1),
        num_topk=trace.K,
        stage=stage,
        model=trace.model,
        moe_layer_L=trace.moe_layer_L,
        trace_id=trace.id,
        micro_step_Q=micro_step_Q,
        rank_Q=rank_Q,
        dealt=dealt,
    )


def _dealt(
    trace: RoutingTrace,
    num_ranks: int,
    tokens_per_rank: int,
    packer: PackSolver,
    seed: int,
    group_Q: Array,
    max_micro_steps: int | None,
) -> tuple[Array, Array, Dealt]:
    if not isinstance(packer, PackSolver):
        raise InputError(f"packer must be a pack solver such as AsGiven(); got {packer!r}.")
    found = packer.solve(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, sample_group_Q=group_Q, seed=seed)
    micro_step_Q = frozen_array(found[0], np.int32, f"the micro_step_Q of {packer!r}", (trace.Q,))
    rank_Q = frozen_array(found[1], np.int32, f"the rank_Q of {packer!r}", (trace.Q,))
    M = _require_places(micro_step_Q, rank_Q, num_ranks, f"{packer!r}")
    # Groups never fall along the file, so a micro-step is of one group when its smallest and largest are equal.
    low_M, high_M = np.full(M, group_Q[-1]), np.full(M, group_Q[0])
    np.minimum.at(low_M, micro_step_Q, group_Q)
    np.maximum.at(high_M, micro_step_Q, group_Q)
    if (low_M != high_M).any():
        m = int(np.argmax(low_M != high_M))
        raise InputError(
            f"{packer!r} put groups {low_M[m]} and {high_M[m]} into micro-step {m}; a micro-step must not mix groups."
        )
    budget = num_ranks * tokens_per_rank
    sequences_M = np.bincount(micro_step_Q, minlength=M)
    tokens_M = np.bincount(micro_step_Q, weights=trace.seq_len_Q, minlength=M)
    over_M = (tokens_M > budget) & (sequences_M > 1)
    if over_M.any():
        m = int(over_M.argmax())
        raise InputError(
            f"{packer!r} put {int(tokens_M[m])} tokens in {sequences_M[m]} sequences into micro-step {m}, over the budget of"
            f" {budget}; only a single sequence may exceed it."
        )
    limit = M if max_micro_steps is None else min(M, max_micro_steps)
    kept_Q = micro_step_Q < limit
    dealt = Dealt(
        tokens_per_rank=tokens_per_rank,
        packer=repr(packer),
        seed=seed,
        over_budget=tuple(np.flatnonzero(kept_Q & (trace.seq_len_Q > budget)).tolist()),
        dropped_micro_steps=M - limit,
    )
    left_out = np.int32(-1)
    return np.where(kept_Q, micro_step_Q, left_out), np.where(kept_Q, rank_Q, left_out), dealt


def _assigned(assign: tuple[npt.ArrayLike, npt.ArrayLike], num_tokens: int, num_ranks: int) -> tuple[Array, Array]:
    if not isinstance(assign, tuple | list) or len(assign) != 2:
        raise InputError("assign must be the pair (micro_step_T, rank_T).")
    micro_step_T = frozen_array(assign[0], np.int32, "assign's micro_step_T", (num_tokens,))
    rank_T = frozen_array(assign[1], np.int32, "assign's rank_T", (num_tokens,))
    _require_places(micro_step_T, rank_T, num_ranks, "assign")
    return micro_step_T, rank_T


def _require_places(micro_step_X: Array, rank_X: Array, num_ranks: int, who: str) -> int:
    """The number of micro-steps; InputError unless they are numbered from 0 without gaps and every rank exists."""
    if rank_X.min() < 0 or rank_X.max() >= num_ranks:
        raise InputError(f"{who} names ranks from {rank_X.min()} to {rank_X.max()}; they must lie in [0, {num_ranks}).")
    numbers = np.unique(micro_step_X)
    if numbers[0] != 0 or numbers[-1] != len(numbers) - 1:
        raise InputError(
            f"{who} names {len(numbers)} micro-steps numbered from {numbers[0]} to {numbers[-1]}; number them from 0 without"
            " gaps."
        )
    return len(numbers)


def _cells(micro_step_X: Array, rank_X: Array, num_ranks: int, weight_X: Array | None) -> Array:
    """Sums of weights (None: ones) per (micro-step, rank), left-out entries not counted; [M, G]."""
    kept_X = micro_step_X >= 0
    M = int(micro_step_X.max()) + 1
    cell = micro_step_X[kept_X].astype(np.int64) * num_ranks + rank_X[kept_X]
    weights = None if weight_X is None else weight_X[kept_X].astype(np.float64)
    out: Array = np.bincount(cell, weights, minlength=M * num_ranks).reshape(M, num_ranks)
    return out


@kernel
def count_pairs(topk_TLK, known_T, micro_step_T, rank_T, load_MLGE):  # type: ignore[no-untyped-def]
    """Adds every (token, expert) pair to its cell of `load_MLGE`; tokens of micro-step -1 and unknown tokens add none.

    An empty `known_T` means that all tokens are known. Ids must have been checked.
    """
    num_tokens, num_layers, num_topk = topk_TLK.shape
    for t in range(num_tokens):
        m, g = micro_step_T[t], rank_T[t]
        if m < 0 or (known_T.size and not known_T[t]):
            continue
        for layer in range(num_layers):
            for k in range(num_topk):
                load_MLGE[m, layer, g, np.int64(topk_TLK[t, layer, k])] += 1
