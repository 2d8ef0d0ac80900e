"""Ranks for all tests of the adapter: processes that have imported Megatron-Core once, before they were forked."""

import contextlib
import multiprocessing
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from foremoe.testing.ranks import RankPool


class Pools:
    """Ranks that are kept for all tests, a pool per number of ranks."""

    def __init__(self, stack):
        self._stack, self._pools = stack, {}

    def run(self, fn, *args, num_ranks=4, **options):
        """See `RankPool.run`."""
        pool = self._pools.get(num_ranks)
        if pool is None or pool.unusable:
            pool = self._pools[num_ranks] = self._stack.enter_context(RankPool(num_ranks))
        return pool.run(fn, *args, **options)


@pytest.fixture(scope="session")
def pool():
    """Ranks of their own: Megatron-Core on CPU changes a process for good."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        _load_once()
    with contextlib.ExitStack() as stack:
        yield Pools(stack)


def _load_once():
    from multiprocessing import forkserver

    # No effect if other tests have started the server already; each rank then imports for itself.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["loaded_once"])
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with contextlib.suppress(OSError), patch.dict(os.environ, {"PYTHONPATH": paths}):
        forkserver.ensure_running()
