"""A small model for tests of PinnedHost: experts whose weights say which they are."""

import torch

from foremoe.transfer.base import HOST, Copy, Entry
from foremoe.transfer.pinned_host import PinnedHost

SIZES = (24, 0, 10)  # elements of the tensors of an expert


class Experts:
    """Buffers with one slot; a home expert's weights say layer, expert and version."""

    num_buffers = 1

    def __init__(self):
        self.version = 1
        self.slots = [torch.zeros(n) for n in SIZES]
        self.asked = []

    def home(self, layer, expert):
        self.asked.append((layer, expert))
        return weights(layer, expert, self.version)

    def slot(self, buffer):
        return self.slots


def weights(layer, expert, version):
    return [torch.full((n,), float(100 * layer + 10 * expert + version)) for n in SIZES]


def pull(backend, layer, expert, between=lambda: None):
    """The tensors that a pull brings."""
    dst = [torch.full((n,), -1.0) for n in SIZES]
    handle = backend.start([Copy(0, layer, expert, HOST, backend._rank, None, dst)])
    between()
    backend.wait(handle, 5.0)
    return dst


def holds(tensors, layer, expert, version):
    return all(torch.equal(a, b) for a, b in zip(tensors, weights(layer, expert, version), strict=True))


def opened(group, node_of_rank_G=None):
    backend, buffers = PinnedHost(node_of_rank_G), Experts()
    backend.open(group.rank, group, buffers)
    return backend, buffers


def entries(num_ranks, layers=(0, 1)):
    """Expert e has its home on rank e; every other rank reads it."""
    return [Entry(x, h, h, d) for x in layers for h in range(num_ranks) for d in range(num_ranks) if d != h]
