"""Conformance suite for rank-level solvers. Subclass it in a test file and set the solver. pytest then checks the laws.

::

    class TestMine(foremoe.testing.SolverTests):
        solver = Mine(min_pairs=64)

If a test fails, it prints a sentence about the law that was broken. It also prints the problem as an expression that can be
pasted (see `describe`).
"""

import dataclasses
import threading
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from foremoe.base.parallel import row_runner
from foremoe.levels import A_SOLVER, RankSolver
from foremoe.problem.laws import placement_violations
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers.base import RowSolver
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import many_row_problem, random_placement, with_quotas
from foremoe.testing.strategies import placements, problems

# Letters: N rows, G ranks, S slots per rank, L layers, E experts.

# A test method runs in every subclass of the suite, which hypothesis would otherwise report.
law = settings(deadline=None, suppress_health_check=list(HealthCheck))
# For special cases that a law's general test also covers, so fewer examples are enough.
corner = settings(law, max_examples=max(10, law.max_examples // 5))
CLOSE = 1.0 + 1e-9  # costs are sums of floats
_PURE = "let solve keep nothing between calls and seed its random numbers (deterministic = False is only for time limits)"


class SolverTests:
    """Tests of the laws of `RankSolver`.

    Results must be valid and deterministic, and bounds must be correct. Inputs must not be changed. Unusual loads must be
    accepted.

    Attributes:
        solver: Solver to test.
        limits: Options for `problems` that limit sizes, for solvers that are too slow for the default sizes.
        many_rows: Number of rows of the problem that is solved with several numbers of threads. A block has 256 rows. 0 skips
            this test.
    """

    solver: ClassVar[RankSolver]
    limits: ClassVar[dict[str, Any]] = {}
    many_rows: ClassVar[int] = 600

    def __init_subclass__(cls) -> None:
        solver = getattr(cls, "solver", None)
        if solver is not None and not isinstance(solver, RankSolver):
            pytest.fail(f"{cls.__name__}: {solver!r} is {type(solver).__name__}, not a RankSolver; {A_SOLVER}.", pytrace=False)

    @pytest.fixture(autouse=True)
    def _needs_its_modules(self) -> None:
        for name in self.solver.requires:
            pytest.importorskip(name, reason=f"{self.solver!r} needs {name}")

    def problems(self, **options: Any) -> st.SearchStrategy[Problem]:
        """Draws valid inputs of a rank-level solver, which are problems with at least two ranks and one redundant slot."""
        usual = {"min_ranks": 2, "max_ranks": 5, "max_base": 3, "min_redundant": 1, "max_micro_steps": 2, "max_layers": 3}
        return problems(**{**usual, **self.limits, **options})

    def solve(self, problem: Problem, start: Placement | None = None) -> Placement:
        """Returns the solver's placement for `problem`, with quotas, after checking that the placement is valid."""
        __tracebackhide__ = True
        note(describe(problem))
        placement = self.solver.solve(problem, problem.static() if start is None else start)
        placement = with_quotas(problem, placement, self.solver.keeps_homes)
        broken = placement_violations(problem, placement, keeps_homes=self.solver.keeps_homes)
        assert not broken, f"{self.solver!r} returned an invalid placement: {broken[0]}"
        return placement

    @law
    @given(st.data())
    def test_placements_are_valid_from_any_start(self, data: st.DataObject) -> None:
        problem = data.draw(self.problems())
        self.solve(problem)
        self.solve(problem, data.draw(placements(problem)))

    @corner
    @given(st.data())
    def test_rows_without_load_are_valid(self, data: st.DataObject) -> None:
        placement = self.solve(data.draw(self.problems(row_kinds=("zero", "sparse"))))
        assert placement.quotas_NGS.min() >= 0

    @corner
    @given(st.data())
    def test_one_expert_with_all_load_is_valid(self, data: st.DataObject) -> None:
        self.solve(data.draw(self.problems(row_kinds=("one",))))

    @corner
    @given(st.data())
    def test_replicas_stay_in_their_node_where_asked(self, data: st.DataObject) -> None:
        self.solve(data.draw(self.problems(replicas=("node",), row_kinds=("skewed", "one", "flat"))))

    @corner
    @given(st.data())
    def test_several_redundant_slots_are_valid(self, data: st.DataObject) -> None:
        self.solve(data.draw(self.problems(min_redundant=2, max_redundant=4, row_kinds=("skewed", "one"))))

    @law
    @given(st.data())
    def test_the_same_input_gives_the_same_bytes_and_is_left_unchanged(self, data: st.DataObject) -> None:
        problem = data.draw(self.problems())
        note(describe(problem))
        start = data.draw(placements(problem))
        before = describe(problem), start.expert_NGS.tobytes(), start.quotas_NGS.tobytes()
        first = self.solver.solve(problem, start)
        after = describe(problem), start.expert_NGS.tobytes(), start.quotas_NGS.tobytes()
        assert before == after, f"{self.solver!r} wrote to arrays of the problem or of the start; copy them first."
        if self.solver.deterministic:
            same = first.same_as(self.solver.solve(problem, start))
            assert same, f"{self.solver!r} gave two results for one input; {_PURE}."

    def test_any_number_of_threads_gives_the_same_bytes(self) -> None:
        if not self.solver.deterministic:
            pytest.skip(f"{self.solver!r} does not claim to be deterministic")
        if self.many_rows == 0:
            pytest.skip("many_rows = 0: too slow for several blocks of rows")
        problem = many_row_problem(self.many_rows)
        results = []
        for num_threads in (1, 2, 5):
            with row_runner(num_threads):
                results.append(self.solver.solve(problem, problem.static()))
        same = all(results[0].same_as(other) for other in results[1:])
        assert same, f"{self.solver!r} gives another result with more threads; rows must not share state."

    @law
    @given(st.data())
    def test_bounds_hold_and_rows_called_optimal_are_not_beaten(self, data: st.DataObject) -> None:
        problem = data.draw(self.problems())
        note(describe(problem))
        placement = self.solver.solve(problem, problem.static())
        stop_N = np.full(problem.N, Stop.DONE) if placement.stop_N is None else placement.stop_N
        unknown = set(stop_N.tolist()) - {int(stop) for stop in Stop}
        assert not unknown, f"{self.solver!r} returned stop codes {sorted(unknown)}, which `Stop` does not have."
        bound_N = np.full(problem.N, -np.inf) if placement.bound_N is None else placement.bound_N
        if not self.solver.keeps_homes or not ((bound_N > -np.inf).any() or Stop.OPTIMAL in stop_N):
            return
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        mine = with_quotas(problem, placement, True)
        mine_N = row_objective(problem, mine)
        # Under the time objective, a proof holds up to the solver's own tolerance.
        slack = 1.0 + 1e-5 if problem.cost.objective == "time" else 1.0
        others = [random_placement(problem, rng), *(random_placement(problem, rng, evenness=20.0) for _ in range(3))]
        for other in (mine, problem.static(), *others):
            other_N = row_objective(problem, other)
            over = np.flatnonzero(bound_N > other_N * CLOSE)
            assert not over.size, (
                f"{self.solver!r} claims that row {over[0]} costs at least {bound_N[over[0]]}, "
                f"but a valid placement costs {other_N[over[0]]}."
            )
            beaten = np.flatnonzero((stop_N == Stop.OPTIMAL) & (mine_N > other_N * slack))
            assert not beaten.size, (
                f"{self.solver!r} calls row {beaten[0]} optimal at {mine_N[beaten[0]]}, "
                f"but a valid placement costs {other_N[beaten[0]]}."
            )

    @corner
    @given(st.data())
    def test_a_cancelled_solve_is_still_valid(self, data: st.DataObject) -> None:
        problem = data.draw(self.problems())
        cancel = threading.Event()
        cancel.set()
        with row_runner(1, cancel=cancel):
            self.solve(problem)

    @law
    @given(st.data())
    def test_plain_python_equals_compiled(self, data: st.DataObject) -> None:
        if not isinstance(self.solver, RowSolver) or not self.solver.compiled:
            pytest.skip("not a compiled RowSolver")
        problem = data.draw(self.problems(max_micro_steps=1))
        note(describe(problem))
        plain = plain_python(self.solver).solve(problem, problem.static())
        same = plain.same_as(self.solver.solve(problem, problem.static()))
        assert same, f"{self.solver!r} gives another result in plain Python than compiled; look for integer or float widths."

    def test_is_a_value(self) -> None:
        assert type(self.solver).__name__ in repr(self.solver) or "(" in repr(self.solver)
        require_value(self.solver)


def require_value(solver: Any) -> None:
    """Fails the test unless a solver can be hashed and equals a copy of itself."""
    __tracebackhide__ = True
    try:
        hash(solver)
    except TypeError as error:
        cure = "keep numbers, text and tuples in its fields, and state in local variables of `solve`"
        pytest.fail(f"{solver!r} is not a value ({error}); {cure} (docs/extending.md).", pytrace=False)
    if dataclasses.is_dataclass(solver):
        copy: Any = dataclasses.replace(solver)  # type: ignore[type-var]
        assert copy == solver, f"{solver!r} does not equal a copy of itself; a solver is its configuration."


def plain_python(solver: RowSolver) -> RowSolver:
    """Returns a row solver with the same configuration that the Python interpreter runs without compiling."""
    edit: Any = solver.edit
    body = {"edit": staticmethod(getattr(edit, "py_func", edit)), "compiled": False}
    plain = type(f"Plain{type(solver).__name__}", (type(solver),), body)
    fields: Any = dataclasses.fields(solver) if dataclasses.is_dataclass(solver) else ()
    made: RowSolver = plain(**{field.name: getattr(solver, field.name) for field in fields if field.init})
    return made
