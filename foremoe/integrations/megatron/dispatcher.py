"""Variants of Megatron-Core's all-to-all and flex dispatchers that send to physical slots instead of logical experts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)

from foremoe.base.errors import InputError

# Letters: T tokens of a source, K top-k, P physical slots of all ranks, S slots of a rank, G ranks.

_GATHER = "gather_from_sequence_parallel_region"


class OverSlots(MoETokenDispatcher):  # type: ignore[misc]
    """Base class of dispatchers that treat the S slots of a rank as its experts.

    Attributes:
        missing: Whether this rank lacks a replica of the row, or None if ranks need not ask each other. Set before
            `dispatch_preprocess`.
        go_home: Function that is called if a replica is missing on any rank. It returns the routing and the probabilities over
            slots with all pairs at home.
        watch: Whether to record `load_G` for every row. A plan made from a hint does not contain these loads.
        load_G: Number of pairs that each rank serves in the last dispatched row, int64 on the device. Recorded if `watch` is set.
        launch: Function that is called when the last exchange of a use is queued. This is combine in forward and dispatch in
            backward. Set before `dispatch_preprocess`.
    """

    launch: Callable[[], None]

    def __init__(self, moe: MoELayer, num_slots: int) -> None:
        own = moe.token_dispatcher
        groups = ProcessGroupCollection()
        groups.ep, groups.expt_tp, groups.tp_ep = own.ep_group, own.tp_group, own.tp_ep_group
        config = copy.copy(moe.config)  # dataclasses.replace would validate and derive all fields again
        config.num_moe_experts = own.ep_size * num_slots
        first = own.ep_group.rank() * num_slots
        indices = list(range(first, first + num_slots))
        super().__init__(num_local_experts=num_slots, local_expert_indices=indices, config=config, pg_collection=groups)
        if own.shared_experts is not None:
            self.set_shared_experts(own.shared_experts)
        self.missing: bool | None = None
        self.watch, self.load_G = False, torch.zeros(own.ep_size, dtype=torch.int64)
        self.go_home: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None

    def token_dispatch(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.requires_grad:
            launch = self.launch  # the function of this stage
            hidden_states.register_hook(lambda _: launch())
        return super().token_dispatch(hidden_states, *args, **kwargs)

    def token_combine(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        combined = super().token_combine(hidden_states, *args, **kwargs)
        self.launch()
        return combined


class SlotDispatcher(OverSlots, MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Dispatches to the S slots of every rank. After routing, a `MoELayer` need not know which logical experts the slots hold.

    Every rank reports whether its replicas have arrived, together with the token counts that Megatron exchanges anyway. If a
    replica is missing on any rank, all ranks dispatch this row's tokens to homes instead.
    """

    def __init__(self, moe: MoELayer, num_slots: int) -> None:
        super().__init__(moe, num_slots)
        self._missing_G: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
        self._hidden = hidden_states if self.missing is not None else None
        return super().dispatch_preprocess(hidden_states, routing_map, probs)

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        self._missing_G = None
        if self.missing is None and not self.watch:
            return super().preprocess(routing_map)
        with self._with_flags():
            return super().preprocess(routing_map)

    def token_dispatch(self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor) -> Any:
        if self._missing_G is not None and bool(self._missing_G.any()):
            assert self.go_home is not None and self._hidden is not None
            hidden, self.missing = self._hidden, None
            routing_TP, probs_TP = self.go_home()
            permutated_local_input_tokens, permuted_probs = self.dispatch_preprocess(hidden, routing_TP, probs_TP)
        self._hidden = self._missing_G = None
        return super().token_dispatch(permutated_local_input_tokens, permuted_probs)

    @contextlib.contextmanager
    def _with_flags(self) -> Iterator[None]:
        """Adds one number per rank to Megatron's gather of token counts, inside the block."""
        gather = getattr(token_dispatcher, _GATHER)
        num_counts = self.num_experts

        def with_flag(counts: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if counts.dim() != 1 or len(counts) != num_counts:
                result: torch.Tensor = gather(counts, *args, **kwargs)
                return result
            gathered = gather(torch.cat([counts, counts.new_full((1,), int(bool(self.missing)))]), *args, **kwargs)
            gathered = gathered.view(-1, num_counts + 1)
            self._missing_G = None if self.missing is None else gathered[:, num_counts]
            if self.watch:
                self.load_G = gathered[:, :num_counts].sum(0).view(self.ep_size, -1).sum(1)
            return gathered[:, :num_counts].reshape(-1)

        setattr(token_dispatcher, _GATHER, with_flag)
        try:
            yield
        finally:
            setattr(token_dispatcher, _GATHER, gather)


class FlexSlotDispatcher(OverSlots, MoEFlexTokenDispatcher):  # type: ignore[misc]
    """Dispatches to slots like `SlotDispatcher`, but over DeepEP or HybridEP.

    DeepEP and HybridEP exchange counts inside their kernels, where there is no room for a flag. A row with replicas therefore
    needs an all-reduce of one number before tokens are dispatched. A watched row needs an all-reduce of one number per rank.

    Attributes:
        slots_of: For a known row, a function that maps probabilities and routing to slots and weights [T, K]. Set before
            `dispatch_preprocess`.
    """

    def __init__(self, moe: MoELayer, num_slots: int) -> None:
        own, num_base = moe.token_dispatcher, moe.num_local_experts
        if moe.config.moe_flex_dispatcher_backend == "hybridep" and own.ep_size * num_slots % 4:
            redundant = next(r for r in range(num_slots - num_base, num_slots + 4) if own.ep_size * (num_base + r) % 4 == 0)
            raise InputError(
                f"HybridEP needs a multiple of 4 slots, and {own.ep_size} ranks x {num_slots} slots are "
                f"{own.ep_size * num_slots}; set redundant={redundant}."
            )
        super().__init__(moe, num_slots)
        self.slots_of: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
        if self.slots_of is not None:
            return self._known(hidden_states, *self.slots_of(probs, routing_map))
        if self.missing is not None:
            missing = torch.full((1,), int(self.missing), device=hidden_states.device)
            dist.all_reduce(missing, dist.ReduceOp.MAX, group=self.tp_ep_group)
            if bool(missing):
                assert self.go_home is not None
                routing_map, probs = self.go_home()
        if self.watch:
            self.load_G = routing_map.sum(0).view(self.ep_size, -1).sum(1)
            dist.all_reduce(self.load_G, group=self.tp_ep_group)
        manager = self._comm_manager
        if not hasattr(manager, "token_indices"):  # HybridEP uses the routing map
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        # DeepEP's manager takes the K largest probabilities. If a routed one is 0, or a token has fewer than K experts, it could
        # take any slot, including an empty one.
        hidden, probs_TK = super().dispatch_preprocess(hidden_states, routing_map, probs.masked_fill(~routing_map, -torch.inf))
        unrouted_TK = probs_TK == -torch.inf
        manager.token_indices = manager.token_indices.masked_fill(unrouted_TK, -1)
        manager.token_probs = probs_TK.masked_fill(unrouted_TK, 0.0)
        return hidden, manager.token_probs

    def _known(self, hidden_states: torch.Tensor, slot_TK: torch.Tensor, probs_TK: torch.Tensor) -> Any:
        """Does the work of `dispatch_preprocess` for known slots, without exchanging a flag or searching for slots."""
        self.slots_of, manager = None, self._comm_manager
        self.hidden_shape = hidden_states.shape
        hidden = hidden_states.view(-1, self.hidden_shape[-1])
        if hasattr(manager, "token_indices"):
            manager.token_indices, manager.token_probs = slot_TK, probs_TK
            return hidden, probs_TK
        num_slots = self.ep_size * self.num_local_experts
        place_TK = slot_TK.masked_fill(slot_TK < 0, num_slots)  # one more column, which stands for no slot
        routing_TP = torch.zeros(len(slot_TK), num_slots + 1, dtype=torch.bool, device=slot_TK.device).scatter(1, place_TK, True)
        probs_TP = probs_TK.new_zeros(len(slot_TK), num_slots + 1).scatter(1, place_TK, probs_TK)
        manager.setup_metadata(routing_TP[:, :num_slots].contiguous(), probs_TP[:, :num_slots].contiguous())
        return hidden, manager.token_probs


DISPATCHERS: dict[type, type[OverSlots]] = {
    MoEAlltoAllTokenDispatcher: SlotDispatcher,
    MoEFlexTokenDispatcher: FlexSlotDispatcher,
}
