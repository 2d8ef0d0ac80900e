"""Backends by name: the table, instances, and one sentence for whatever cannot be had."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foremoe.base import extensions
from foremoe.base.errors import InputError
from foremoe.transfer import backends
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


@pytest.mark.parametrize(
    ("on_gpu", "cupy", "num_buffers", "expected"),
    [
        (True, True, 1, ("cupy_peer", "collective")),
        (True, False, 1, ("collective",)),
        (False, True, 1, ("collective",)),
        (True, True, 0, ("collective",)),  # nothing is ever pulled
    ],
)
def test_copy_engines_come_first_where_they_can_be(monkeypatch, on_gpu, cupy, num_buffers, expected):
    monkeypatch.setattr(backends, "find_spec", lambda name: name if name == "cupy" and cupy else None)
    slot = [SimpleNamespace(is_cuda=on_gpu)]
    assert backends.default_backends(SimpleNamespace(num_buffers=num_buffers, slot=lambda buffer: slot)) == expected
    assert all(name in BACKENDS for name in expected)
