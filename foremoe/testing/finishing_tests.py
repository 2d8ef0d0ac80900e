"""Conformance suites of the levels that finish a plan, order and path; used like `SolverTests`."""

import dataclasses
import threading
from typing import Any, ClassVar

import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st

from foremoe.base.parallel import row_runner
from foremoe.levels import OrderSolver, PathSolver
from foremoe.plan.cost_in_order import sequence_cost, transfers_in_order
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.planner.answers import linked, order_of
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.slots import ResidentSlots
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import many_row_problem, plan_of, random_placement
from foremoe.testing.solver_tests import CLOSE, corner, law
from foremoe.testing.strategies import placements, problems

# Letters: M micro-steps, C copies.


class PathSolverTests:
    """Laws of `PathSolver`: the same copies, links that lead there, sources that have the expert; pure and deterministic.

    Attributes:
        solver: The instance under test.
        limits: Narrower options for `problems`, for solvers too slow for the default sizes.
    """

    solver: ClassVar[PathSolver]
    limits: ClassVar[dict[str, Any]] = {}

    def plans(self, data: st.DataObject, **options: Any) -> tuple[Problem, Plan]:
        """A problem and a plan of it, which copies if redundant slots are filled."""
        usual = {"min_ranks": 2, "min_redundant": 1, "max_micro_steps": 3, "row_kinds": ("flat", "skewed", "sparse")}
        problem = data.draw(problems(**{**usual, **self.limits, **options}))
        note(describe(problem))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        placement = random_placement(problem, rng, density=data.draw(st.sampled_from([0.5, 1.0])), evenness=20.0)
        return problem, plan_of(problem, placement)

    @law
    @given(st.data())
    def test_links_lead_there_and_sources_have_the_expert(self, data: st.DataObject) -> None:
        problem, plan = self.plans(data)
        broken = linked(plan, self.solver, problem).violations(problem)
        assert not broken, f"{self.solver!r} returned invalid copies: {broken[0]}"

    @corner
    @given(st.data())
    def test_a_cluster_without_host_stores_copies_between_ranks(self, data: st.DataObject) -> None:
        problem, plan = self.plans(data)
        cluster = dataclasses.replace(problem.cluster, host_bytes_per_s=0.0)
        problem, header = dataclasses.replace(problem, cluster=cluster), dataclasses.replace(plan.header, cluster=cluster)
        linked(dataclasses.replace(plan, header=header), self.solver, problem)

    @law
    @given(st.data())
    def test_the_same_input_gives_the_same_bytes_and_is_left_unchanged(self, data: st.DataObject) -> None:
        problem, plan = self.plans(data)
        before = describe(problem), [getattr(plan.transfers, name).tobytes() for name in TransferList.array_fields()]
        first, second = (self.solver.solve(problem, plan.transfers) for _ in range(2))
        after = describe(problem), [getattr(plan.transfers, name).tobytes() for name in TransferList.array_fields()]
        assert before == after, f"{self.solver!r} wrote to arrays of the problem or of the copies; copy them first."
        assert first.same_as(second), f"{self.solver!r} gave two results for one input."

    @corner
    @given(st.data())
    def test_a_plan_without_copies_stays_one(self, data: st.DataObject) -> None:
        problem, _ = self.plans(data)
        found = self.solver.solve(problem, TransferList.none())
        assert len(found) == 0, f"{self.solver!r} made {len(found)} copies of none."

    def test_is_a_value(self) -> None:
        _require_value(self.solver)


class OrderSolverTests:
    """Laws of `OrderSolver`: a permutation and a valid placement; pure and deterministic.

    Attributes:
        solver: The instance under test.
        never_worse: It promises that its sequence costs no more, as its weights are sent, than what it was given.
        limits: Narrower options for `problems`, for solvers too slow for the default sizes.
    """

    solver: ClassVar[OrderSolver]
    never_worse: ClassVar[bool] = True
    limits: ClassVar[dict[str, Any]] = {}

    def problems(self, **options: Any) -> st.SearchStrategy[Problem]:
        """Problems that an order solver may be called with: resident slots, and the objective ``"time"``."""
        usual = {"min_ranks": 2, "max_ranks": 4, "max_base": 2, "min_redundant": 1, "max_redundant": 2, "slots": ResidentSlots()}
        timed = problems(**{**usual, **self.limits, **options})
        return timed.map(lambda problem: dataclasses.replace(problem, cost=CostModel(overlap=problem.cost.overlap)))

    def solve(self, problem: Problem, placement: Placement) -> tuple[np.ndarray[Any, Any], Placement]:
        """The solver's order and placement, after checking them."""
        return order_of(self.solver, problem, placement, keeps_homes=True)

    @law
    @given(st.data())
    def test_the_order_is_a_permutation_and_placements_are_valid(self, data: st.DataObject) -> None:
        problem = data.draw(self.problems())
        note(describe(problem))
        given_ = data.draw(placements(problem))
        order_M, found = self.solve(problem, given_)
        if self.never_worse:
            before_s = _sent_s(problem, given_, np.arange(problem.M, dtype=np.int32))
            after_s = _sent_s(problem, found, order_M)
            assert after_s <= before_s * CLOSE, f"{self.solver!r} made a sequence of {before_s:.6g} s one of {after_s:.6g} s."

    @law
    @given(st.data())
    def test_the_same_input_gives_the_same_bytes_and_is_left_unchanged(self, data: st.DataObject) -> None:
        problem = data.draw(self.problems())
        note(describe(problem))
        given_ = data.draw(placements(problem))
        before = describe(problem), given_.expert_NGS.tobytes(), given_.quotas_NGS.tobytes()
        (first_M, first), (second_M, second) = (self.solve(problem, given_) for _ in range(2))
        after = describe(problem), given_.expert_NGS.tobytes(), given_.quotas_NGS.tobytes()
        assert before == after, f"{self.solver!r} wrote to arrays of the problem or of the placement; copy them first."
        assert np.array_equal(first_M, second_M) and first.same_as(second), f"{self.solver!r} gave two results for one input."

    @corner
    @given(st.data())
    def test_a_cancelled_solve_is_still_valid(self, data: st.DataObject) -> None:
        problem = data.draw(self.problems())
        note(describe(problem))
        cancel = threading.Event()
        cancel.set()
        with row_runner(1, cancel=cancel):
            self.solve(problem, data.draw(placements(problem)))

    def test_any_number_of_threads_gives_the_same_bytes(self) -> None:
        problem = dataclasses.replace(many_row_problem(60), slots=ResidentSlots(), cost=CostModel())
        placement, results = random_placement(problem, np.random.default_rng(0)), []
        for num_threads in (1, 2, 5):
            with row_runner(num_threads):
                order_M, found = self.solve(problem, placement)
            results.append((order_M.tobytes(), found.expert_NGS.tobytes(), found.quotas_NGS.tobytes()))
        assert len(set(results)) == 1, f"{self.solver!r} gives another result with more threads."

    def test_is_a_value(self) -> None:
        _require_value(self.solver)


def _sent_s(problem: Problem, placement: Placement, order_M: np.ndarray[Any, Any]) -> float:
    return float(sequence_cost(problem, placement, transfers_in_order(problem, placement, order_M)).total_s.sum())


def _require_value(solver: Any) -> None:
    assert hash(solver) == hash(solver)
    if dataclasses.is_dataclass(solver):
        copy: Any = dataclasses.replace(solver)  # type: ignore[type-var]
        assert copy == solver, f"{solver!r} does not equal a copy of itself; a solver is its configuration."
