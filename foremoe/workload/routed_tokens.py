"""`RoutedTokens`, which holds the experts, the micro-step and the source rank of every token that a load counts."""

import dataclasses
from dataclasses import dataclass
from typing import Self

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, Length, array
from foremoe.base.errors import InputError
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.workload import Workload

# Letters: T tokens, L MoE layers, K top-k, G ranks, X cells (micro-step, rank).


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedTokens(ArrayValue):
    """Tokens of one EP group with the experts of each token, which counts by source rank do not contain.

    Attributes:
        topk_TLK: Logical experts of each token, as integers.
        moe_layer_L: The model's layer numbers, int32.
        micro_step_T: Micro-step of each token, int32, or -1 for a token that the load does not count.
        rank_T: Source rank of each token, int32.
    """

    topk_TLK: Array
    moe_layer_L: Array = array(np.int32)
    micro_step_T: Array = array(np.int32)
    rank_T: Array = array(np.int32)

    T = Length("micro_step_T")
    """Number of tokens."""

    @classmethod
    def of(cls, trace: RoutingTrace, workload: Workload) -> Self:
        """Returns the tokens of a trace with their ranks and micro-steps. `workload` must contain whole sequences of this trace.

        Raises:
            InputError: The workload does not record the micro-steps and ranks of its sequences, or was made from another trace.
        """
        if workload.micro_step_Q is None or workload.rank_Q is None:
            raise InputError("the workload does not say where its sequences went; deal the trace with Workload.from_trace.")
        if workload.trace_id != trace.id or len(workload.rank_Q) != trace.Q:
            raise InputError(f"the workload was dealt from trace {workload.trace_id!r}, not from {trace.id!r}; give that one.")
        micro_step_T, rank_T = (np.repeat(of_Q, trace.seq_len_Q) for of_Q in (workload.micro_step_Q, workload.rank_Q))
        if trace.known_T is not None:
            micro_step_T = np.where(trace.known_T, micro_step_T, np.int32(-1))
        return cls(topk_TLK=trace.topk_TLK, moe_layer_L=trace.moe_layer_L, micro_step_T=micro_step_T, rank_T=rank_T)

    def of_ranks(self, first: int, num_ranks: int) -> Self:
        """Returns the tokens of an EP group of `num_ranks` consecutive ranks from `first` on. The ranks are renumbered from 0."""
        rank_T = self.rank_T - first
        mine_T = (rank_T >= 0) & (rank_T < num_ranks)
        micro_step_T = np.where(mine_T, self.micro_step_T, np.int32(-1))
        return dataclasses.replace(self, micro_step_T=micro_step_T, rank_T=np.where(mine_T, rank_T, np.int32(0)))

    def cells(self, num_micro_steps: int, num_ranks: int) -> tuple[Array, Array]:
        """Returns token indices ordered by micro-step and rank (int64 [T]), and where each such cell starts (int64 [X + 1])."""
        cell_T = self.micro_step_T.astype(np.int64) * num_ranks + self.rank_T
        cell_T[self.micro_step_T < 0] = num_micro_steps * num_ranks
        order_T = np.argsort(cell_T, kind="stable")
        return order_T, np.searchsorted(cell_T[order_T], np.arange(num_micro_steps * num_ranks + 1))
