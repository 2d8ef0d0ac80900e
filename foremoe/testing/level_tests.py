"""Conformance suites of split- and home-level solvers; used like `SolverTests`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from foremoe.arrays import Array
from foremoe.parallel import row_runner
from foremoe.problem import Problem
from foremoe.solvers.base import HomeSolver, SplitSolver
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import many_row_problem, random_placement
from foremoe.testing.solver_tests import law
from foremoe.testing.strategies import placements, problems

# Letters: N rows, G ranks, S slots per rank, L layers, E experts.


class SplitSolverTests:
    """Laws of `SplitSolver`: quotas sum to the load, wherever replicas (or re-placed homes) lie.

    Attributes:
        solver: the instance under test.
        optimal: it promises the smallest possible largest rank load for the given replicas.
    """

    solver: ClassVar[SplitSolver]
    optimal: ClassVar[bool] = False

    def split(self, problem: Problem, expert_NGS: Array) -> Array:
        """The solver's quotas, after checking them."""
        before = expert_NGS.tobytes()
        quota_NGS = self.solver.solve(problem, expert_NGS)
        assert expert_NGS.tobytes() == before, f"{self.solver!r} wrote to expert_NGS."
        assert quota_NGS.shape == expert_NGS.shape and quota_NGS.dtype == np.int32
        assert quota_NGS.min() >= 0, f"{self.solver!r} returned a negative quota."
        assert not quota_NGS[expert_NGS < 0].any(), f"{self.solver!r} gave an empty slot a quota."
        for n in range(problem.N):
            served_E = np.bincount(expert_NGS[n][expert_NGS[n] >= 0], quota_NGS[n][expert_NGS[n] >= 0], problem.E)
            wrong = np.flatnonzero(served_E != problem.load_NE[n])
            assert not wrong.size, (
                f"{self.solver!r} serves {served_E[wrong[0]]:.0f} of {problem.load_NE[n, wrong[0]]} pairs of expert {wrong[0]} "
                f"in row {n}."
            )
        return quota_NGS

    @law
    @given(st.data())
    def test_quotas_sum_to_the_load(self, data: st.DataObject) -> None:
        problem = data.draw(problems())
        note(describe(problem))
        self.split(problem, data.draw(placements(problem)).expert_NGS)

    @law
    @given(st.data())
    def test_experts_may_lie_anywhere(self, data: st.DataObject) -> None:
        problem = data.draw(problems())
        note(describe(problem))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        expert_NGS = random_placement(problem, rng).expert_NGS
        # Homes re-placed at will, as Eplb does: whole ranks change places.
        self.split(problem, np.ascontiguousarray(expert_NGS[:, rng.permutation(problem.G)]))

    @law
    @given(st.data())
    def test_the_same_input_gives_the_same_bytes(self, data: st.DataObject) -> None:
        problem = data.draw(problems())
        note(describe(problem))
        expert_NGS = data.draw(placements(problem)).expert_NGS
        first, second = self.solver.solve(problem, expert_NGS), self.solver.solve(problem, expert_NGS)
        assert first.tobytes() == second.tobytes(), f"{self.solver!r} gave two results for one input."

    def test_any_number_of_threads_gives_the_same_bytes(self) -> None:
        problem = many_row_problem(600)
        expert_NGS = random_placement(problem, np.random.default_rng(0)).expert_NGS
        results = []
        for num_threads in (1, 2, 5):
            with row_runner(num_threads):
                results.append(self.solver.solve(problem, expert_NGS).tobytes())
        assert len(set(results)) == 1, f"{self.solver!r} gives another result with more threads; rows must not share state."

    @law
    @given(st.data())
    def test_no_other_split_is_better_where_promised(self, data: st.DataObject) -> None:
        if not self.optimal:
            pytest.skip("makes no promise on the largest rank load")
        problem = data.draw(problems())
        note(describe(problem))
        placement = data.draw(placements(problem))
        mine_N = self.split(problem, placement.expert_NGS).sum(axis=2).max(axis=1)
        worse = np.flatnonzero(mine_N > placement.load_NG().max(axis=1))
        assert not worse.size, f"{self.solver!r} reaches {mine_N[worse[0]]} in row {worse[0]}; a random split is better."


class HomeSolverTests:
    """Laws of `HomeSolver`: a permutation for every layer, pure and deterministic."""

    solver: ClassVar[HomeSolver]

    @law
    @given(st.data())
    def test_homes_are_a_permutation_of_every_layer(self, data: st.DataObject) -> None:
        problem = data.draw(problems(max_ranks=5))
        note(describe(problem))
        before = describe(problem)
        home_LE = self.solver.solve(problem)
        assert describe(problem) == before, f"{self.solver!r} wrote to arrays of the problem."
        assert home_LE.shape == (problem.L, problem.E) and home_LE.dtype == np.int32
        right = np.sort(home_LE, axis=1) == np.arange(problem.E)
        assert right.all(), f"{self.solver!r} gave layer {int((~right.all(axis=1)).argmax())} no permutation of the home slots."
        dataclasses.replace(problem, home_LE=home_LE).static()

    @law
    @given(st.data())
    def test_the_same_input_gives_the_same_bytes(self, data: st.DataObject) -> None:
        problem = data.draw(problems(max_ranks=5))
        note(describe(problem))
        first, second = self.solver.solve(problem), self.solver.solve(problem)
        assert first.tobytes() == second.tobytes(), f"{self.solver!r} gave two results for one input."
