"""CPU seconds of every test, its children included: ``python -m pytest -p tests.cpu_times`` ends with the ten heaviest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

COLLECTION = "(collection)"
spent: Counter[str] = Counter()  # of this process; where there are workers, at the end of all of them


def cpu_s() -> float:
    """User and system seconds of this process and of children that it has waited for."""
    return sum(os.times()[:4])


def timed(name: str) -> Iterator[None]:
    begin_s = cpu_s()
    yield
    spent[name] += cpu_s() - begin_s


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
    write = terminalreporter.write_line
    terminalreporter.section("CPU seconds, children included")
    write(f"{spent.total():8.1f}  in all, {spent[COLLECTION]:.1f} of them collection")
    for title, counted in (("tests", tests), ("files", files)):
        write(f"the ten heaviest {title}:")
        for name, seconds in counted.most_common(10):
            write(f"{seconds:8.1f}  {name}")
