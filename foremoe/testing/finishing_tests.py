"""Conformance suite for solvers of the path level. Subclass it like `SolverTests`."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st

from foremoe.levels import PathSolver
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.planner.answers import linked
from foremoe.problem.problem import Problem
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import plan_of, random_placement
from foremoe.testing.solver_tests import corner, law, require_value
from foremoe.testing.strategies import problems

# Letters: C copies.


class PathSolverTests:
    """Tests of the laws of `PathSolver`: copies stay the same, links match ranks, sources hold the expert, and `solve` is pure.

    Attributes:
        solver: Solver to test.
        limits: Options for `problems` that limit sizes, for solvers that are too slow for the default sizes.
    """

    solver: ClassVar[PathSolver]
    limits: ClassVar[dict[str, Any]] = {}

    def plans(self, data: st.DataObject, **options: Any) -> tuple[Problem, Plan]:
        """Draws a problem and a plan for this problem. The plan has copies if redundant slots are filled."""
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
        require_value(self.solver)
