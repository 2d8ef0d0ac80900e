"""Writes workloads (counts) of production runs for offline comparisons."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, reason
from foremoe.routing.readers.counting import count_micro_steps
from foremoe.workload.workload import Workload

if TYPE_CHECKING:
    from foremoe.integrations.megatron import Attached

_logger = logging.getLogger(__name__)

# Letters: M micro-steps, L MoE layers of this rank, E experts.


def dump_workload(attached: Attached, routing: Sequence[Array], stage: str, number: int, folder: str) -> None:
    """Writes ``STAGE_NUMBER_rankR.safetensors`` for ``foremoe compare``, on rank 0 of the EP group (global rank R). Collective.

    A dump does not affect the stage. If the file cannot be written, foremoe only logs a warning.
    """
    import torch.distributed as dist

    load_MLE = None
    with contextlib.suppress(InputError):  # planning counts the same routing and reports its faults
        load_MLE = count_micro_steps(routing, attached.num_experts)
    load_of = attached.group.gather(load_MLE)
    if attached.group.rank or any(load is None for load in load_of):
        return
    try:
        work = Workload.from_counts(
            np.stack(load_of, axis=2), num_topk=routing[0].shape[2], stage=stage,
            moe_layer_L=np.array(attached.moe_layers, np.int32),
        )  # fmt: skip
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        work.save(path / f"{stage}_{number:05d}_rank{dist.get_rank()}.safetensors")
    except Exception as error:  # only on this rank, while the others continue to plan
        _logger.warning("the counts of the %s stage could not be dumped to %r: %s", stage, folder, reason(error))
