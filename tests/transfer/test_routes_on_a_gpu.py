"""Routes of known rows on a GPU that copies them late: their page-locked memory is not given to the next stage before."""

import weakref

import numpy as np
import pretend_gpu
import pytest
import torch
from pretend_gpu import gpu, on_gpu, raw

from foremoe.distributed.group import ThreadGroup
from foremoe.runtime.replay import ReplayedRows

# Letters: M micro-steps, T tokens, K top-k, E experts, S slots.

M, T, K, E = 3, 6, 2, 4


class PinnedBlocks:
    """Torch's page-locked memory: a block is given out again once nobody holds it and the copies are over that it knows of.

    It knows of those that read a tensor of its own, or from the begin of a block, as torch does.
    """

    def __init__(self, monkeypatch):
        self.blocks, self.events, self.held = [], {}, set()
        self._empty, self._to = torch.empty, torch.Tensor.to
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch.Tensor, "to", lambda *args, **options: self.to(*args, **options))

    def empty(self, *size, pin_memory=False, **options):
        if not pin_memory:
            return self._empty(*size, **options)
        for block in self.blocks:
            free = block.data_ptr() not in self.held and all(event.query() for event in self.events[block.data_ptr()])
            if free and block.numel() == size[0] and block.dtype == options["dtype"]:
                break
        else:
            block = self._empty(*size, **options)
            self.blocks.append(block)
        self.events[block.data_ptr()] = []
        self.held.add(block.data_ptr())
        given = block.view(-1)
        weakref.finalize(given, self.held.discard, block.data_ptr())
        return given

    def to(self, tensor, device, *args, non_blocking=False, **options):
        if not isinstance(device, torch.device) or device.type != "cuda":
            return self._to(tensor, device, *args, non_blocking=non_blocking, **options)
        (there,) = on_gpu([self._empty(tensor.shape, dtype=tensor.dtype)])
        known, source = self.events.get(tensor.untyped_storage().data_ptr()), tensor
        for block in self.blocks:  # a copy that is queued keeps an address, and holds nothing
            place = (tensor.data_ptr() - block.data_ptr()) // block.itemsize
            if 0 <= place < block.numel():
                source = block[place : place + tensor.numel()].view(tensor.shape)
        gpu.stream().put(gpu.copying(lambda: raw(there).copy_(source)))
        if not non_blocking:
            gpu.stream().synchronize()
        elif known is not None:
            known.append(gpu.stream().record_event())
        return there


@pytest.fixture
def blocks(monkeypatch):
    pretend_gpu.install(monkeypatch)
    return PinnedBlocks(monkeypatch)


def rows_of(seed, device):
    """Micro-steps of one layer on one rank, each expert as often in every one; and their routing."""
    rng, (group,) = np.random.default_rng(seed), ThreadGroup.of(1)
    routing = {(m, 0): rng.permutation(np.arange(T * K) % E).reshape(T, K) for m in range(M)}
    expert_MLGS, split_MLP = np.tile(np.arange(E, dtype=np.int32), (M, 1, 1, 1)), np.full((M, 1, E), T * K // E)
    return ReplayedRows(routing, expert_MLGS, split_MLP, split_MLP[None], num_experts=E, group=group, device=device)


def numbers(rows):
    """All that layers take of the routes, but for the first row's, which a copy from the block's begin would hold for all."""
    found = [rows.route(m, 0, torch.Size([T, K])) for m in range(1, M)]
    return [[known, route.by_slot_Z, route.by_token_Z, route.by_slot_Y, route.by_arrival_Y] for known, route in found]


def test_routes_that_a_gpu_has_still_to_copy_are_not_written_over(blocks):
    wanted = numbers(rows_of(0, torch.device("cpu")))
    queued = numbers(rows_of(0, torch.device("cuda")))
    later = rows_of(1, torch.device("cuda"))  # the next stage, while the device is not that far
    gpu.synchronize()
    for found, expected in zip(queued, wanted, strict=True):
        assert all(torch.equal(raw(have), want) for have, want in zip(found, expected, strict=True))
    del later
    again = rows_of(2, torch.device("cuda"))
    assert len(blocks.blocks) == 2 and not again.lack_ML.any()  # what is over is used again
