"""The transfer backends by name (ours in one table, those of other packages by entry point), and the set that an engine uses."""

import contextlib
import importlib
import logging
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, reason
from foremoe.base.extensions import entry_point_names, load_entry_point
from foremoe.distributed.group import Group
from foremoe.plan.plan import Plan
from foremoe.plan.programme import Programme
from foremoe.plan.transfers import Link
from foremoe.transfer.base import Buffers, Entry, TransferBackend

# Letters: P links (`Link`), C copies of the whole plan.

_logger = logging.getLogger(__name__)

NONE = -1  # as a backend: no backend can do it
_NUM_CAUSES = 4  # in a log line; every rank logs its own

ENTRY_POINTS = "foremoe.backends"
BACKENDS = {
    "collective": "foremoe.transfer.collective:Collective",
    "cupy_peer": "foremoe.transfer.cupy_peer:CupyPeer",
    "local": "foremoe.transfer.local:Local",
    "pinned_host": "foremoe.transfer.pinned_host:PinnedHost",
}


def backend_names() -> list[str]:
    """All names that `resolve_backend` knows: ours, then those of other packages. Imports none of them."""
    return [*BACKENDS, *(name for name in entry_point_names(ENTRY_POINTS) if name not in BACKENDS)]


def default_backends(buffers: Buffers, group: Group) -> tuple[str, ...]:
    """Names of the backends of an engine that is given none; collective.

    Inside a node copy engines, where slots are on a GPU, CuPy is there and ranks can open each other's memory; collective for all
    else. A GPU that goes without copy engines is in the log. Host stores hardly ever pay, and are asked for.
    """
    on_gpu = buffers.num_buffers > 0 and buffers.slot(0)[0].is_cuda
    if not any(group.gather(on_gpu)):
        return ("collective",)
    from foremoe.transfer.cupy_peer import cuda_runtime
    from foremoe.transfer.ipc import fault_between

    try:
        cuda = cuda_runtime() if on_gpu else "its slots are not on a GPU"
    except InputError as error:
        cuda = str(error)
    fault = fault_between(cuda, group)
    if fault and group.rank == 0:
        _logger.warning("copies inside a node go by collective, not by copy engines (%s).", fault.rstrip("."))
    return ("collective",) if fault else ("cupy_peer", "collective")


def resolve_backend(backend: str | TransferBackend) -> TransferBackend:
    """An instance itself, or a new one of the class that a name of `backend_names` stands for.

    Raises:
        InputError: An unknown name, something that is not a backend, or a module that it `requires` is missing.
    """
    if isinstance(backend, str):
        if backend in BACKENDS:
            module_name, _, name = BACKENDS[backend].partition(":")
            found = getattr(importlib.import_module(module_name), name)
        elif backend in entry_point_names(ENTRY_POINTS):
            found = load_entry_point(ENTRY_POINTS, backend)
        else:
            known = ", ".join(backend_names())
            raise InputError(f"there is no transfer backend {backend!r}; choose from {known}, or give an instance.")
        backend = found() if isinstance(found, type) else found
    if not isinstance(backend, TransferBackend):
        raise InputError(f"{backend!r} is not a transfer backend; give an instance of a TransferBackend, or its name.")
    lacking = [name for name in backend.requires if find_spec(name) is None]
    if lacking:
        packages = " ".join(map(package_of, lacking))
        raise InputError(f"{type(backend).__name__} needs {', '.join(lacking)}; pip install {packages}.")
    return backend


def class_name(backend: str | TransferBackend) -> str:
    """The name of a backend's class, which is not loaded for it; of another package's backend, its own name where it is given."""
    return BACKENDS.get(backend, backend).rpartition(":")[2] if isinstance(backend, str) else type(backend).__name__


def package_of(module: str) -> str:
    """What to give pip for a module that a backend requires; CuPy's wheels are made for one major version of CUDA each."""
    return f"'foremoe[cupy-cuda{(torch.version.cuda or '13').partition('.')[0]}]'" if module == "cupy" else module


class BackendSet:
    """Backends by number, in order of preference; opens all of them, and closes them if one cannot be opened."""

    def __init__(self, backends: Sequence[TransferBackend], group: Group, buffers: Buffers) -> None:
        self.backends = list(backends)
        self.names = [type(backend).__name__ for backend in self.backends]  # in messages and timelines
        self.retired: set[int] = set()  # two-sided backends given up by all ranks
        self.sick: dict[int, str] = {}  # backends that failed on this rank, and why
        self._rank = group.rank
        self._closing = contextlib.ExitStack()
        try:
            for backend in self.backends:
                self._closing.callback(backend.close)
                backend.open(group.rank, group, buffers)
        except BaseException as error:
            group.report(f"{type(error).__name__}: {error}")
            self.close()
            raise

    def __getitem__(self, number: int) -> TransferBackend:
        return self.backends[number]

    def one_sided(self, number: int) -> bool:
        """True if destinations pull alone over a backend; not for `NONE`."""
        return number != NONE and self.backends[number].one_sided

    def by_link(self) -> Array:
        """int64 [P]: the backend that serves each link, `NONE` for none."""
        serving = [[b for b, x in enumerate(self.backends) if link in x.links and b not in self.retired] for link in Link]
        return np.array([numbers[0] if numbers else NONE for numbers in serving])

    def publish(self, plan: Plan, programme: Programme, route_C: Array, position: int, version: int) -> None:
        """Publishes what copies will pull for uses from `position` on; `route_C` is their backend, or `NONE`. Collective."""
        one_sided = np.array([x.one_sided for x in self.backends])
        pulled_C = (programme.need_C >= position) & (route_C != NONE) & one_sided[route_C]
        for b, backend in enumerate(self.backends):
            # A host store costs memory, so it holds its own copies only; a peer's memory can stand in for any of them.
            mine_C = pulled_C & (route_C == b) if Link.HOST in backend.links else pulled_C
            if backend.one_sided:
                # Also without entries: what it still holds of an earlier version must not pass for the present one.
                backend.publish(_entries(plan, programme, mine_C), version)

    def return_backend(self) -> int:
        """The backend that brings gradients home, the first two-sided one that is not given up; `NONE` if there is none."""
        return next((b for b, x in enumerate(self.backends) if not x.one_sided and b not in self.retired), NONE)

    def replaceable(self) -> bool:
        """True if a two-sided backend could be given up for another backend; the same on all ranks."""
        left = [x for b, x in enumerate(self.backends) if b not in self.retired]
        return len(left) > 1 and not all(x.one_sided for x in left)

    def other_pulls(self, failed: int) -> list[int]:
        """One-sided backends that a pull may use in place of `failed`."""
        return [b for b, x in enumerate(self.backends) if x.one_sided and b != failed and b not in self.sick]

    def forgive_pulls(self) -> None:
        """One-sided backends may be used again: they may have failed for a passing reason."""
        self.sick = {b: why for b, why in self.sick.items() if not self.backends[b].one_sided}

    def failed_here(self, number: int, error: Exception) -> None:
        """A backend failed on this rank; only the first failure is in the log."""
        if number in self.sick:
            return
        self.sick[number], then = reason(error), ""
        if self.backends[number].one_sided:
            others = [self.names[b] for b in self.other_pulls(number)]
            then = f"; its copies are pulled over {' or '.join(others)}" if others else "; no other backend can pull its copies"
        _logger.warning("rank %d: %s failed (%s)%s.", self._rank, self.names[number], self.sick[number], then)

    def failed(self) -> list[tuple[int, str]]:
        """Two-sided backends that failed on this rank and are not given up yet, and why."""
        return sorted((b, why) for b, why in self.sick.items() if not self.backends[b].one_sided and b not in self.retired)

    def give_up(self, failed_G: Sequence[Sequence[tuple[int, str]]]) -> list[int]:
        """Retires backends that failed anywhere, from what `failed` returned on every rank; returns those retired now.

        Rank 0 logs it for all.
        """
        lost = sorted({b for failed in failed_G for b, _ in failed} - self.retired)
        self.retired.update(lost)
        for b in lost:
            self.sick.setdefault(b, "it was given up")
            if self._rank == 0:
                causes = [f"rank {g}: {why}" for g, failed in enumerate(failed_G) for number, why in failed if number == b]
                more = f"; and on {len(causes) - _NUM_CAUSES} more ranks" if len(causes) > _NUM_CAUSES else ""
                why = "; ".join(causes[:_NUM_CAUSES]) + more
                _logger.warning("%s is given up for good (%s); %s.", self.names[b], why, self._instead_of(b))
        return lost

    def _instead_of(self, lost: int) -> str:
        """Says how copies of a retired backend travel from now on."""
        links = self.backends[lost].links
        left = [self.names[b] for b, x in enumerate(self.backends) if b not in self.retired and x.links & links]
        weights = f"{' or '.join(left)} brings its copies from now on" if left else "no backend is left for its copies"
        return weights if self.return_backend() != NONE else f"{weights}, and none for gradients: updates run at home placement"

    def close(self) -> None:
        """Closes all backends, whatever state they are in; safe to call twice."""
        self._closing.close()


def _entries(plan: Plan, programme: Programme, mask_C: Array) -> list[Entry]:
    """What the copies of a mask read, in the order in which uses need it."""
    t = plan.transfers
    parts = programme.need_C, t.layer_C, t.expert_C, programme.home_C, t.dst_C
    rows = np.unique(np.stack([part_C[mask_C] for part_C in parts], axis=1), axis=0)
    first = np.sort(np.unique(rows[:, 1:], axis=0, return_index=True)[1])
    return [Entry(layer, expert, home, dst, need) for need, layer, expert, home, dst in rows[first].tolist()]
