"""Every built-in solver passes the conformance suite of its level, and the suite catches solvers that break a law."""

import ctypes
import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty
from profiles import examples

import foremoe.solvers
from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, PlanError
from foremoe.plan.transfers import TransferList
from foremoe.planner.strategies import resolve
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers import HomeSolver, PathSolver, RankSolver, RowSolver, SplitSolver
from foremoe.testing import HomeSolverTests, PathSolverTests, SolverTests, SplitSolverTests
from foremoe.testing.samples import many_row_problem

# Exact takes milliseconds a row where the others take microseconds, and proves loads alone.
OPTIONS: dict[str, dict[str, Any]] = {
    "Exact": {
        "limits": {
            "max_ranks": 3,
            "max_base": 2,
            "max_redundant": 2,
            "max_layers": 1,
            "max_pairs": 12,
            "objectives": ("balance",),
        },
        "many_rows": 0,
    },
    "ExactSplit": {"optimal": True},
}
SUITES: dict[type, type] = {
    RankSolver: SolverTests, SplitSolver: SplitSolverTests, HomeSolver: HomeSolverTests, PathSolver: PathSolverTests,
}  # fmt: skip
# tests/solvers compares each of these with its rule written plainly, on as many examples as the profile has.
WITH_A_RULE = ("Echo", "Eplb", "Feplb", "Greedy", "LeastLoaded", "Lplb", "MoonEp", "Quota", "Static")


def on_few(suite: type) -> type:
    """The suite with 15 examples of every law."""

    def with_few(law: Any) -> Any:
        def run(self: Any, data: st.DataObject) -> None:
            law.hypothesis.inner_test(self, data)

        few = settings(examples(15), suppress_health_check=list(HealthCheck))
        return few(given(data=st.data())(run))

    laws = {name: law for name, law in vars(suite).items() if hasattr(law, "hypothesis")}
    return type(suite.__name__, (suite,), {name: with_few(law) for name, law in laws.items()})


FEW = on_few(SolverTests)

for _name in foremoe.solvers.__all__:
    _found = getattr(foremoe.solvers, _name)
    for _interface, _suite in SUITES.items():
        if issubclass(_found, _interface) and not _found.__abstractmethods__:
            _of = FEW if _name in WITH_A_RULE else _suite
            globals()[f"Test{_name}"] = type(f"Test{_name}", (_of,), {"solver": _found(), **OPTIONS.get(_name, {})})


def with_quota(start: Placement, quota_NGS: Array, **fields: Any) -> Placement:
    return Placement(expert_NGS=start.expert_NGS, quota_NGS=quota_NGS, **fields)


@dataclasses.dataclass(frozen=True)
class LosesTokens(RankSolver):
    def solve(self, problem: Problem, start: Placement) -> Placement:
        return with_quota(start, np.maximum(start.quotas_NGS - 1, 0))


@dataclasses.dataclass(frozen=True)
class WritesToItsInput(RankSolver):
    def solve(self, problem: Problem, start: Placement) -> Placement:
        ctypes.memset(start.quotas_NGS.ctypes.data, 7, start.quotas_NGS.nbytes)  # as compiled code could
        return start


@dataclasses.dataclass(frozen=True)
class Remembers(RankSolver):
    calls: ClassVar[list[int]] = []

    def solve(self, problem: Problem, start: Placement) -> Placement:
        self.calls.append(1)
        return with_quota(start, start.quotas_NGS, bound_N=np.full(problem.N, -float(len(self.calls))))


@dataclasses.dataclass(frozen=True)
class BoastsOfBounds(RankSolver):
    def solve(self, problem: Problem, start: Placement) -> Placement:
        return with_quota(start, start.quotas_NGS, bound_N=row_objective(problem, start) + 1.0)


@dataclasses.dataclass(frozen=True)
class CallsAnythingOptimal(RankSolver):
    def solve(self, problem: Problem, start: Placement) -> Placement:
        return with_quota(start, start.quotas_NGS, stop_N=np.full(problem.N, Stop.OPTIMAL))


@dataclasses.dataclass(frozen=True)
class OverflowsInPython(RowSolver):
    @staticmethod
    def edit(load_E: Array, node_G: Array, num_base: int, options: Any, expert_GS: Array, quota_GS: Array) -> None:
        # numpy multiplies int32 as int32, compiled code as int64.
        if load_E.max() * 40_000_000 > 0:
            quota_GS[0, 0] = 0


@dataclasses.dataclass(frozen=True)
class ServesNothing(SplitSolver):
    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        return np.zeros(expert_NGS.shape, np.int32)


@dataclasses.dataclass(frozen=True)
class SendsAllHome(HomeSolver):
    def solve(self, problem: Problem) -> Array:
        return np.zeros((problem.L, problem.E), np.int32)


@dataclasses.dataclass(frozen=True)
class AllFromRankZero(PathSolver):
    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        return transfers.replace(src_C=np.zeros(len(transfers), np.int16))


@dataclasses.dataclass(frozen=True)
class LeavesOneOut(PathSolver):
    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        return transfers.cut(C=np.arange(len(transfers)) > 0)


class NoSubclass:
    def solve(self, problem: Problem, start: Placement) -> Placement:
        return start


@dataclasses.dataclass(frozen=True)
class KeepsADict(RankSolver):
    seen: dict[int, int] = dataclasses.field(default_factory=dict)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        return start


def test_one_sentence_says_what_a_solver_is() -> None:
    cure = r"subclass foremoe\.levels\.RankSolver as a frozen dataclass \(docs/extending\.md\)\."
    with pytest.raises(pytest.fail.Exception, match=f"NoSubclass, not a RankSolver; {cure}"):
        type("TestBroken", (SolverTests,), {"solver": NoSubclass()})
    with pytest.raises(InputError, match=f"per-row function; {cure}"):
        resolve(f"{__name__}:NoSubclass()")
    with pytest.raises(pytest.fail.Exception, match=r"is not a value .* state in local variables of `solve`"):
        type("TestBroken", (SolverTests,), {"solver": KeepsADict()})().test_is_a_value()


def test_a_report_names_a_drawn_problem_in_one_line() -> None:
    problem = many_row_problem(4)
    assert pretty(problem) == repr(problem) and len(repr(problem)) < 150


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(
    ("suite", "solver", "test", "sentence"),
    [
        (SolverTests, LosesTokens(), "test_placements_are_valid_from_any_start", "quotas must sum to the load"),
        (SolverTests, WritesToItsInput(), "test_the_same_input_gives_the_same_bytes_and_is_left_unchanged", "copy them first"),
        (SolverTests, OverflowsInPython(), "test_plain_python_equals_compiled", "plain Python than compiled"),
        (SolverTests, Remembers(), "test_the_same_input_gives_the_same_bytes_and_is_left_unchanged", "two results for one input"),
        (SolverTests, Remembers(), "test_any_number_of_threads_gives_the_same_bytes", "more threads"),
        (SolverTests, BoastsOfBounds(), "test_bounds_hold_and_rows_called_optimal_are_not_beaten", "costs at least"),
        (SolverTests, CallsAnythingOptimal(), "test_bounds_hold_and_rows_called_optimal_are_not_beaten", "optimal at"),
        (SplitSolverTests, ServesNothing(), "test_quotas_sum_to_the_load", "quotas must sum to the load"),
        (PathSolverTests, AllFromRankZero(), "test_links_lead_there_and_sources_have_the_expert", "residency"),
        (PathSolverTests, LeavesOneOut(), "test_links_lead_there_and_sources_have_the_expert", "src_C; it changed"),
        (HomeSolverTests, SendsAllHome(), "test_homes_are_a_permutation_of_every_layer", "not a permutation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_suite_catches_a_broken_solver(suite: type, solver: Any, test: str, sentence: str) -> None:
    mine = type("TestBroken", (suite,), {"solver": solver})()
    run = getattr(mine, test)
    if hasattr(run, "hypothesis"):
        inner = run.hypothesis.inner_test
        # The first failure will do: shrinking it takes seconds.
        run = settings(phases=(Phase.generate,), database=None, max_examples=200)(
            given(st.data())(lambda data: inner(mine, data))
        )
    with pytest.raises((AssertionError, PlanError), match=sentence) as caught:
        run()
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    assert "threads" in test or "Problem(" in notes, "the failing problem is printed to paste"
