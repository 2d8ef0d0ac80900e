"""Ranks for all tests of the adapter: processes that have imported Megatron-Core once, before they were forked."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import ran


class Skipped(pytest.Module):
    """A module that is not even imported."""

    def collect(self):
        pytest.skip("megatron-core is not installed; make test-megatron installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Nothing of this folder can be imported without Megatron-Core."""
    return None if find_spec("megatron") else Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=True)
def pool():
    """Ranks of their own: Megatron-Core on CPU changes a process for good. Also for tests that do not ask for it: ranks that they
    start themselves would each import Megatron-Core, and so would all later ones."""
    from pools import forked_from

    with forked_from(Path(__file__).with_name("loaded_once.py")) as pools:
        yield pools


def pytest_terminal_summary(terminalreporter, config):
    """Writes what ran, if a file is named for it; processes that run a part of it write nothing."""
    if not hasattr(config, "workerinput"):
        ran.write(terminalreporter.stats)
