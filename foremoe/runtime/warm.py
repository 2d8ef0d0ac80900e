"""Ahead-of-time compilation of the kernels that compute routes of known rows."""

import numpy as np
import torch

from foremoe.distributed.group import ThreadGroup
from foremoe.runtime.holes import Holes
from foremoe.runtime.replay import ReplayedRows
from foremoe.runtime.slotted import SlottedRows


def warm_routes() -> None:
    """Computes the routes of two small rows, one with holes and one without, for one rank with two experts and a replica."""
    group, device = ThreadGroup.of(1)[0], torch.device("cpu")
    expert_MLGS, split_MLP = np.array([[[[0, 1, 0]]]] * 2, np.int32), np.array([[[1, 1, 1]], [[1, 1, 0]]], np.int32)
    routing = {(0, 0): np.array([[0], [1], [0]], np.int16), (1, 0): np.array([[0], [1], [-1]], np.int16)}
    received_GMLS = split_MLP.astype(np.int64)[None]
    holes = Holes.of(routing, split_MLP, np.array([[0, 1]]), 1, 2**20)
    extra_GMLS = holes.extra_MLP.astype(np.int64)[None]
    rows = ReplayedRows(
        routing, expert_MLGS, split_MLP, received_GMLS, num_experts=2, group=group, device=device, holes=(holes, extra_GMLS)
    )
    slotted = SlottedRows(routing, expert_MLGS, split_MLP, num_experts=2, most_bytes=2**20, group=group, device=device)
    assert not rows.lack_ML.any() and not slotted.lack_ML.any()
