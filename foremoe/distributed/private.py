"""Private groups of the same ranks for another thread or communicator. Their messages and reports are separate."""

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from foremoe.base.errors import InputError
from foremoe.distributed.group import Group, ThreadGroup, TorchGroup


def private_group(group: Group, device: torch.device) -> tuple[Group, torch.device]:
    """Returns a group of the same ranks for another thread, and the device on which its tensors must be. Collective.

    Exchanges between processes use NCCL if `device` is a GPU and the group has NCCL. Otherwise they use gloo.

    Raises:
        InputError: The group is neither a `TorchGroup` nor a `ThreadGroup`.
    """
    host = torch.device("cpu")
    if isinstance(group, TorchGroup):
        on_gpu = device.type == "cuda" and "nccl" in dist.get_backend_config(group.process_group)
        made = _PrivateGroup(group, on_gpu)
        return made, device if on_gpu else host
    if isinstance(group, ThreadGroup):
        groups: list[list[ThreadGroup]] = group.gather(ThreadGroup.of(group.size, timeout_s=group.timeout_s))
        return groups[0][group.rank], host
    raise InputError(f"a {type(group).__name__} has no second group for another thread; use a TorchGroup or a ThreadGroup.")


def private_nccl(group: TorchGroup) -> Any:
    """Creates a new NCCL process group of the same ranks. Collective."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    return ProcessGroupNCCL(group.private_store(), group.rank, group.size, options)


class _PrivateGroup(TorchGroup):
    """Group with its own gloo group for control messages, and for exchanges unless they are `on_gpu`."""

    def __init__(self, parent: TorchGroup, on_gpu: bool) -> None:
        self.rank, self.size, self.timeout_s = parent.rank, parent.size, parent.timeout_s
        self._roll = parent._roll.meet(parent.timeout_s)
        self._control = self.private_gloo()
        self._link = private_nccl(self) if on_gpu else self._control

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> None:
        exchange = partial(self._exchange, self._link, received, sent, num_received_G, num_sent_G)
        if self._link is self._control:
            self._answered(exchange, "exchange tensors")
        else:
            exchange().wait()  # makes the current stream wait, not the host

    def close(self) -> None:
        if self._link is not self._control:
            self._link.abort()
        self._link = self._control = None
