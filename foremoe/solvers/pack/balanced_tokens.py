"""`BalancedTokens`: balances micro-steps and ranks by tokens and attention, without regard to experts."""

import contextlib
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.levels import PackSolver
from foremoe.machine.model import Model
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.dealing import sum_cells
from foremoe.workload.packing import AsGiven, sample_groups

# Letters: M micro-steps, G ranks, Q sequences, I places of an order of sequences.

# Used if a trace does not name a known model. Only the ratios of its dimensions matter.
_USUAL_MODEL = "qwen3-30b-a3b"


@dataclass(frozen=True, slots=True)
class BalancedTokens(PackSolver):
    """Packs as trainers with balanced batches do: as few micro-steps as possible, with equal attention work on all ranks.

    Micro-steps are formed in three ways:

    * longest first, each into the emptiest micro-step,
    * longest first, each into the fullest micro-step that has room for it,
    * as `AsGiven` forms them.

    In a micro-step, sequences are assigned in order of decreasing attention work, each to the rank that has the least work so far
    and still has room. A rank has room for tokens_per_rank tokens, or for as many as `AsGiven` puts on its fullest rank if that
    number is larger. The packing with the fewest micro-steps is chosen. Among equal packings, the one with the least attention
    work on the slowest rank, summed over micro-steps, is chosen. The result never has more micro-steps than `AsGiven`. With the
    same number, it never has more attention work.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969), for the order of decreasing work (LPT).
    """

    def solve(
        self, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, sample_group_Q: Array | None = None, seed: int = 0
    ) -> tuple[Array, Array]:
        """Packs the sequences as `PackSolver.solve` describes. `seed` has no effect."""
        given = AsGiven().solve(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, sample_group_Q=sample_group_Q)
        group_Q = sample_groups(sample_group_Q, trace.Q)
        attention_Q = attention_flops(trace)
        micro_step_Q, rank_Q = np.empty(trace.Q, np.int32), np.zeros(trace.Q, np.int32)
        budget, first = num_ranks * tokens_per_rank, 0
        for group in np.unique(group_Q):
            in_group_Q, num = group_Q == group, 0
            packed = np.flatnonzero(in_group_Q & (trace.seq_len_Q <= budget))
            alone = np.flatnonzero(in_group_Q & (trace.seq_len_Q > budget))
            if packed.size:
                given_I = np.unique(given[0][packed], return_inverse=True)[1]
                micro_step_Q[packed], rank_Q[packed], num = _pack_group(
                    trace.seq_len_Q[packed], attention_Q[packed], given_I, given[1][packed], num_ranks, tokens_per_rank
                )
                micro_step_Q[packed] += first
            micro_step_Q[alone] = first + num + np.arange(alone.size)
            first += num + alone.size
        return micro_step_Q, rank_Q


def model_of(trace: RoutingTrace) -> Model:
    """Returns the model that the trace names. If it names none, returns the only preset of its shape or a common model."""
    with contextlib.suppress(InputError):
        return Model.preset(trace.model or "")
    found = Model.matching(trace.L, trace.num_experts, trace.K)
    return found[0] if len(found) == 1 else Model.preset(_USUAL_MODEL)


def attention_flops(trace: RoutingTrace) -> Array:
    """Returns the forward FLOPs of one layer's attention for every sequence, whole numbers as float64 [Q]."""
    lengths_Q = trace.seq_len_Q.astype(np.float64)
    return np.rint(model_of(trace).attention_flops(lengths_Q, lengths_Q**2))


def rank_tokens(seq_len_Q: Array, micro_step_Q: Array, rank_Q: Array, num_ranks: int) -> Array:
    """Returns the number of tokens on every rank, int64 [M, G]."""
    return sum_cells(micro_step_Q, rank_Q, num_ranks, seq_len_Q).astype(np.int64)


def slowest_attention(attention_Q: Array, micro_step_Q: Array, rank_Q: Array, num_ranks: int) -> float:
    """Returns the attention work of the slowest rank of each micro-step, summed over micro-steps."""
    return float(sum_cells(micro_step_Q, rank_Q, num_ranks, attention_Q).max(axis=1).sum())


def _pack_group(
    len_Q: Array, attention_Q: Array, given_step_Q: Array, given_rank_Q: Array, num_ranks: int, tokens_per_rank: int
) -> tuple[Array, Array, int]:
    """Packs the sequences of one group within the budget. Returns their micro-steps and ranks and the number of micro-steps."""
    budget, num_given = num_ranks * tokens_per_rank, int(given_step_Q.max()) + 1
    room = max(tokens_per_rank, int(rank_tokens(len_Q, given_step_Q, given_rank_Q, num_ranks).max()))
    longest_I = np.argsort(-len_Q, kind="stable")
    ways = [given_step_Q, _fill(longest_I, len_Q, budget, num_given, False)]
    for num in range(int(-(-len_Q.sum() // budget)), num_given + 1):
        emptiest_Q = _fill(longest_I, len_Q, budget, num, True)
        if emptiest_Q[0] >= 0:
            ways.append(emptiest_Q)
            break
    steepest_I = np.argsort(-attention_Q, kind="stable")
    best = (num_given, slowest_attention(attention_Q, given_step_Q, given_rank_Q, num_ranks))
    found = given_step_Q, given_rank_Q
    for step_Q in ways:
        num = int(step_Q.max()) + 1
        if step_Q[0] < 0 or num > best[0]:
            continue
        rank_Q = _assign_ranks(steepest_I, len_Q, attention_Q, step_Q, num, num_ranks, room)
        value = (num, slowest_attention(attention_Q, step_Q, rank_Q, num_ranks))
        if value < best and rank_tokens(len_Q, step_Q, rank_Q, num_ranks).max() <= room:
            best, found = value, (step_Q, rank_Q)
    return found[0], found[1], best[0]


@kernel
def _fill(order_I, len_Q, budget, num, emptiest):
    """Assigns sequences in order to the emptiest of `num` micro-steps, or to the fullest with room.

    Returns the micro-step of every sequence, or -1 if not all sequences fit. Filling the fullest first may leave micro-steps
    empty. These have the highest numbers.
    """
    tokens_M = np.zeros(num, np.int64)
    step_Q = np.full(len_Q.size, -1, np.int64)
    for q in order_I:
        chosen = -1
        for m in range(num):
            if tokens_M[m] + len_Q[q] > budget:
                continue
            if chosen < 0 or (tokens_M[m] < tokens_M[chosen] if emptiest else tokens_M[m] > tokens_M[chosen]):
                chosen = m
        if chosen < 0:
            step_Q[:] = -1
            return step_Q
        tokens_M[chosen] += len_Q[q]
        step_Q[q] = chosen
    return step_Q


@kernel
def _assign_ranks(order_I, len_Q, attention_Q, step_Q, num, num_ranks, room):
    """Assigns sequences in order to the rank with room that has the least attention work, or else to that with fewest tokens."""
    tokens_MG, attention_MG = np.zeros((num, num_ranks), np.int64), np.zeros((num, num_ranks))
    rank_Q = np.empty(len_Q.size, np.int64)
    for q in order_I:
        m = step_Q[q]
        chosen = -1
        for g in range(num_ranks):
            if tokens_MG[m, g] + len_Q[q] <= room and (chosen < 0 or attention_MG[m, g] < attention_MG[m, chosen]):
                chosen = g
        if chosen < 0:
            chosen = tokens_MG[m].argmin()
        tokens_MG[m, chosen] += len_Q[q]
        attention_MG[m, chosen] += attention_Q[q]
        rank_Q[q] = chosen
    return rank_Q
