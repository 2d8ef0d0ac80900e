"""CPU seconds of every test, its processes included: ``CPU_TIMES=1 python -m pytest`` ends with the ten heaviest.

With a folder in place of 1, the seconds of all tests go into a file there, too.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COLLECTION = "(collection)"
spent: Counter[str] = Counter()  # of this process; where there are workers, at the end of all of them


def cpu_s(pid: int | str = "self") -> float:
    """User and system seconds of a process, of children that it has waited for, and of those that live, with theirs."""
    try:
        # After the name, which may hold anything: utime, stime, cutime and cstime are the 12th to 15th.
        ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        below = {child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()}
    except OSError:  # it has just ended, or there is no /proc
        return sum(os.times()[:4]) if pid == "self" else 0.0
    return ticks / os.sysconf("SC_CLK_TCK") + sum(cpu_s(child) for child in below)


def timed(name: str) -> Iterator[None]:
    begin_s = cpu_s()
    yield
    spent[name] += max(0.0, cpu_s() - begin_s)  # what a child that nobody waits for has spent is lost with it


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    yield from timed(COLLECTION)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    yield from timed(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_s"] = dict(spent)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    spent.update(getattr(node, "workeroutput", {}).get("cpu_s", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests = Counter({name: seconds for name, seconds in spent.items() if name != COLLECTION})
    files: Counter[str] = Counter()
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    folder = Path(os.environ.get("CPU_TIMES", ""))
    if folder.is_absolute():
        (folder / f"{uuid.uuid4()}.json").write_text(json.dumps(dict(tests)))
    write = terminalreporter.write_line
    terminalreporter.section("CPU seconds, with those of started processes")
    write(f"{spent.total():8.1f}  in all, {spent[COLLECTION]:.1f} of them collection")
    for title, counted in (("tests", tests), ("files", files)):
        write(f"the ten heaviest {title}:")
        for name, seconds in counted.most_common(10):
            write(f"{seconds:8.1f}  {name}")
