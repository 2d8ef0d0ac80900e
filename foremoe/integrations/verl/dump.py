"""Counts-only workloads of production runs, to be compared off line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foremoe.arrays import Array
from foremoe.integrations.counting import count_micro_steps
from foremoe.workload import Workload

if TYPE_CHECKING:
    from foremoe.integrations.megatron import Attached

# Letters: M micro-steps, L MoE layers of this rank, G ranks of the EP group, T tokens, K top-k, E experts.


def dump_workload(attached: Attached, routing: Sequence[Array], stage: str, number: int, folder: str) -> None:
    """Rank 0 of the EP group, global rank R, writes ``STAGE_NUMBER_rankR.safetensors`` for ``foremoe compare``; collective."""
    import torch.distributed as dist

    num_experts = attached.num_experts
    load_MLE = count_micro_steps(routing, num_experts)
    tokens_M = np.array([len(topk_TLK) for topk_TLK in routing])
    sources = attached.group.gather((load_MLE, tokens_M))
    if attached.group.rank:
        return
    work = Workload.from_counts(
        np.stack([load for load, _ in sources], axis=2), num_topk=routing[0].shape[2], stage=stage,
        moe_layer_L=np.array(attached.moe_layers, np.int32),
    )  # fmt: skip
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    work.save(path / f"{stage}_{number:05d}_rank{dist.get_rank()}.safetensors")
