"""`MegatronBuffers`: home weights and main gradients in Megatron-Core's memory, and slots outside the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.integrations.megatron.checks import are_offloaded, difference_of, fault_of_experts
from foremoe.integrations.megatron.experts import ExpertKind
from foremoe.transfer.base import Tensors

# Letters: L MoE layers of this rank, E experts, B base slots, G ranks.


class MegatronBuffers:
    """Implementation of `Buffers` for the expert modules of this rank's MoE layers.

    Args:
        kinds: Kind of each layer's experts, in the order of the plan's layers.
        rank: Rank in the EP group.
        num_base: Number of base slots per rank.
        num_buffers: Number of slot buffers to allocate.
        sync: Object that finishes the gathering of parameters before they are read.

    Attributes:
        home_LE: Home slot g*B + b of every expert in the current stage.
    """

    def __init__(
        self, kinds: Sequence[ExpertKind], rank: int, num_base: int, num_buffers: int, sync: ParamSync, home_LE: Array
    ) -> None:
        self.kinds, self.rank, self.num_base, self.num_buffers = list(kinds), rank, num_base, num_buffers
        self._sync, self.home_LE = sync, home_LE
        self.dtype = next(kinds[0].experts.parameters()).dtype
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._slots: list[Tensors] = []
        self._grads: list[Tensors] = []

    def prepare(self, stage: str) -> str:
        """Returns the reason why a stage cannot run while the experts are in their current state, or an empty string.

        Allocates the slots in the first call that finds weights present. During attaching, weights may still be offloaded.

        Args:
            stage: "recompute" or "update", or "" during attaching.
        """
        offloaded = are_offloaded(self.kinds)
        if stage and offloaded:
            return "expert weights are offloaded; load them before the stage begins."
        for number, kind in enumerate(self.kinds):
            if fault := fault_of_experts(kind, trains=stage == "update"):
                return f"MoE layer {number} of this rank: {fault}."
        if self._slots or offloaded:
            return ""
        sizes = [[view.numel() for view in kind.views(0)] for kind in self.kinds]
        if any(size != sizes[0] for size in sizes):
            return "the MoE layers have experts of different sizes; foremoe needs them equal in all layers."
        self.finish_sync()
        for number, kind in enumerate(self.kinds):
            if fault := difference_of(kind):
                return f"MoE layer {number} of this rank: {fault}; such experts are not supported, run them without foremoe."
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        make = lambda dtype: [torch.zeros(n, dtype=dtype, device=self.device) for n in sizes[0]]  # noqa: E731
        self._slots = [make(self.dtype) for _ in range(self.num_buffers)]
        self._grads = [make(wide) for _ in range(self.num_buffers)]
        return ""

    def home(self, layer: int, expert: int) -> Tensors:
        """Returns the flat weights of an expert at home on this rank, once data-parallel ranks have shared them."""
        kind, b = self.kinds[layer], self._base_slot(layer, expert)
        for param in kind.parameters(b):
            self._sync.finish(param)
        return kind.flat_weights(b)

    def finish_sync(self) -> None:
        """Waits until data-parallel ranks have shared all expert weights of this rank."""
        for kind in self.kinds:
            for param in kind.all_parameters():
                self._sync.finish(param)

    def slot(self, buffer: int) -> Tensors:
        """Returns the flat weights in a buffer."""
        return self._slots[buffer]

    def main_grad(self, layer: int, expert: int) -> Tensors:
        """Returns the flat tensors in which Megatron sums the gradients of an expert at home on this rank."""
        return self.kinds[layer].flat_main_grads(self._base_slot(layer, expert))

    def slot_grad(self, buffer: int) -> Tensors:
        """Returns the flat gradient of the replica in a buffer."""
        return self._grads[buffer]

    @property
    def num_bytes(self) -> int:
        """Size in bytes of this rank's slots."""
        return sum(x.numel() * x.element_size() for many in (*self._slots, *self._grads) for x in many)

    def _base_slot(self, layer: int, expert: int) -> int:
        rank, slot = divmod(int(self.home_LE[layer, expert]), self.num_base)
        if rank != self.rank:
            raise InputError(f"expert {expert} of MoE layer {layer} is at home on rank {rank}, not here on rank {self.rank}.")
        return slot


class ParamSync:
    """Finishes the gathering of parameters that the distributed optimizer overlaps with the forward pass.

    Megatron finishes a bucket of parameters when a module is about to use it, and then starts to gather the next bucket. If a
    home is read before its layer runs, all earlier buckets are finished as well, in Megatron's order. Data-parallel ranks
    therefore start buckets in the same order although their plans differ.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chains: dict[int, list[Any]] = {}  # id of a bucket group -> the bucket groups up to it
        self._group_of: dict[torch.nn.Parameter, Any] = {}
        self._ddps = [chunk for chunk in chunks if hasattr(chunk, "ddp_config") and hasattr(chunk, "param_to_bucket_group")]
        for ddp in self._ddps:
            self._group_of.update(ddp.param_to_bucket_group)
            for groups in (ddp.bucket_groups, ddp.expert_parallel_bucket_groups):
                chain: list[Any] = []
                for group in reversed(groups):  # buckets are numbered from the last layer
                    chain.append(group)
                    self._chains[id(group)] = list(chain)

    def finish(self, param: torch.nn.Parameter) -> None:
        """Waits until the parameter holds this step's values."""
        group = self._group_of.get(param)
        if group is None or not _overlaps(group):
            return
        for earlier in self._chains[id(group)]:
            # A finished bucket stays finished until gradients have been reduced.
            if not earlier.param_gather_dispatched or earlier.param_gather_handle is not None:
                earlier.finish_param_sync()

    def overlaps_reduction(self, param: torch.nn.Parameter) -> bool:
        """Returns True if the parameter's gradient is reduced over data-parallel ranks while backward runs."""
        group = self._group_of.get(param)
        return group is not None and bool(group.ddp_config.overlap_grad_reduce)

    def reduces_now(self, param: torch.nn.Parameter) -> bool:
        """Returns True if data-parallel ranks reduce the parameter's gradient as soon as backward has computed it."""
        return self.overlaps_reduction(param) and bool(self._group_of[param].is_last_microbatch)


def _overlaps(group: Any) -> bool:
    config = group.ddp_config
    return bool(config.use_distributed_optimizer and config.overlap_param_gather)
