"""A long run: processes with little memory judge inputs by their numbers; what dies or hangs is counted and passed over."""

from __future__ import annotations

import math
import multiprocessing
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fuzz_loaders import LOADERS, judge

# Seconds of an input are of the processor, so that a busy machine changes nothing; a process that says nothing is ended.
MEGABYTES, SECONDS, SILENT_S = 256, 10, 120
_NAMES = list(LOADERS)


class TooLong(BaseException):
    """An input that is judged for too long."""


def input_of(seed: int, number: int, only: str | None = None) -> tuple[str, bytes]:
    """Loader and bytes of an input: a function of these numbers."""
    name = only or _NAMES[number % len(_NAMES)]
    rng = Random(f"{seed} {number}")
    return name, LOADERS[name].change(rng)


def warm(folder: Path) -> None:
    """Compiles and imports what valid inputs need; they must load."""
    for name, loader in LOADERS.items():
        assert judge(name, folder / f"valid{loader.suffix}", loader.valid()) == "loaded", name
        for number in range(200):
            judge_quietly(name, folder / f"warm{loader.suffix}", input_of(-1, number, name)[1])


def judge_quietly(name: str, path: Path, data: bytes) -> str:
    """`judge`, with anything unforeseen as a text."""
    try:
        with np.errstate(all="ignore"):
            return judge(name, path, data)
    except (Exception, TooLong) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {str(error)[:120]}"


def work(seed: int, only: str | None, numbers: range, at: Any, results: Any) -> None:
    """Judges these inputs; `at` is the one under way."""

    def end(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, end)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + MEGABYTES * 2**20
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        counts: Counter[tuple[str, str]] = Counter()
        foreign = []
        for number in numbers:
            at.value = number
            name, data = input_of(seed, number, only)
            # Four bytes for every one of the file, and a fixed sum.
            resource.setrlimit(resource.RLIMIT_AS, (room + 4 * len(data), resource.RLIM_INFINITY))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            verdict = judge_quietly(name, Path(folder, f"input{LOADERS[name].suffix}"), data)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if verdict not in ("loaded", "refused"):
                foreign.append((number, name, verdict))
                verdict = "foreign"
            counts[name, verdict] += 1
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    results.send((counts, foreign, grown / 1024))


def run(
    inputs: int,
    seed: int = 0,
    jobs: int = 1,
    only: str | None = None,
    first: int = 0,
    batch: int = 5000,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """Judges inputs `first` to `first + inputs`, as far as they are begun within these seconds; figures of the run."""
    with tempfile.TemporaryDirectory() as folder:
        warm(Path(folder))
    fork, begin_s = multiprocessing.get_context("fork"), time.monotonic()
    waiting = [range(low, min(low + batch, first + inputs)) for low in range(first, first + inputs, batch)][::-1]
    counts: Counter[tuple[str, str]] = Counter()
    foreign: list[tuple[int, str, str]] = []
    kills: list[tuple[int, str]] = []
    peak_mb, running = 0.0, []
    while waiting or running:
        if time.monotonic() - begin_s > seconds:
            waiting.clear()
        while waiting and len(running) < jobs:
            numbers, at = waiting.pop(), fork.Value("q", -1)
            here, there = fork.Pipe(duplex=False)
            process = fork.Process(target=work, args=(seed, only, numbers, at, there))
            process.start()
            there.close()
            running.append([process, here, numbers, at, (-1, time.monotonic())])
        time.sleep(0.02)
        for job in list(running):
            process, here, numbers, at, seen = job
            if at.value != seen[0]:
                job[4] = seen = (at.value, time.monotonic())
            done = here.poll()
            if not done and process.is_alive() and time.monotonic() - seen[1] < SILENT_S:
                continue
            running.remove(job)
            try:
                found = here.recv() if done else None
            except EOFError:
                found = None
            if found is None:
                # It died, or hangs where no signal reaches it: this input is passed over, those before it are judged again.
                process.kill()
                if at.value < 0:
                    raise RuntimeError("a process died before its first input")
                kills.append((at.value, only or _NAMES[at.value % len(_NAMES)]))
                waiting += [part for part in (range(at.value + 1, numbers.stop), range(numbers.start, at.value)) if len(part)]
            else:
                counts += found[0]
                foreign += found[1]
                peak_mb = max(peak_mb, found[2])
            process.join()
    return {
        "inputs": sum(counts.values()) + len(kills), "counts": counts, "foreign": foreign, "kills": kills, "peak_mb": peak_mb,
        "seconds": time.monotonic() - begin_s, "jobs": jobs,
    }  # fmt: skip


def report(figures: dict[str, Any]) -> str:
    """The figures as a table and sentences, in markdown."""
    lines = ["| loader | loaded | refused | foreign exceptions | kills |", "| --- | ---: | ---: | ---: | ---: |"]
    for name in _NAMES:
        its = [figures["counts"][name, verdict] for verdict in ("loaded", "refused", "foreign")]
        its.append(sum(other == name for _, other in figures["kills"]))
        lines.append(f"| {name} | {' | '.join(f'{number:,}' for number in its)} |")
    lines += ["", *(f"* foreign: input {number}, {name}: {what}" for number, name, what in figures["foreign"][:40])]
    lines += [f"* killed: input {number}, {name}" for number, name in figures["kills"][:40]]
    ends = f"{len(figures['foreign'])} foreign exceptions, {len(figures['kills'])} kills"
    took = f"{figures['inputs']:,} inputs in {figures['seconds']:,.0f} s by {figures['jobs']} processes: {ends}"
    limit = f"what an input may map is {MEGABYTES} MB and 4 times the file more than its process has before"
    lines.append(f"{took}. Memory grew by {figures['peak_mb']:.0f} MB at most over a process ({limit}).")
    return "\n".join(lines)
