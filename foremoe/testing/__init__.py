"""What authors of solvers and backends test with: strategies, conformance suites and the reference executor.

Names are loaded on first use: the reference executor needs no hypothesis, the suites need hypothesis and pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foremoe.base.lazy import lazy

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

_NAMES = {
    "level_tests": ("HomeSolverTests", "PackSolverTests", "SplitSolverTests"),
    "pasteable": ("describe", "evaluate"),
    "ranks": ("RankPool", "get_pool", "run_processes", "run_threads"),
    "reference": ("ReferenceResult", "dense_reference", "run_reference"),
    "samples": ("plan_of", "random_placement", "random_sources"),
    "solver_tests": ("SolverTests",),
    "strategies": ("clusters", "models", "placements", "plans", "problems", "schedules"),
    "transfer_tests": ("TransferTests",),
}
__all__ = [
    "HomeSolverTests", "PackSolverTests", "RankPool", "ReferenceResult", "SolverTests", "SplitSolverTests", "TransferTests",
    "clusters", "dense_reference", "describe", "evaluate", "get_pool", "models", "placements", "plan_of", "plans", "problems",
    "random_placement", "random_sources", "run_processes", "run_reference", "run_threads", "schedules",
]  # fmt: skip

__getattr__, __dir__ = lazy(__name__, _NAMES)
