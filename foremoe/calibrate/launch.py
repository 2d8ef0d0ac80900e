"""Launches a calibration, either on processes of this machine or on ranks that torchrun started on several machines."""

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from foremoe.base.errors import InputError, TransferError, first_line
from foremoe.calibrate.case import Case
from foremoe.calibrate.measure import Progress, measure
from foremoe.calibrate.points import Measured
from foremoe.distributed.group import TorchGroup
from foremoe.distributed.launch import start_ranks

_TIMEOUT_S = 120.0

ProgressMaker = Callable[[], Progress]  # called on the rank that reports progress


def default_ranks() -> int:
    """Returns the default number of ranks: 1 on a machine with one GPU, otherwise 2, so that there are links to measure."""
    return 1 if _num_gpus() == 1 else 2


def launch(case: Case, make_progress: ProgressMaker) -> Measured:
    """Measures on ``case.num_ranks`` processes of this machine. If the machine has GPUs, each process gets a GPU of its own.

    `make_progress` must be a module-level function. If a rank fails, all other ranks are ended and a TransferError with the
    reason is raised.
    """
    num_gpus = _num_gpus()
    if num_gpus and num_gpus < case.num_ranks:
        there = "is 1 GPU" if num_gpus == 1 else f"are {num_gpus} GPUs"
        cpu = "set CUDA_VISIBLE_DEVICES= (empty) to calibrate this machine's CPU"
        raise InputError(f"there {there} for {case.num_ranks} ranks; give --ranks of at most {num_gpus}, or {cpu}.")
    answer = start_ranks(_join_or_refusal, (case, make_progress), case.num_ranks, "calibration")[0]
    if isinstance(answer, InputError):
        raise answer
    return answer  # type: ignore[no-any-return]


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def join_started(case: Case, make_progress: ProgressMaker) -> Measured:
    """Calls `join` on a rank that another launcher started. Failures other than bad input are raised as TransferError."""
    try:
        return join(case, make_progress)
    except (InputError, TransferError):
        raise
    except Exception as error:
        rank = int(os.environ["RANK"])
        why = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        raise TransferError(f"rank {rank} failed and the calibration was stopped ({why}).", (rank,)) from error


def _join_or_refusal(case: Case, make_progress: ProgressMaker) -> Measured | InputError:
    """Calls `join`, but returns an InputError, because all ranks raise the same one and none of them has failed."""
    try:
        return join(case, make_progress)
    except InputError as error:
        return error


def join(case: Case, make_progress: ProgressMaker) -> Measured:
    """Takes part in the measurements on this rank, which torchrun or `launch` started."""
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
            return measure(group, case, device, make_progress() if group.rank == 0 else lambda *_: None)
        except BaseException as error:
            group.report(f"{type(error).__name__}: {error}")  # so that the other ranks end and can give the reason
            raise
    finally:
        dist.destroy_process_group()
