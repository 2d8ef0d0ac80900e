"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE: dev (default), ci, nightly; the order of files; kernels that have run."""

import functools
import inspect
import multiprocessing
import os
import sys

# Tests run side by side; threads of torch that wait for a core which another worker has take its time, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, settings
from numba.extending import is_jitted

from foremoe.base import compiled

# Which test compiles first depends on the cache, and tests read the log. `test_compiled` looks at processes of its own.
compiled._CLOCK.told = True

# A first example may compile a kernel, and a problem is drawn from many small choices: neither is a fault.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

settings.register_profile("dev", max_examples=50, **COMMON)
# The same examples every time, so more of them would find something once; `nightly` draws others.
settings.register_profile("ci", max_examples=50, derandomize=True, **COMMON)
settings.register_profile("nightly", max_examples=2000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

if os.environ.get("CPU_TIMES"):
    pytest_plugins = ["cpu_times"]

# Ranks are forked from a process that has imported what functions of tests need. Each would import it in a CPU second of its own.
IN_RANKS = ("pytest", "hypothesis", "numba", "foremoe.testing.strategies", "foremoe.runtime", "foremoe.transfer")

if "forkserver" in multiprocessing.get_all_start_methods():
    from multiprocessing import forkserver

    def preload(names, first=forkserver.set_forkserver_preload):
        first([*names, *IN_RANKS])

    forkserver.set_forkserver_preload = preload

# Before click 8.2 a runner gives the two streams as one unless it is asked not to.
if "mix_stderr" in inspect.signature(CliRunner.__init__).parameters:
    CliRunner.__init__ = functools.partialmethod(CliRunner.__init__, mix_stderr=False)

# Files with most seconds first: no core is left with a long file at the end. `test_conformance` runs all solvers, and what it
# compiles beyond the warm-up is there when other files come to it.
LONGEST = (
    "test_conformance.py", "test_published.py", "test_equality.py", "test_laws.py", "test_replay.py", "test_planner_laws.py",
    "test_bench_gpu.py", "test_planted_faults.py", "test_measure.py", "test_demo.py",
    "test_third_party.py", "test_cli_compare.py", "test_refusals.py", "test_readme.py", "test_simulate.py",
    "test_compiled.py", "test_reference.py", "test_split.py", "test_transitions.py", "test_fields.py", "test_exact.py",
    "test_tutorial.py", "test_fall_back.py", "test_extending.py",
    "test_megatron_layouts.py", "test_megatron_flex.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def kernels_used() -> set[str]:
    """Kernels of the package that have run in this process, which loads or compiles them."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.startswith("foremoe.")]
    return {
        f"{name}.{key}"
        for name, module in modules
        for key, its in list(vars(module).items())
        if is_jitted(its) and its.signatures
    }


USED = pytest.StashKey[set[str]]()


def pytest_collection_finish(session):
    session.config.stash[USED] = kernels_used()


@pytest.fixture
def used_kernels(pytestconfig):
    """Kernels that had run when tests were collected, and a function that names those which have run by now."""
    return pytestconfig.stash[USED], kernels_used
