"""Conformance suites for solvers of the levels split, home and pack. Subclass them like `SolverTests`."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.parallel import row_runner
from foremoe.levels import HomeSolver, PackSolver, SplitSolver
from foremoe.problem.laws import placement_violations
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import many_row_problem, random_placement
from foremoe.testing.solver_tests import law
from foremoe.testing.strategies import placements, problems
from foremoe.workload.packing import AsGiven

# Letters: N rows, G ranks, S slots per rank, L layers, E experts, T tokens, K top-k, Q sequences.


class SplitSolverTests:
    """Tests of the laws of `SplitSolver`: quotas sum to the load, wherever replicas and re-placed homes are.

    Attributes:
        solver: Solver to test.
        optimal: Whether the solver guarantees the smallest maximum rank load for the given replicas.
    """

    solver: ClassVar[SplitSolver]
    optimal: ClassVar[bool] = False

    def split(self, problem: Problem, expert_NGS: Array) -> Array:
        """Returns the solver's quotas after checking that they are valid."""
        __tracebackhide__ = True
        before = expert_NGS.tobytes()
        quota_NGS = self.solver.solve(problem, expert_NGS)
        assert expert_NGS.tobytes() == before, f"{self.solver!r} wrote to expert_NGS."
        assert quota_NGS.shape == expert_NGS.shape and quota_NGS.dtype == np.int32
        placement = Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)
        broken = placement_violations(problem, placement, keeps_homes=False)
        assert not broken, f"{self.solver!r} returned invalid quotas: {broken[0]}"
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
        # Homes may be re-placed, as in Eplb. Here, whole ranks are exchanged.
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
            pytest.skip("the solver does not guarantee the largest rank load")
        problem = data.draw(problems())
        note(describe(problem))
        placement = data.draw(placements(problem))
        mine_N = self.split(problem, placement.expert_NGS).sum(axis=2).max(axis=1)
        worse = np.flatnonzero(mine_N > placement.load_NG().max(axis=1))
        assert not worse.size, f"{self.solver!r} reaches {mine_N[worse[0]]} in row {worse[0]}; a random split is better."


class HomeSolverTests:
    """Tests that a `HomeSolver` is pure and deterministic, and returns a permutation of the experts for every layer."""

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
        layer = int(right.all(axis=1).argmin())
        assert right.all(), f"{self.solver!r} gave layer {layer} homes that are not a permutation of the home slots."
        dataclasses.replace(problem, home_LE=home_LE).static()

    @law
    @given(st.data())
    def test_the_same_input_gives_the_same_bytes(self, data: st.DataObject) -> None:
        problem = data.draw(problems(max_ranks=5))
        note(describe(problem))
        first, second = self.solver.solve(problem), self.solver.solve(problem)
        assert first.tobytes() == second.tobytes(), f"{self.solver!r} gave two results for one input."


@dataclasses.dataclass(frozen=True)
class Batch:
    """Input of a pack solver. The repr of a batch can be pasted as an expression."""

    seq_len_Q: list[int]
    group_Q: list[int]
    num_ranks: int
    tokens_per_rank: int
    num_experts: int
    num_layers: int
    unknown: bool
    seed: int

    def trace(self) -> RoutingTrace:
        """Returns a trace with these sequences. Every sequence prefers some experts, which depend on `seed`."""
        rng = np.random.default_rng(self.seed)
        num_topk = min(2, self.num_experts)
        bias_QLE = 3.0 * rng.random((len(self.seq_len_Q), self.num_layers, self.num_experts))
        noise_TLE = rng.gumbel(size=(sum(self.seq_len_Q), self.num_layers, self.num_experts))
        topk_TLK = np.argsort(-(np.repeat(bias_QLE, self.seq_len_Q, axis=0) + noise_TLE), axis=2)[..., :num_topk]
        known_T = rng.random(len(topk_TLK)) < 0.7 if self.unknown else None
        return RoutingTrace(topk_TLK=topk_TLK, num_experts=self.num_experts, seq_len_Q=np.array(self.seq_len_Q), known_T=known_T)

    def pack(self, solver: PackSolver, trace: RoutingTrace | None = None) -> tuple[Array, Array]:
        """Calls the solver with this batch and returns its result."""
        return solver.solve(
            trace or self.trace(), num_ranks=self.num_ranks, tokens_per_rank=self.tokens_per_rank,
            sample_group_Q=np.array(self.group_Q), seed=self.seed,
        )  # fmt: skip


@st.composite
def batches(draw: st.DrawFn, *, max_sequences: int = 24, max_groups: int = 3) -> Batch:
    """Draws batches of sequences with equal and different lengths. Some sequences are longer than a whole micro-step."""
    longest = draw(st.sampled_from([1, 6, 20]))
    seq_len_Q = draw(st.lists(st.integers(1, longest), min_size=1, max_size=max_sequences))
    groups = st.lists(st.integers(0, max_groups - 1), min_size=len(seq_len_Q), max_size=len(seq_len_Q))
    num_ranks = draw(st.integers(1, 4))
    return Batch(
        seq_len_Q=seq_len_Q, group_Q=sorted(draw(groups)), num_ranks=num_ranks, tokens_per_rank=draw(st.integers(1, 16)),
        num_experts=draw(st.sampled_from([num_ranks, 2 * num_ranks, 7])), num_layers=draw(st.integers(1, 3)),
        unknown=draw(st.booleans()), seed=draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip


class PackSolverTests:
    """Tests that a `PackSolver` assigns every sequence once, respects limits and groups, and is pure and deterministic.

    Attributes:
        solver: Solver to test.
        few_micro_steps: Whether the solver never needs more micro-steps than `AsGiven`.
    """

    solver: ClassVar[PackSolver]
    few_micro_steps: ClassVar[bool] = True

    @law
    @given(batch=batches())
    def test_packings_are_valid(self, batch: Batch) -> None:
        """Checks that every sequence is assigned and groups are not mixed, and checks the size and number of micro-steps."""
        micro_step_Q, rank_Q = batch.pack(self.solver)
        for name, array in (("micro_step_Q", micro_step_Q), ("rank_Q", rank_Q)):
            assert array.shape == (len(batch.seq_len_Q),) and array.dtype == np.int32, f"{name} must be int32 [Q]."
        assert rank_Q.min() >= 0 and rank_Q.max() < batch.num_ranks, f"{self.solver!r} names a rank that does not exist."
        used = np.unique(micro_step_Q)
        assert (used == np.arange(len(used))).all(), f"{self.solver!r} numbers micro-steps {used.tolist()}; leave no gaps."
        budget = batch.num_ranks * batch.tokens_per_rank
        for m in used:
            held_Q = np.flatnonzero(micro_step_Q == m)
            groups, num_tokens = {batch.group_Q[q] for q in held_Q}, sum(batch.seq_len_Q[q] for q in held_Q)
            assert len(groups) == 1, f"{self.solver!r} mixes groups {sorted(groups)} in micro-step {m}."
            put = f"{num_tokens} tokens in {len(held_Q)} sequences into micro-step {m}"
            assert num_tokens <= budget or len(held_Q) == 1, f"{self.solver!r} puts {put}; budget {budget}."
        if self.few_micro_steps:
            given_ = int(batch.pack(AsGiven())[0].max()) + 1
            assert len(used) <= given_, f"{self.solver!r} needs {len(used)} micro-steps where file order needs {given_}."

    @law
    @given(batch=batches())
    def test_the_same_input_gives_the_same_bytes(self, batch: Batch) -> None:
        trace, results = batch.trace(), set()
        before = trace.content_hash()
        for num_threads in (1, 2, 1):
            with row_runner(num_threads):
                results.add(tuple(array.tobytes() for array in batch.pack(self.solver, trace)))
        assert len(results) == 1, f"{self.solver!r} gave {len(results)} results for one input."
        assert trace.content_hash() == before, f"{self.solver!r} wrote to the trace."

    def test_bad_limits_and_groups_are_refused(self) -> None:
        batch = Batch([3, 2], [0, 0], 2, 4, 4, 1, False, 0)
        for wrong in ({"num_ranks": 0}, {"tokens_per_rank": 0}, {"group_Q": [1, 0]}, {"group_Q": [0]}):
            with pytest.raises(InputError):
                dataclasses.replace(batch, **wrong).pack(self.solver)  # type: ignore[arg-type]
