"""A transfer backend as a third party would write it: homes leave their weights in files, in a folder that all ranks see."""

import shutil
import tempfile
import time
from pathlib import Path

import torch

from foremoe.base.errors import StaleWeights, TransferError
from foremoe.plan.transfers import Link
from foremoe.transfer import TransferBackend


class FileBackend(TransferBackend):
    links = frozenset({Link.HOST})
    one_sided = True
    folder = None

    def open(self, rank, group, buffers):
        self.rank, self.group, self.buffers, self.version = rank, group, buffers, 0
        self.folder = Path(group.gather(tempfile.mkdtemp(prefix="experts-") if rank == 0 else "")[0])

    def publish(self, entries, version):
        for layer, expert in {(entry.layer, entry.expert) for entry in entries if entry.home_rank == self.rank}:
            torch.save((version, [x.clone() for x in self.buffers.home(layer, expert)]), self.folder / f"{layer}-{expert}")
        self.version = version
        self.group.barrier()

    def start(self, copies):
        return copies

    def wait(self, handle, timeout_s):
        until = time.monotonic() + timeout_s
        for copy in handle:
            file = self.folder / f"{copy.layer}-{copy.expert}"
            if not file.exists():
                raise TransferError(f"{file} was never written; publish expert {copy.expert} of layer {copy.layer}.")
            if time.monotonic() > until:
                raise TransferError(f"reading {file} took longer than {timeout_s} s; check the folder's disk.")
            version, weights = torch.load(file)
            if version != self.version:
                raise StaleWeights(f"{file} has version {version} of the weights, not {self.version}; publish it again.")
            for into, tensor in zip(copy.dst, weights, strict=True):
                into.copy_(tensor)

    def close(self):
        if self.folder is not None and self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
