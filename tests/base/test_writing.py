"""Everything that foremoe writes replaces the old file at once or leaves it: with other writers, full disks and planted links."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import foremoe
from foremoe.base.errors import InputError
from foremoe.cli.jsonio import emit, require_writable
from foremoe.cli.main import main
from foremoe.plan.plan import Plan
from foremoe.problem.problem import Problem
from foremoe.report import write_report
from foremoe.routing.trace import RoutingTrace
from foremoe.workload import Workload

MODEL = foremoe.Model.preset("mixtral-8x7b")


@functools.cache
def a_trace() -> RoutingTrace:
    return RoutingTrace(topk_TLK=np.zeros((40, 2, 1), np.uint8), num_experts=8, seq_len_Q=[40])


@functools.cache
def a_workload() -> Workload:
    return Workload.from_trace(a_trace(), num_ranks=4, tokens_per_rank=10)


@pytest.fixture(scope="module")
def planned() -> tuple[Problem, Plan]:
    work = Workload.from_counts(np.ones((1, 2, 4, 8), np.int32), num_topk=2, model=MODEL.name)
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=4), redundant=1)
    return problem, foremoe.Planner(rank=()).plan(problem)[0]


@pytest.fixture(params=["plan", "npz", "safetensors", "workload", "model", "cluster", "report", "json"])
def write(request, planned):
    """Writes one kind of file to a path; and the suffix it wants."""
    problem, plan = planned
    return {
        "plan": (plan.save, ""), "workload": (a_workload().save, ""), "npz": (a_trace().save, ".npz"),
        "safetensors": (a_trace().save, ".safetensors"),
        "model": (MODEL.to_toml, ".toml"), "cluster": (problem.cluster.to_toml, ".toml"),
        "report": (lambda path: write_report(path, problem, plan), ".html"),
        "json": (lambda path: emit(str(path), {"a": [1] * 10_000}, []), ".json"),
    }[request.param]  # fmt: skip


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt("No space left")])
def test_what_ends_it_half_way_leaves_the_old_file(write, tmp_path, monkeypatch, error):
    save, suffix = write
    path = tmp_path / f"kept{suffix}"
    path.write_bytes(b"old and good")

    def fails(*_: object) -> None:
        raise error

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched, pytest.raises((InputError, KeyboardInterrupt), match="No space left"):
            patched.setattr(os, name, fails)
            save(path)
        assert path.read_bytes() == b"old and good" and os.listdir(tmp_path) == [path.name]


def test_a_file_system_that_is_full_leaves_the_old_file(write, tmp_path):
    """The real thing: a limit on the size of files that the process may write."""
    save, suffix = write
    path = tmp_path / f"kept{suffix}"
    path.write_bytes(b"old and good")
    child = os.fork()
    if child == 0:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        code = 1
        try:
            save(path)
        except InputError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes() == b"old and good" and os.listdir(tmp_path) == [path.name]


def test_planted_links_and_names_are_not_followed(write, tmp_path):
    save, suffix = write
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    path = tmp_path / f"new{suffix}"
    path.with_name(path.name + ".part").symlink_to(victim)
    save(path)
    assert victim.read_bytes() == b"untouched" and path.stat().st_size > 9
    link = tmp_path / f"link{suffix}"
    link.symlink_to(victim)
    save(link)
    assert victim.read_bytes() == b"untouched" and not link.is_symlink()


def test_permissions_are_those_of_the_old_file_or_of_the_process(write, tmp_path):
    save, suffix = write
    path, before = tmp_path / f"p{suffix}", os.umask(0o027)
    try:
        save(path)
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o604)
        save(path)
        assert path.stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)


def test_devices_and_pipes_are_written_to(tmp_path):
    MODEL.to_toml("/dev/null")
    assert not Path("/dev/null").is_file()
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    MODEL.to_toml(tmp_path / "pipe")
    reader.join()
    assert b"mixtral" in read[0]


def repeated(work: Workload, path: str, barrier, failures) -> None:
    barrier.wait()
    for _ in range(40):
        try:
            work.save(path)
            Workload.load(path)
        except Exception as error:
            failures.put(repr(error))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_six_writers_of_one_path_all_succeed(kind, tmp_path):
    fork = multiprocessing.get_context("fork")
    path, barrier, failures = str(tmp_path / "shared"), fork.Barrier(6), fork.SimpleQueue()
    runs = [
        (threading.Thread if kind == "threads" else fork.Process)(target=repeated, args=(a_workload(), path, barrier, failures))
        for _ in range(6)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert failures.empty(), failures.get()
    assert Workload.load(path).same_as(a_workload()) and os.listdir(tmp_path) == ["shared"]


def test_a_folder_that_is_closed_is_refused_before_work(tmp_path, monkeypatch):
    (tmp_path / "open.json").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(InputError, match="permission denied"):
        require_writable({"the JSON file": str(tmp_path / "open.json")})


def test_json_of_commands_is_what_was_asked_for(tmp_path):
    MODEL.to_toml(tmp_path / "m.toml")
    a_workload().save(tmp_path / "w")
    found = CliRunner().invoke(main, ["inspect", str(tmp_path / "w"), f"--json={tmp_path / 'w.json'}"])
    assert found.exit_code == 0 and json.loads((tmp_path / "w.json").read_text())["kind"] == "workload"
