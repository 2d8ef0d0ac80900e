"""What authors of solvers and backends test with: strategies, conformance suites and the reference executor.

Names are loaded on first use: the reference executor needs no hypothesis, the suites need hypothesis and pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foremoe.testing.level_tests import HomeSolverTests as HomeSolverTests
    from foremoe.testing.level_tests import PackSolverTests as PackSolverTests
    from foremoe.testing.level_tests import SplitSolverTests as SplitSolverTests
    from foremoe.testing.pasteable import describe as describe
    from foremoe.testing.pasteable import evaluate as evaluate
    from foremoe.testing.ranks import RankPool as RankPool
    from foremoe.testing.ranks import get_pool as get_pool
    from foremoe.testing.ranks import run_processes as run_processes
    from foremoe.testing.ranks import run_threads as run_threads
    from foremoe.testing.reference import ReferenceResult as ReferenceResult
    from foremoe.testing.reference import dense_reference as dense_reference
    from foremoe.testing.reference import run_reference as run_reference
    from foremoe.testing.samples import plan_of as plan_of
    from foremoe.testing.samples import random_placement as random_placement
    from foremoe.testing.samples import random_sources as random_sources
    from foremoe.testing.solver_tests import SolverTests as SolverTests
    from foremoe.testing.strategies import clusters as clusters
    from foremoe.testing.strategies import models as models
    from foremoe.testing.strategies import placements as placements
    from foremoe.testing.strategies import plans as plans
    from foremoe.testing.strategies import problems as problems
    from foremoe.testing.strategies import schedules as schedules
    from foremoe.testing.transfer_tests import TransferTests as TransferTests

_HOME = {
    "HomeSolverTests": "level_tests", "PackSolverTests": "level_tests", "RankPool": "ranks", "ReferenceResult": "reference",
    "SolverTests": "solver_tests", "SplitSolverTests": "level_tests", "TransferTests": "transfer_tests",
    "clusters": "strategies", "dense_reference": "reference", "describe": "pasteable", "evaluate": "pasteable",
    "get_pool": "ranks", "models": "strategies", "placements": "strategies", "plan_of": "samples", "plans": "strategies",
    "problems": "strategies", "random_placement": "samples", "random_sources": "samples", "run_processes": "ranks",
    "run_reference": "reference", "run_threads": "ranks", "schedules": "strategies",
}  # fmt: skip

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"foremoe.testing.{_HOME[name]}"), name)
    raise AttributeError(f"module 'foremoe.testing' has no attribute {name!r}")
