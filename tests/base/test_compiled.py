"""The disk cache of kernels: renewed when what they call elsewhere changes, and somewhere else where nothing can be written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from installation import read_only_copy
from numba import njit

import foremoe
from foremoe.base import compiled

PACKAGE = Path(foremoe.__file__).parent

# As a user of a read-only installation with no home: nobody but root may write anywhere, and root may not either.
REFUSE = """
import os, sys, tempfile
import numba.core.caching as caching
allowed = os.path.realpath(sys.argv[1])
ensure = caching._CacheLocator.ensure_cache_path
def refuse(self):
    if not os.path.realpath(self.get_cache_path()).startswith(allowed + os.sep):
        raise PermissionError(13, "read-only", self.get_cache_path())
    ensure(self)
caching._CacheLocator.ensure_cache_path = refuse
"""
RUN_KERNEL = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import foremoe.solvers, foremoe.simulate, foremoe.routing.readers.counting, foremoe.workload.dealing
import numpy as np
from foremoe.plan.split import link_slots
first_E, next_P = np.zeros(1, np.int64), np.zeros(1, np.int64)
link_slots(np.zeros((1, 1), np.int16), np.ones((1, 1), np.int32), first_E, next_P)
print([[*first_E.tolist(), *next_P.tolist()]])
print(sum(link_slots.stats.cache_hits.values()))
"""


@pytest.fixture(scope="module")
def read_only(tmp_path_factory):
    """A copy of the package that cannot be written, and what a process sees that may write nothing but the temporary folder."""
    with read_only_copy(PACKAGE, tmp_path_factory.mktemp("installed"), "home") as root:
        yield root


COMPILING = f"foremoe: {compiled.COMPILING}"


def run(root, temporary, writable):
    """Lines that a fresh process prints which runs a kernel of the package in `root`."""
    home = root / "home"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    environment = {
        **kept,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "TMPDIR": str(temporary),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", REFUSE + RUN_KERNEL, str(writable)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(home.iterdir()) and not list(root.rglob("*.nbi"))
    return done.stdout.splitlines()


def test_a_read_only_installation_caches_in_the_temporary_folder(read_only, tmp_path):
    folder = tmp_path / f"foremoe-{os.getuid()}"
    first, second = (run(read_only, tmp_path, tmp_path) for _ in range(2))
    assert len(first) == 4 and re.search(rf"is cached in {folder}; set NUMBA_CACHE_DIR", first[0])
    assert first[1:] == [COMPILING, "[[0, -1]]", "0"] and second[1:] == ["[[0, -1]]", "1"]
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.rglob("*.nbi"))


def test_where_nothing_can_be_written_it_runs_without_a_cache(read_only, tmp_path):
    lines = run(read_only, tmp_path, tmp_path / "nowhere")
    assert len(lines) == 3 and "so every process compiles again; set NUMBA_CACHE_DIR" in lines[0]
    assert lines[1:] == ["[[0, -1]]", "0"] and not list(tmp_path.rglob("*.nbi"))


# ---- whose folder it is: loading a cached file runs what is in it ----


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path))
    return compiled._own_folder.__wrapped__, tmp_path / f"foremoe-{os.getuid()}"


def test_the_folder_is_made_for_this_user_alone(own_folder):
    find, folder = own_folder
    assert find() == find() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_folder_that_others_can_enter_is_not_trusted(own_folder, mode):
    find, folder = own_folder
    folder.mkdir()
    folder.chmod(mode)
    assert find() is None


def test_neither_is_a_link_or_a_file(own_folder, tmp_path):
    find, folder = own_folder
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert find() is None
    folder.unlink()
    folder.touch(0o700)
    assert find() is None


def test_neither_is_another_users(own_folder, monkeypatch):
    find, folder = own_folder
    folder.mkdir(mode=0o700)
    other = os.getuid() + 1
    monkeypatch.setattr(compiled.os, "getuid", lambda: other)
    folder.rename(folder.with_name(f"foremoe-{other}"))
    assert find() is None


def test_neither_is_one_that_others_may_replace(own_folder, tmp_path):
    find, folder = own_folder
    tmp_path.chmod(0o777)
    assert find() is None
    tmp_path.chmod(0o1777)  # as /tmp is
    assert find() == folder


# ---- what is compiled from what ----


def test_an_edit_renews_what_was_compiled_from_it(tmp_path):
    """Numba alone would go on with the kernel of another folder, the constant and the class that were there at first."""
    shutil.copy(compiled.__file__, tmp_path / "compiled.py")
    for name in ("outer", "inner", "unrelated"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "outer" / "run.py").write_text(
        "import inner.calls\nfrom compiled import kernel\nfrom inner.constants import FACTOR, Kind\n\n\n"
        "@kernel\ndef run(x):\n    return below(x) * FACTOR + Kind.ADDED\n\n\n"
        "@kernel\ndef below(x):\n    return sum([inner.calls.call(y) for y in (x,)])\n"
    )

    def result(call="x + 100", factor=1, added=0, unrelated=""):
        (tmp_path / "inner" / "calls.py").write_text(
            f"from compiled import kernel\n\n\n@kernel\ndef call(x):\n    return {call}\n"
        )
        (tmp_path / "inner" / "constants.py").write_text(
            f"import enum\n\nFACTOR = {factor}\n\n\nclass Kind(enum.IntEnum):\n    ADDED = {added}\n"
        )
        (tmp_path / "unrelated" / "calls.py").write_text(unrelated)
        code = "from outer.run import run; import unrelated.calls; print(run(3), sum(run.stats.cache_hits.values()))"
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
        )
        return [int(word) for word in done.stdout.split()]

    assert result() == [103, 0]
    assert result(unrelated="x = 1") == [103, 1]
    assert result(call="x * 1000") == [3000, 0]
    assert result(call="x * 1000", factor=2) == [6000, 0]
    assert result(call="x * 1000", factor=2, added=5) == [6005, 0]
    assert result(call="x * 1000", factor=2, added=5) == [6005, 1]


def test_an_edit_of_a_named_tuple_renews_what_takes_it(tmp_path):
    """Its class is part of the signature alone: no kernel needs to name it."""
    shutil.copy(compiled.__file__, tmp_path / "compiled.py")
    (tmp_path / "run.py").write_text("from compiled import kernel\n\n\n@kernel\ndef run(pair):\n    return pair.low\n")

    def result(fields, home):
        lines = "".join(f"    {name}: int\n" for name in fields)
        (tmp_path / "first.py").write_text("")
        (tmp_path / f"{home}.py").write_text(f"from typing import NamedTuple\n\n\nclass Pair(NamedTuple):\n{lines}")
        code = (
            f"from run import run; from {home} import Pair; print(run((Pair(low=1, high=2))), sum(run.stats.cache_hits.values()))"
        )
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
        return [int(word) for word in done.stdout.split()]

    assert [result(("low", "high"), "first") for _ in range(2)] == [[1, 0], [1, 1]]
    assert result(("high", "low"), "first") == [1, 0]
    assert result(("high", "low"), "second") == [1, 0]


def test_the_first_compilation_is_told_once(tmp_path):
    """Nothing is said where code comes from the cache, where a caller shows progress, or on further ranks of a machine."""
    (tmp_path / "two.py").write_text(
        "import contextlib, sys\nfrom numba import njit, objmode\n"
        "from foremoe.base.compiled import kernel, watch_compilation\n\n\n"
        "@kernel\ndef one(x):\n    return x + 1\n\n\n@kernel\ndef two(x):\n    return one(x) * 2\n\n\n"
        "def own(x):\n    with objmode(y='int64'):\n        y = int(x)\n    return y\n\n\n"
        "njit(lambda x: x)(1), njit(own)(1)  # a user's own\n"
        "with watch_compilation(print) if sys.argv[1:] else contextlib.nullcontext():\n    two(1), two(1.0)\n"
    )

    def told(cache, *words, **variables):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / cache), "PYTHONPATH": str(PACKAGE.parent)} | variables
        command = [sys.executable, "two.py", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stderr

    assert [told("a"), told("a")] == [f"{COMPILING}\n", ""]
    assert told("b", "watched") == told("c", LOCAL_RANK="1") == ""


def test_every_kernel_of_the_package_has_this_cache():
    plain = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"jit\([^)]*cache=True", path.read_text()) and path.name != "compiled.py"
    ]
    assert plain == []


@njit
def _inner(x):
    return min(x, np.inf)


@njit
def _outer(x):
    return _inner(x) + np.pi


def test_a_module_is_looked_into_for_every_kernel_that_names_it():
    sources = set(compiled._sources(_outer.py_func, set()))
    assert {"_inner: inf = inf", f"_outer: pi = {np.pi}"} < sources


def test_an_inner_kernel_called_from_python_is_plain_python():
    """It has no entry for Python; before and after a kernel has compiled it."""
    fill = compiled.inner_kernel(fill_with)
    out = np.zeros(2)
    fill(out, 1.0)
    njit(lambda out: fill(out, 2.0))(out)
    assert fill.signatures and (out == 2.0).all()
    fill(out, 3.0)
    assert (out == 3.0).all() and len(fill.signatures) == 1


def fill_with(out, value):
    for i in range(out.size):
        out[i] = value
