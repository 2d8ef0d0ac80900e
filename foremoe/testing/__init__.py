"""Test tools for authors of solvers and backends: strategies, conformance suites and groups of ranks.

Names are loaded on first use, because the suites need hypothesis and pytest, and ranks need torch.
"""

from typing import TYPE_CHECKING

from foremoe.base.lazy import lazy

if TYPE_CHECKING:
    from foremoe.testing.finishing_tests import PathSolverTests
    from foremoe.testing.level_tests import HomeSolverTests, PackSolverTests, SplitSolverTests
    from foremoe.testing.pasteable import describe
    from foremoe.testing.ranks import RankDied, RankPool, get_pool, run_processes, run_threads
    from foremoe.testing.samples import plan_of, random_placement, random_sources
    from foremoe.testing.solver_tests import SolverTests
    from foremoe.testing.strategies import clusters, models, placements, plans, problems, schedules
    from foremoe.testing.transfer_tests import TransferTests

_NAMES = {
    "finishing_tests": ("PathSolverTests",),
    "level_tests": ("HomeSolverTests", "PackSolverTests", "SplitSolverTests"),
    "pasteable": ("describe",),
    "ranks": ("RankDied", "RankPool", "get_pool", "run_processes", "run_threads"),
    "samples": ("plan_of", "random_placement", "random_sources"),
    "solver_tests": ("SolverTests",),
    "strategies": ("clusters", "models", "placements", "plans", "problems", "schedules"),
    "transfer_tests": ("TransferTests",),
}
__all__ = [
    "HomeSolverTests", "PackSolverTests", "PathSolverTests", "RankDied", "RankPool",
    "SolverTests", "SplitSolverTests", "TransferTests", "clusters", "describe", "get_pool",
    "models", "placements", "plan_of", "plans", "problems", "random_placement", "random_sources", "run_processes",
    "run_threads", "schedules",
]  # fmt: skip

__getattr__, __dir__ = lazy(__name__, _NAMES)
