"""Starting the ranks of a calibration: processes of this machine, or those that torchrun has started on several."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from foremoe.calibrate.case import Case
from foremoe.calibrate.measure import Progress, measure
from foremoe.calibrate.points import Measured
from foremoe.demo.launch import start_ranks
from foremoe.errors import InputError
from foremoe.transfer.group import TorchGroup

_TIMEOUT_S = 120.0

Teller = Callable[[], Progress]  # made on the rank that tells


def under_torchrun() -> bool:
    """This process is one of several ranks already."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def launch(case: Case, teller: Teller) -> Measured:
    """Measures on ``case.num_ranks`` processes of this machine, each with a GPU of its own where there are GPUs.

    Args:
        teller: a function of a module.

    Raises:
        InputError: fewer GPUs than ranks.   TransferError: a rank failed; the others are ended.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < case.num_ranks:
        raise InputError(f"there are {torch.cuda.device_count()} GPUs for {case.num_ranks} ranks; give --ranks of at most that.")
    return start_ranks(join, (case, teller), case.num_ranks, "calibration")[0]


def join(case: Case, teller: Teller) -> Measured:
    """Measures on this rank of an elastic launch."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timeout)
    try:
        group = TorchGroup(timeout_s=_TIMEOUT_S)
        try:
            return measure(group, case, device, teller() if group.rank == 0 else _silent)
        except BaseException as error:
            group.report(f"{type(error).__name__}: {error}")  # so that the other ranks end, and can say why
            raise
    finally:
        dist.destroy_process_group()


def _silent(what: str, done: int, total: int) -> None:
    pass
