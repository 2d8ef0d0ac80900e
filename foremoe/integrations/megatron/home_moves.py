"""`HomeMoves`: moves experts to other homes for one stage, without a change to parameters, the optimizer or checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.distributed.group import Group
from foremoe.integrations.megatron.buffers import MegatronBuffers
from foremoe.integrations.megatron.experts import ExpertKind
from foremoe.plan.plan import Plan
from foremoe.transfer.base import Tensors

# Letters: L MoE layers of this rank, E experts, B base slots, G ranks.


class HomeMoves:
    """Homes at which experts compute from `enter` to `leave`, instead of Megatron's homes.

    Base slots get the weights of the experts that compute there. The original weights are kept in host memory and restored after
    the stage, so that the optimizer, its shards, checkpoints and weight export see unchanged parameters. Gradients are computed
    at the temporary homes, and `gradients_back` returns them before they are reduced.

    Args:
        kinds: Kinds of the layers' experts.
        home_LE: Home slot g*B + b of every expert in this stage. In Megatron, the home of expert e is slot e.
    """

    def __init__(self, group: Group, kinds: Sequence[ExpertKind], num_base: int, home_LE: Array) -> None:
        self._group, self._kinds, self._base = group, kinds, num_base
        self._moved_L = [np.flatnonzero(home_E != np.arange(len(home_E))) for home_E in home_LE]
        self._home_LE = home_LE
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # a base slot's tensor and its original content

    @property
    def num_moved(self) -> int:
        """Number of experts that do not compute in their own slot, over all layers and ranks."""
        return sum(len(moved) for moved in self._moved_L)

    def enter(self, trains: bool) -> None:
        """Exchanges weights. Also exchanges main gradients if the stage adds to existing ones. Collective."""
        rank = self._group.rank
        for layer, moved_E in enumerate(self._moved_L):
            for e in moved_E.tolist():
                slot = int(self._home_LE[layer, e])
                if slot // self._base == rank:
                    self._kept += [(view, _copy_aside(view)) for view in self._weights(layer, slot)]
        self._exchange(self._weights, back=False)
        # Without training, they may be offloaded.
        if trains and any(self._group.gather(self._have_gradients())):
            self._exchange(self._gradients, back=False)

    def gradients_back(self) -> None:
        """Sends main gradients back to their parameters. Collective."""
        self._exchange(self._gradients, back=True)

    def leave(self) -> None:
        """Restores the weights. Not collective. It may be called twice."""
        for view, held in self._kept:
            view.copy_(held)
        self._kept = []

    def _weights(self, layer: int, slot: int) -> Tensors:
        return self._kinds[layer].flat_weights(slot % self._base)

    def _gradients(self, layer: int, slot: int) -> Tensors:
        return self._kinds[layer].flat_main_grads(slot % self._base)

    def _have_gradients(self) -> bool:
        return any(bool(vars(param)["main_grad"].any()) for kind in self._kinds for param in kind.all_parameters())

    @torch.no_grad()
    def _exchange(self, tensors_of: Callable[[int, int], Tensors], *, back: bool) -> None:
        """Moves the tensors of moved experts layer by layer from their own slots to their homes, or back."""
        G, rank = self._group.size, self._group.rank
        for layer, moved_E in enumerate(self._moved_L):
            if not len(moved_E):
                continue
            own_Z, home_Z = moved_E, self._home_LE[layer, moved_E]
            src_Z, dst_Z = (home_Z, own_Z) if back else (own_Z, home_Z)
            sends = [src_Z[(src_Z // self._base == rank) & (dst_Z // self._base == g)].tolist() for g in range(G)]
            arrives = [dst_Z[(dst_Z // self._base == rank) & (src_Z // self._base == g)].tolist() for g in range(G)]
            for i, like in enumerate(tensors_of(layer, 0)):
                rows = [tensors_of(layer, slot)[i] for slots in sends for slot in slots]
                sent = torch.stack(rows) if rows else like.new_empty(0, len(like))
                received = like.new_empty(sum(map(len, arrives)), len(like))
                self._group.all_to_all(received, sent, [len(slots) for slots in arrives], [len(slots) for slots in sends])
                for slot, row in zip((slot for slots in arrives for slot in slots), received, strict=True):
                    tensors_of(layer, slot)[i].copy_(row)


def move_homes(group: Group, buffers: MegatronBuffers, plan: Plan) -> HomeMoves | None:
    """Moves experts to the plan's homes until `HomeMoves.leave`. Returns None if these homes are Megatron's own. Collective."""
    moves = HomeMoves(group, buffers.kinds, plan.B, plan.home_LE)
    if not moves.num_moved:
        return None
    buffers.finish_sync()
    try:
        moves.enter(trains=plan.header.schedule.trains)
    except BaseException:
        moves.leave()
        raise
    buffers.home_LE = plan.home_LE
    return moves


def _copy_aside(view: torch.Tensor) -> torch.Tensor:
    held = torch.empty(view.shape, dtype=view.dtype, pin_memory=view.is_cuda)
    held.copy_(view)
    return held
