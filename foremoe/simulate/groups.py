"""`ep_groups`: source ranks in several EP groups, each with a workload of its own."""

from __future__ import annotations

import dataclasses

import numpy as np

from foremoe.base.errors import InputError
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts.


def ep_groups(workload: Workload, size: int) -> list[Workload]:
    """The workload cut into EP groups of `size` consecutive ranks: the same micro-steps, each group with its own tokens.

    Raises:
        InputError: `size` does not divide the ranks.
    """
    if size < 1 or workload.G % size:
        raise InputError(f"{workload.G} ranks do not divide into EP groups of {size}; choose a size that divides {workload.G}.")
    out = []
    for low in range(0, workload.G, size):
        ranks = slice(low, low + size)
        load_MLGE, tokens_MG = workload.load_MLGE[:, :, ranks], workload.tokens_MG[:, ranks]
        pairs_ML = load_MLGE.sum(axis=(2, 3), dtype=np.int64)
        tokens_M = tokens_MG.sum(axis=1, dtype=np.int64)
        # Unknown tokens are counted over all ranks together; the pairs that a group lacks give its share.
        lacking_ML = tokens_M[:, None] - -(-pairs_ML // workload.num_topk)
        out.append(
            dataclasses.replace(
                workload, load_MLGE=load_MLGE, tokens_MG=tokens_MG, attention_MG=workload.attention_MG[:, ranks],
                unknown_ML=np.minimum(lacking_ML, workload.unknown_ML), micro_step_Q=None, rank_Q=None, dealt=None,
            )
        )  # fmt: skip
    return out
