"""The soak sees what grows."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.soak import SHARED, grown, soak
from foremoe.testing.ranks import run_threads

kept: list[object] = []
ended = threading.Event()


def keeps_nothing() -> None:
    pass


def keeps_memory() -> None:
    # Pages of its own: a block of the heap may lie where tests before this one have left resident memory.
    memory = mmap.mmap(-1, 2**21)
    memory.write(os.urandom(2**21))
    kept.append(memory)


def keeps_files() -> None:
    kept.append(os.open(os.devnull, os.O_RDONLY))


def keeps_threads() -> None:
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    kept.append(thread)


def keeps_names() -> None:
    path = SHARED / f"foremoe-{os.getpid()}-{len(kept)}"
    path.touch()
    kept.append(path)


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (keeps_nothing, []),
        (keeps_memory, ["resident memory"]),
        (keeps_files, ["files"]),
        (keeps_threads, ["threads"]),
        (keeps_names, ["names"]),
    ],
)
def test_what_grows_is_named(act: Callable[[], None], what: list[str]) -> None:
    if act is keeps_names and not SHARED.is_dir():
        pytest.skip("this system has no /dev/shm")

    def part(_: object) -> Iterator[int]:
        while True:
            act()
            yield 1

    ended.clear()
    try:
        (seen,) = run_threads(soak, 1, part, 40, frozenset())
        # Tests beside this one show names of theirs for as long as ranks open a store.
        assert len(seen) == 3 and [name for name in grown(seen) if name in what or name != "names"] == what
    finally:
        ended.set()
        for thing in kept:
            if isinstance(thing, Path):
                thing.unlink()
            elif isinstance(thing, int):
                os.close(thing)
        kept.clear()
