"""Ranks that are kept for all tests of a session, forked from a process that has imported what each of them needs."""

import contextlib
import multiprocessing
import os
from pathlib import Path
from unittest.mock import patch

from foremoe.testing.ranks import RankPool


class Pools:
    """A pool per number of ranks."""

    def __init__(self, stack):
        self._stack, self._pools = stack, {}

    def run(self, fn, *args, num_ranks=4, **options):
        """See `RankPool.run`."""
        pool = self._pools.get(num_ranks)
        if pool is None or pool.unusable:
            pool = self._pools[num_ranks] = self._stack.enter_context(RankPool(num_ranks))
        return pool.run(fn, *args, **options)


@contextlib.contextmanager
def forked_from(file):
    """Gives `Pools`; ranks of this process, these and others, are forked from one that has imported a module.

    Args:
        file: Of the module.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        from multiprocessing import forkserver

        # No effect if other tests have started the server already; each rank then imports for itself.
        multiprocessing.get_context("forkserver").set_forkserver_preload([Path(file).stem])
        folders = [str(Path(file).parent), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        with contextlib.suppress(OSError), patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(folders)}):
            forkserver.ensure_running()
    with contextlib.ExitStack() as stack:
        yield Pools(stack)
