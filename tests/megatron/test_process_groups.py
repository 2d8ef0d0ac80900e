"""Many layouts after each other on the same ranks: what this folder's other tests are."""

import os
from pathlib import Path

import pytest
from program import Layout, Program


def open_files(_group, layout):
    """After a step of a program; what the program before it had open is to be closed."""
    program = Program(layout)
    program.forward_backward(0, program.routing(0))
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_programs_close_the_process_groups_of_those_before_them(pool):
    """A process has 1024 files on many machines, a layout about 90; gloo waits without an end for one that is refused."""
    counts = [max(pool.run(open_files, Layout(ep=ep, recompute="block"), num_ranks=2)) for ep in (1, 2) * 4]
    assert max(counts[2:]) <= max(counts[:2]) + 20
