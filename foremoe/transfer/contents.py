"""Checks that home weights do not change while a plan runs and, in debug mode, that copies equal the weights at home."""

import hashlib

import torch

from foremoe.base.errors import InputError, StaleWeights, TransferError
from foremoe.distributed.group import Group
from foremoe.plan.plan import Plan
from foremoe.transfer.base import Buffers, Tensors


class HomeWatch:
    """Detects in-place changes of this rank's home weights through torch's version counters.

    Writes through ``.data``, or by another library that shares the memory, do not change these counters. After such a write, the
    caller must begin a new plan, which treats all weights as new.
    """

    def __init__(self, plan: Plan, buffers: Buffers, rank: int) -> None:
        self.rank = rank
        self._homes_L: list[list[torch.Tensor]] = []
        for layer, home_E in enumerate(plan.home_LE):
            mine = (home_E // plan.B == rank).nonzero()[0]
            self._homes_L.append([x for e in mine.tolist() for x in buffers.home(layer, e)])
        self.version_L = [self._version(layer) for layer in range(plan.L)]

    def check(self, only: int | None = None) -> None:
        """Raises `StaleWeights` if a home weight, in layer `only` if given, was written since this object was created."""
        for layer in range(len(self._homes_L)) if only is None else (only,):
            if self._version(layer) != self.version_L[layer]:
                stale = f"weights of layer {layer} at home on rank {self.rank} changed after the plan began, so copies are stale"
                raise StaleWeights(f"{stale}; end the plan before the optimizer steps.", (self.rank,))

    def _version(self, layer: int) -> int:
        return sum(x._version for x in self._homes_L[layer])


def watch_homes(plan: Plan, buffers: Buffers, rank: int, before: HomeWatch | None) -> tuple[HomeWatch | None, str]:
    """Returns a watch over this rank's home weights for a new plan, and the reason why the plan cannot run.

    The reason is an empty string if the plan can run. `before` is the previous plan's watch if the caller says that the weights
    have not changed since that plan began.
    """
    try:
        if before is not None:
            before.check()
        return HomeWatch(plan, buffers, rank), _narrow_gradients(plan, buffers, rank)
    except StaleWeights:
        return None, "home weights were written since the last plan began; omit same_weights."
    except (InputError, KeyError, IndexError) as error:
        return None, f"the experts at home here are not those of the plan ({error}); plan for this model's homes."


def _narrow_gradients(plan: Plan, buffers: Buffers, rank: int) -> str:
    """Returns the reason why gradients cannot be summed here, in one sentence, or an empty string if they can."""
    mine = (plan.home_LE // plan.B == rank).nonzero()
    if not plan.header.schedule.trains:
        return ""
    wide = torch.float32, torch.float64
    main = {x.dtype for x in (buffers.main_grad(int(mine[0][0]), int(mine[1][0])) if len(mine[0]) else ())}
    slots = {x.dtype for x in (buffers.slot_grad(0) if buffers.num_buffers else ())}
    if narrow := [*main.difference(wide, {torch.bfloat16})]:
        return f"main gradients are {narrow[0]}; keep them in float32 (Megatron: grad_reduce_in_fp32) or bfloat16."
    if narrow := [*slots.difference(wide)]:
        return f"gradients of replicas are {narrow[0]}; keep them in float32."
    return ""


def digest(tensors: Tensors) -> str:
    """Returns a short fingerprint of the tensors' bytes."""
    state = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        # Computed from a copy, because a numpy view would fix the storage's size, which trainers change to offload weights.
        state.update(tensor.detach().to("cpu", copy=True).contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class DebugContents:
    """Fingerprints of all experts that a plan copies, computed from their home weights. Creating this object is collective."""

    def __init__(self, plan: Plan, buffers: Buffers, group: Group) -> None:
        pairs = set(zip(plan.transfers.layer_C.tolist(), plan.transfers.expert_C.tolist(), strict=True))
        mine = {(x, e): digest(buffers.home(x, e)) for x, e in pairs if plan.home_LE[x, e] // plan.B == group.rank}
        self._homes, self._buffers, self._rank, self._trains = mine, buffers, group.rank, plan.header.schedule.trains
        self._digest = {key: value for part in group.gather(list(mine.items())) for key, value in part}

    def spoil_all(self) -> None:
        """Overwrites all buffers and their gradients with `spoil`."""
        for buffer in range(self._buffers.num_buffers):
            spoil(self._buffers.slot(buffer))
            if self._trains:
                spoil(self._buffers.slot_grad(buffer))

    def check(self, layer: int, expert: int, tensors: Tensors) -> None:
        """Raises `TransferError` if the bytes of `tensors` are not the expert's weights."""
        if digest(tensors) != self._digest[layer, expert]:
            replica = f"the replica of expert {expert} of layer {layer} on rank {self._rank}"
            cause = "its buffer was overwritten, or a backend delivered wrong bytes"
            raise TransferError(f"{replica} differs from its home; {cause}.", (self._rank,))

    def check_homes(self) -> None:
        """Raises `StaleWeights` if a home on this rank has changed in any way since this object was created."""
        for (layer, expert), before in self._homes.items():
            if digest(self._buffers.home(layer, expert)) != before:
                stale = f"expert {expert} of layer {layer} at home on rank {self._rank} changed after the plan began"
                raise StaleWeights(f"{stale}; end the plan before the optimizer steps.", (self._rank,))


def spoil(tensors: Tensors) -> None:
    """Fills tensors with NaN, or with ones if they hold integers, to reveal reads of released memory."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor.fill_(float("nan"))
            else:
                tensor.view(torch.uint8).fill_(0x7F)  # NaN in both common fp8 formats
