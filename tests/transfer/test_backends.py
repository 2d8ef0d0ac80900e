"""Backends by name: the table, instances, and one sentence for whatever cannot be had."""

import logging
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foremoe.base import extensions
from foremoe.base.errors import InputError
from foremoe.testing.ranks import run_threads
from foremoe.transfer import backends, cupy_peer, ipc
from foremoe.transfer.backends import BACKENDS, backend_names, resolve_backend
from foremoe.transfer.local import Local

NEEDS_NOTHING = ("collective", "local", "pinned_host")


class NeedsMuch(Local):
    requires = ("json", "no_such_module", "nor_this")


@pytest.mark.parametrize("name", NEEDS_NOTHING)
def test_names_give_new_instances(name):
    first, second = resolve_backend(name), resolve_backend(name)
    assert type(first) is type(second) and first is not second
    assert type(first).__name__.lower() == name.replace("_", "")


def test_an_instance_is_itself():
    mine = Local()
    assert resolve_backend(mine) is mine


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(InputError, match=f"no transfer backend 'nccl'; choose from {', '.join(BACKENDS)}"):
        resolve_backend("nccl")


def test_a_missing_module_comes_with_the_command():
    with pytest.raises(InputError, match=r"NeedsMuch needs no_such_module, nor_this; pip install no_such_module nor_this\."):
        resolve_backend(NeedsMuch())


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "cupy-cuda13"), ("12.8", "cupy-cuda12"), (None, "cupy-cuda13")])
def test_cupy_comes_with_the_extra_of_torchs_cuda(cuda, extra, monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(InputError, match=rf"CupyPeer needs cupy; pip install 'foremoe\[{extra}\]'\."):
        resolve_backend("cupy_peer")
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras[extra][0].startswith(f"{extra}x>=")


@pytest.mark.parametrize("value", [Local, 3, None])
def test_what_is_no_backend_is_refused(value):
    with pytest.raises(InputError, match="is not a transfer backend; give an instance"):
        resolve_backend(value)


@pytest.mark.parametrize("registered", [NeedsMuch, NeedsMuch(), dict])
def test_entry_points_may_be_classes_or_instances_but_must_be_backends(monkeypatch, registered):
    monkeypatch.setattr(backends, "entry_point_names", lambda group: ["theirs"])
    monkeypatch.setattr(backends, "load_entry_point", lambda group, name: registered)
    with pytest.raises(InputError, match="is not a transfer backend" if registered is dict else "NeedsMuch needs"):
        resolve_backend("theirs")
    assert backend_names() == [*BACKENDS, "theirs"]


def test_ours_cannot_be_replaced(monkeypatch):
    monkeypatch.setattr(backends, "entry_point_names", lambda group: ["local"])
    assert type(resolve_backend("local")) is Local and backend_names() == list(BACKENDS)


def test_listing_imports_no_backend():
    code = (
        "import sys; from foremoe.transfer.backends import backend_names; names = backend_names();"
        "print(len(names), [m for m in sys.modules if m.rpartition('.')[2] in names or m == 'cupy'])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"{len(BACKENDS) + len(extensions.entry_point_names(backends.ENTRY_POINTS))} []"


class Cuda:
    """CuPy's runtime of one rank: allocations, and handles that other ranks can open."""

    def __init__(self):
        self.held = []

    def malloc(self, size):
        self.held.append(size)
        return 4096

    def free(self, base):
        self.held.pop()

    def ipcGetMemHandle(self, base):
        return bytes([base % 251])

    def ipcOpenMemHandle(self, handle):
        return 8192

    def ipcCloseMemHandle(self, base):
        assert base == 8192


BOTH, COLLECTIVE = ("cupy_peer", "collective"), ("collective",)


class Refuses(Cuda):
    """As in a container with an IPC namespace of its own."""

    def ipcOpenMemHandle(self, handle):
        raise RuntimeError("cudaErrorMapBufferObjectFailed: mapping of buffer object failed")


@pytest.mark.parametrize(
    ("on_gpu", "cudas", "num_buffers", "expected", "told"),
    [
        ((True, True), (Cuda, Cuda), 1, BOTH, None),
        ((False, False), (Cuda, Cuda), 1, COLLECTIVE, None),
        ((True, True), (Cuda, Cuda), 0, COLLECTIVE, None),  # nothing is ever pulled
        ((True, True), (Cuda, None), 1, COLLECTIVE, "rank 1: cupy_peer needs cupy"),
        ((True, True), (Refuses, Cuda), 1, COLLECTIVE, r"rank 0: it cannot open the memory of rank 1 \(cudaErrorMapBuffer"),
        ((True, False), (Cuda, Cuda), 1, COLLECTIVE, "rank 1: its slots are not on a GPU"),
    ],
)
def test_copy_engines_come_first_where_all_ranks_can_use_them(monkeypatch, caplog, on_gpu, cudas, num_buffers, expected, told):
    """On all ranks alike, whichever cannot; one rank logs the choice, and a warning that says why."""
    here, made = threading.local(), [None if cuda is None else cuda() for cuda in cudas]

    def runtime():
        if made[here.rank] is None:
            raise InputError("cupy_peer needs cupy (no module).")
        return made[here.rank]

    def choose(group):
        here.rank = group.rank
        slot = [SimpleNamespace(is_cuda=on_gpu[group.rank])]
        return backends.default_backends(SimpleNamespace(num_buffers=num_buffers, slot=lambda buffer: slot), group)

    monkeypatch.setattr(cupy_peer, "cuda_runtime", runtime)
    monkeypatch.setattr(ipc, "this_process", lambda: ipc.Process("host", here.rank, ""))
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        assert run_threads(choose, 2) == [expected] * 2
    *warned, said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert said == (logging.INFO, f"default transfer backends: {', '.join(expected)}")
    assert [level for level, _ in warned] == [logging.WARNING] * (told is not None)
    assert all(re.search(told, text) for _, text in warned)
    assert not any(cuda.held for cuda in made if cuda is not None)


def test_containers_that_share_host_name_and_process_number_are_two_processes(monkeypatch):
    """Their addresses are not each other's."""
    one = ipc.this_process()
    monkeypatch.setattr(ipc, "_MARK", "another")
    assert ipc.this_process() != one and ipc.this_process()[:2] == one[:2]
