"""Look-up of transfer backends by name, either built-in or registered as entry points, and an engine's set of backends."""

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

NONE = -1  # number that stands for no backend
_NUM_CAUSES = 4  # maximum number of causes in a log line; every rank logs its own

ENTRY_POINTS = "foremoe.backends"
BACKENDS = {
    "collective": "foremoe.transfer.collective:Collective",
    "cupy_peer": "foremoe.transfer.cupy_peer:CupyPeer",
    "local": "foremoe.transfer.local:Local",
    "pinned_host": "foremoe.transfer.pinned_host:PinnedHost",
}


def backend_names() -> list[str]:
    """Returns all names that `resolve_backend` accepts, those of built-in backends first. Does not import any backend."""
    return [*BACKENDS, *(name for name in entry_point_names(ENTRY_POINTS) if name not in BACKENDS)]


def default_backends(buffers: Buffers, group: Group) -> tuple[str, ...]:
    """Returns the names of the backends that an engine uses by default. Collective.

    Copies inside a node use copy engines if the slots are on a GPU, CuPy is installed, and the ranks can open each other's
    memory. All other copies use `Collective`. Rank 0 logs the choice, and if GPUs cannot use copy engines, it warns and says why.
    Host stores rarely save time and are never chosen by default.
    """
    on_gpu = buffers.num_buffers > 0 and buffers.slot(0)[0].is_cuda
    chosen: tuple[str, ...] = ("collective",)
    fault = ""
    if any(group.gather(on_gpu)):
        fault = _fault_of_copy_engines(on_gpu, group)
        chosen = ("collective",) if fault else ("cupy_peer", "collective")
    if group.rank == 0:
        if fault:
            _logger.warning("copies inside a node use collective, not copy engines (%s).", fault.rstrip("."))
        _logger.info("default transfer backends: %s", ", ".join(chosen))
    return chosen


def _fault_of_copy_engines(on_gpu: bool, group: Group) -> str:
    """Returns why the ranks cannot use copy engines, or an empty string if they can. Collective."""
    from foremoe.transfer.cupy_peer import cuda_runtime
    from foremoe.transfer.ipc import fault_between

    try:
        cuda = cuda_runtime() if on_gpu else "its slots are not on a GPU"
    except InputError as error:
        cuda = str(error)
    return fault_between(cuda, group)


def resolve_backend(backend: str | TransferBackend) -> TransferBackend:
    """Returns `backend` itself if it is a backend, or else a new instance of the class with this name.

    Raises:
        InputError: The name is unknown, the argument is not a backend, or a module that the backend `requires` is missing.
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
    """Returns the class name of a built-in backend without importing it. Any other backend's name is returned as given."""
    return BACKENDS.get(backend, backend).rpartition(":")[2] if isinstance(backend, str) else type(backend).__name__


def package_of(module: str) -> str:
    """Returns the pip package of a module that a backend requires. CuPy has a separate package for each major version of CUDA."""
    return f"'foremoe[cupy-cuda{(torch.version.cuda or '13').partition('.')[0]}]'" if module == "cupy" else module


class BackendSet:
    """Numbered backends in order of preference. Creating a set opens all of them, or closes them all if one cannot be opened."""

    def __init__(self, backends: Sequence[TransferBackend], group: Group, buffers: Buffers) -> None:
        self.backends = list(backends)
        self.names = [type(backend).__name__ for backend in self.backends]  # for messages and timelines
        self.retired: set[int] = set()  # two-sided backends that all ranks have retired
        self.sick: dict[int, str] = {}  # backends that failed on this rank -> reason
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
        """Returns True if destinations pull over this backend without the source's help. Returns False for `NONE`."""
        return number != NONE and self.backends[number].one_sided

    def by_link(self) -> Array:
        """Returns the number of the backend that serves each link, or `NONE`, int64 [P]."""
        serving = [[b for b, x in enumerate(self.backends) if link in x.links and b not in self.retired] for link in Link]
        return np.array([numbers[0] if numbers else NONE for numbers in serving])

    def publish(self, plan: Plan, programme: Programme, route_C: Array, position: int, version: int) -> None:
        """Publishes experts to be pulled from the use at `position` on. `route_C` is each copy's backend. Collective."""
        one_sided = np.array([x.one_sided for x in self.backends])
        pulled_C = (programme.need_C >= position) & (route_C != NONE) & one_sided[route_C]
        for b, backend in enumerate(self.backends):
            # A host store costs memory, so it holds only experts of host copies. A peer backend can replace any backend.
            mine_C = pulled_C & (route_C == b) if Link.HOST in backend.links else pulled_C
            if backend.one_sided:
                # Called even without entries, so that an earlier version in the store is not mistaken for the present one.
                backend.publish(_entries(plan, programme, mine_C), version)

    def return_backend(self) -> int:
        """Returns the backend that sends gradients home: the first two-sided backend that is not retired, or `NONE`."""
        return next((b for b, x in enumerate(self.backends) if not x.one_sided and b not in self.retired), NONE)

    def replaceable(self) -> bool:
        """Returns True if a failed two-sided backend could be replaced by another one. The result is the same on all ranks."""
        left = [x for b, x in enumerate(self.backends) if b not in self.retired]
        return len(left) > 1 and not all(x.one_sided for x in left)

    def other_pulls(self, failed: int) -> list[int]:
        """Returns the one-sided backends over which a pull may be repeated after it has failed on the backend `failed`."""
        return [b for b, x in enumerate(self.backends) if x.one_sided and b != failed and b not in self.sick]

    def forgive_pulls(self) -> None:
        """Allows failed one-sided backends to be used again, because the cause of the failure may have been temporary."""
        self.sick = {b: why for b, why in self.sick.items() if not self.backends[b].one_sided}

    def failed_here(self, number: int, error: Exception) -> None:
        """Records that a backend failed on this rank. Only the first failure is logged."""
        if number in self.sick:
            return
        self.sick[number], then = reason(error), ""
        if self.backends[number].one_sided:
            others = [self.names[b] for b in self.other_pulls(number)]
            then = f"; its copies are pulled over {' or '.join(others)}" if others else "; no other backend can pull its copies"
        _logger.warning("rank %d: %s failed (%s)%s.", self._rank, self.names[number], self.sick[number], then)

    def failed(self) -> list[tuple[int, str]]:
        """Returns the two-sided backends that failed on this rank and are not retired yet, each with the reason."""
        return sorted((b, why) for b, why in self.sick.items() if not self.backends[b].one_sided and b not in self.retired)

    def give_up(self, failed_G: Sequence[Sequence[tuple[int, str]]]) -> list[int]:
        """Retires backends that failed on any rank, given the results of `failed` on all ranks. Returns the backends retired now.

        Rank 0 logs the retirement for all ranks.
        """
        lost = sorted({b for failed in failed_G for b, _ in failed} - self.retired)
        self.retired.update(lost)
        for b in lost:
            self.sick.setdefault(b, "it was retired")
            if self._rank == 0:
                causes = [f"rank {g}: {why}" for g, failed in enumerate(failed_G) for number, why in failed if number == b]
                more = f"; and on {len(causes) - _NUM_CAUSES} more ranks" if len(causes) > _NUM_CAUSES else ""
                why = "; ".join(causes[:_NUM_CAUSES]) + more
                _logger.warning("%s is retired (%s); %s.", self.names[b], why, self._instead_of(b))
        return lost

    def _instead_of(self, lost: int) -> str:
        """Returns a message about how the copies of a retired backend are sent from now on."""
        links = self.backends[lost].links
        left = [self.names[b] for b, x in enumerate(self.backends) if b not in self.retired and x.links & links]
        weights = f"{' or '.join(left)} sends its copies from now on" if left else "no backend is left for its copies"
        return weights if self.return_backend() != NONE else f"{weights}, and none for gradients: updates run at home placement"

    def close(self) -> None:
        """Closes all backends, in any state. It may be called twice."""
        self._closing.close()


def _entries(plan: Plan, programme: Programme, mask_C: Array) -> list[Entry]:
    """Returns the experts that the masked copies read, in the order in which uses need them."""
    t = plan.transfers
    parts = programme.need_C, t.layer_C, t.expert_C, programme.home_C, t.dst_C
    rows = np.unique(np.stack([part_C[mask_C] for part_C in parts], axis=1), axis=0)
    first = np.sort(np.unique(rows[:, 1:], axis=0, return_index=True)[1])
    return [Entry(layer, expert, home, dst, need) for need, layer, expert, home, dst in rows[first].tolist()]
