"""A kernel cache that is damaged or cannot be written: every kernel still runs, and the next process finds a whole cache."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from test_compiled import COMPILING

import foremoe
from foremoe.base import compiled

AGAIN = "so the next process compiles it again; set NUMBA_CACHE_DIR to a folder of your own."
UNSAVED = "compiled code cannot be saved in {} ({}), " + AGAIN


def twice(x):
    return x + x


def thrice(x):
    return x + x + x


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty folder for kernels, of a process that has not warned yet."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_unsaved", [])
    compiled._warn.cache_clear()
    return tmp_path


def run(*arguments):
    """How often the disk answered, when a fresh kernel was called with each of these."""
    fresh = compiled.kernel(twice)
    for x in arguments:
        np.testing.assert_array_equal(fresh(x), x + x)
    return sum(fresh.stats.cache_hits.values())


def files(cache, suffix):
    return sorted(cache.rglob(f"*{suffix}"))


def cut(length):
    return lambda path: path.write_bytes(path.read_bytes()[:length])


def overwritten(where, value=None):
    def damage(path):
        data = bytearray(path.read_bytes())
        at = int(where * len(data))
        part = slice(at, at + 64)
        data[part] = bytes(len(data[part])) if value is None else bytes(b ^ value for b in data[part])
        path.write_bytes(data)

    return damage


def link_to_nothing(path):
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


DAMAGES = {
    "empty": cut(0), "one byte": cut(1), "cut in its check sum": cut(20), "cut early": cut(100), "cut at its end": cut(-1),
    "zeros": lambda path: path.write_bytes(bytes(len(path.read_bytes()))),
    "zeros in the middle": overwritten(0.5), "zeros at the end": overwritten(0.95),
    "a bit flipped at the start": overwritten(0.0, 1), "a bit flipped in the middle": overwritten(0.5, 4),
    "a bit flipped near the end": overwritten(0.9, 32),
    "another pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
    "more behind it": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "gone": Path.unlink, "a link to nothing": link_to_nothing,
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_entry_is_compiled_again_and_written_whole(cache, caplog, damage, suffix):
    assert run(1.0) == 0 and run(1.0) == 1
    (path,) = files(cache, suffix)
    damage(path)
    assert run(1.0) == 0
    assert run(1.0) == 1 and not caplog.records


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_folder_in_the_place_of_a_file(cache, caplog, suffix):
    run(1.0)
    (path,) = files(cache, suffix)
    path.unlink()
    path.mkdir()
    assert run(1.0) == 0 and run(1.0) == 0
    assert [record.getMessage() for record in caplog.records] == [UNSAVED.format(path.parent, "Is a directory")]


def test_code_of_another_signature_or_version_is_not_run(cache):
    """A disk that was full between the two files leaves an index that names the code of something else."""
    array = np.arange(3.0)
    run(1.0, array)
    first, second = files(cache, ".nbc")
    of_array = second.read_bytes()
    first.write_bytes(of_array)
    assert run(1.0) == 0 and run(1.0, array) == 2
    version = pickle.loads(of_array[32:])[0]
    second.write_bytes(sealed(("older", *pickle.loads(of_array[32:])[1:])))
    assert version != "older" and run(array) == 0 and run(array) == 1


def sealed(value):
    data = pickle.dumps(value)
    return hashlib.sha256(data).digest() + data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("place", ["ensure_cache_path", "_save_index", "_save_data"])
def test_what_cannot_be_saved_runs_and_one_line_says_so(cache, caplog, monkeypatch, number, place):
    def fail(*_):
        raise OSError(number, os.strerror(number), "file")

    fresh, other = compiled.kernel(twice), compiled.kernel(thrice)
    owner = fresh._cache._impl.locator if place == "ensure_cache_path" else fresh._cache._cache_file
    monkeypatch.setattr(type(owner), place, fail)
    assert (fresh(1.0), fresh(1), other(1)) == (2.0, 2, 3)
    assert [record.getMessage() for record in caplog.records] == [UNSAVED.format(fresh._cache.cache_path, os.strerror(number))]


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 64 KB with no room left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only root may mount a file system here")
    try:
        with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def command(*words, cache):
    """What a command prints, with its kernels in `cache`."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, "-m", "foremoe", *words], env=environment, capture_output=True, text=True)


def test_a_command_on_a_full_disk_then_with_a_cache_that_is_damaged_as_a_whole(full_disk, tmp_path):
    trace, cache = tmp_path / "trace.npz", tmp_path / "kernels"
    topk_TLK = np.array([[[0, 3]], [[1, 3]], [[0, 2]]], np.uint8)
    foremoe.RoutingTrace(topk_TLK=topk_TLK, num_experts=4, seq_len_Q=np.array([2, 1])).save(trace)
    fresh = command("inspect", str(trace), cache=cache)
    compiling = f"{COMPILING}\n"
    assert fresh.returncode == 0 and fresh.stderr == compiling and files(cache, ".nbi")
    full = command("inspect", str(trace), cache=full_disk)
    assert (full.returncode, full.stdout) == (0, fresh.stdout)
    assert full.stderr.startswith(compiling) and full.stderr.count("\n") == 2
    assert "No space left on device" in full.stderr and "NUMBA_CACHE_DIR" in full.stderr
    for path in (*files(cache, ".nbi"), *files(cache, ".nbc")):
        path.write_bytes(bytes(len(path.read_bytes())))
    found = command("inspect", str(trace), cache=cache)
    assert (found.returncode, found.stdout, found.stderr) == (0, fresh.stdout, compiling)


def test_processes_that_find_the_same_damage_all_go_on(tmp_path):
    """Each replaces the entry by one rename; whichever comes last, the entry is whole."""
    (tmp_path / "run.py").write_text("from foremoe.base.compiled import kernel\n\n\n@kernel\ndef run(x):\n    return x + x\n")
    code = "import sys; from run import run; sys.stdin.readline(); print(run(1.5), sum(run.stats.cache_hits.values()))"
    cache = tmp_path / "kernels"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}

    def together(num):
        start = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, **start) for _ in range(num)]
        return [process.communicate("\n") for process in processes]

    assert together(1) == [("3.0 0\n", f"{COMPILING}\n")]
    for suffix in (".nbi", ".nbc"):
        for path in files(cache, suffix):
            path.write_bytes(path.read_bytes()[:50])
    assert {out.split()[0] for out, _ in together(3)} == {"3.0"} and together(1) == [("3.0 1\n", "")]
