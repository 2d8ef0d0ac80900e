"""Memory of a rank: every part on a case computed by hand, activations against a plain loop, and the verdict."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import foremoe
from foremoe.problem import Fit, Phase, Placement, fit, rank_memory
from foremoe.problem.memory import activation_peak, pair_activation_bytes, staging_bytes, token_activation_bytes
from foremoe.problem.problem import Problem
from foremoe.testing import describe, placements, problems

MODEL = foremoe.Model(
    name="toy", num_layers=2, first_moe_layer=0, num_experts=4, num_topk=1, hidden_size=10, ffn_size=5, attention_params=300,
    num_heads=2, qk_head_dim=3, v_head_dim=4, vocab_size=7, source="made up",
)  # fmt: skip
EXPERT_PARAMS = 3 * 10 * 5
PAIR_BYTES = 2 * (2 * 10 + 3 * 5)
TOKEN_BYTES = 2 * (4 * 10 + 2 * (3 + 4))


def two_ranks(**changes: object) -> Problem:
    """Two micro-steps, two layers, two ranks with 100 tokens each; all pairs of expert 0, whose home is rank 0."""
    load_MLGE = np.zeros((2, 2, 2, 4), np.int64)
    load_MLGE[:, :, :, 0] = 100
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=1)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=2)
    given = {"slot_depth": 3, **changes}
    return dataclasses.replace(foremoe.Problem.of(work, cluster, model=MODEL), **given)


def halved(problem: Problem) -> Placement:
    """Rank 1 serves half of expert 0's pairs."""
    static = problem.static()
    expert_NGS, quota_NGS = static.expert_NGS.copy(), static.quotas_NGS.copy()
    expert_NGS[:, 1, -1], quota_NGS[:, 1, -1], quota_NGS[:, 0, 0] = 0, 100, 100
    return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)


def test_every_part_of_a_case_by_hand() -> None:
    problem = two_ranks()
    found = rank_memory(problem, halved(problem))
    experts, dense = 2 * 2 * EXPERT_PARAMS, 2 * 300 + 2 * 7 * 10  # embedding and head: both ends of the model are here
    assert found.weights == 2 * (experts + dense)
    assert found.gradients == 4 * (experts + dense)
    assert found.optimizer == 12 * experts + 12 * dense // 2  # what both ranks have they share
    assert found.slots == 3 * (2 + 4) * EXPERT_PARAMS
    assert found.staging_G.tolist() == [3 * 4 * EXPERT_PARAMS, 0]  # two rows in flight, and the next
    assert found.activations_G.tolist() == [2 * (100 * PAIR_BYTES + 100 * TOKEN_BYTES)] * 2  # both layers of one micro-step
    fixed = found.weights + found.gradients + found.optimizer + found.slots
    assert found.peak_G.tolist() == (fixed + found.staging_G + found.activations_G).tolist()
    assert sum(found.parts().values()) == found.peak_G.max()


def test_groups_that_train_together_share_the_optimizer() -> None:
    problem = two_ranks()
    experts, dense = 2 * 2 * EXPERT_PARAMS, 2 * 300 + 2 * 7 * 10
    trainer = foremoe.Trainer(data_parallel=4, optimizer_bytes=8)
    assert rank_memory(problem, halved(problem), trainer=trainer).optimizer == 8 * experts // 4 + 8 * dense // 8
    away = foremoe.Trainer(optimizer_bytes=0)
    assert rank_memory(problem, halved(problem), trainer=away).optimizer == 0


def test_recompute_keeps_weights_and_slots_alone() -> None:
    problem = two_ranks(stage="recompute", schedule=foremoe.Schedule.forward_only(2))
    found = rank_memory(problem, halved(problem))
    assert (found.gradients, found.optimizer, found.slots) == (0, 0, 3 * 2 * EXPERT_PARAMS)
    assert found.staging_G.tolist() == [0, 0]
    assert found.activations_G.tolist() == [100 * PAIR_BYTES + 100 * TOKEN_BYTES] * 2  # a layer at a time


def test_slots_that_nothing_uses_take_no_memory() -> None:
    problem = two_ranks()
    assert rank_memory(problem, problem.static()).slots == 0


def test_a_middle_pipeline_rank_has_no_embedding_or_head() -> None:
    problem = two_ranks()
    first, last = problem.layers([0]), problem.layers([1])
    both = rank_memory(problem, problem.static()).weights
    assert rank_memory(first, first.static()).weights == rank_memory(last, last.static()).weights == both // 2
    longer = dataclasses.replace(MODEL, num_layers=3)
    middle = dataclasses.replace(problem.layers([1]), model=longer)
    assert rank_memory(middle, middle.static()).weights == 2 * (2 * EXPERT_PARAMS + 300)


def test_reforward_keeps_inputs_and_one_layer() -> None:
    problem = two_ranks(schedule=foremoe.Schedule.accumulate(2, reforward=True))
    row, one_input = 100 * PAIR_BYTES + 100 * TOKEN_BYTES, 100 * 10 * 2
    # The second layer's forward finds the first one's input; its backward finds both.
    assert activation_peak(problem, halved(problem)).tolist() == [row + 2 * one_input] * 2
    together = dataclasses.replace(problem.schedule, block_L=np.zeros(2, np.int32))
    blocked = dataclasses.replace(problem, schedule=together)
    assert activation_peak(blocked, halved(problem)).tolist() == [2 * row + one_input] * 2


def test_a_stage_in_flight_keeps_more_micro_steps() -> None:
    flight = two_ranks(schedule=foremoe.Schedule.one_f_one_b(2, 2, 0))
    row = 100 * PAIR_BYTES + 100 * TOKEN_BYTES
    assert activation_peak(flight, halved(flight)).tolist() == [4 * row] * 2


@given(st.data())
def test_activations_equal_a_plain_loop(data: st.DataObject) -> None:
    problem = data.draw(problems())
    note(describe(problem))
    placement = data.draw(placements(problem))
    assert activation_peak(problem, placement).tolist() == slow_peak(problem, placement)


def slow_peak(problem: Problem, placement: Placement) -> list[int]:
    """What is kept, use by use, as a set of (row, what)."""
    schedule, uses = problem.schedule, problem.schedule.uses(problem.L)
    block_L = list(range(problem.L)) if schedule.block_L is None else schedule.block_L.tolist()
    model, peaks = problem.model, []
    for g in range(problem.G):
        kept: dict[tuple[int, int, str], float] = {}
        most = 0.0
        for m, layer, phase in zip(uses.micro_step_U, uses.layer_U, uses.phase_U, strict=True):
            tokens = 0 if problem.tokens_MG is None else int(problem.tokens_MG[m, g])
            work = placement.load_NG()[m * problem.L + layer, g] * pair_activation_bytes(model)
            work += tokens * token_activation_bytes(model)
            alone = block_L.count(block_L[layer]) == 1
            if phase == Phase.BACKWARD:
                if schedule.reforward and alone:
                    kept[m, layer, "work"] = work
                most = max(most, sum(kept.values()))
                kept.pop((m, layer, "work"), None)
                kept.pop((m, layer, "input"), None)
                continue
            most = max(most, sum(kept.values()) + work)
            if phase == Phase.REFORWARD or (schedule.trains and not schedule.reforward):
                kept[m, layer, "work"] = work
            elif schedule.trains and (layer == 0 or block_L[layer - 1] != block_L[layer]):
                kept[m, layer, "input"] = float(tokens * model.token_bytes)
        peaks.append(int(np.ceil(most)))
    return peaks


@given(st.data())
def test_staging_is_bounded(data: st.DataObject) -> None:
    problem = data.draw(problems(stages=("update",)))
    staged_G = staging_bytes(problem, data.draw(placements(problem)))
    assert (staged_G <= max(foremoe.problem.memory.RETURN_BYTES, problem.model.gradient_bytes)).all()
    large = dataclasses.replace(problem.model, hidden_size=2**20, ffn_size=2**20)
    vast = dataclasses.replace(problem, model=large)
    assert set(staging_bytes(vast, vast.static()).tolist()) == {0}


def test_the_verdict_says_what_reforward_would_make_of_it() -> None:
    problem = two_ranks()
    verdict = fit(problem, halved(problem))
    again = dataclasses.replace(problem, schedule=foremoe.Schedule.accumulate(2, reforward=True))
    assert verdict.fits and verdict.peak_bytes == rank_memory(problem, halved(problem)).peak_G.max()
    assert verdict.reforward_bytes == rank_memory(again, halved(problem)).peak_G.max() < verdict.peak_bytes
    assert fit(again, halved(problem)).reforward_bytes is None
    small = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, memory_bytes=verdict.peak_bytes - 1))
    assert not fit(small, halved(problem)).fits


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (Fit(179_400_000_000, 23_000_000_000, 80_000_000_000), "does not fit: 179 of 80 GB; with activation recomputation 23 GB"),
        (Fit(80_240_000_000, None, 80_000_000_000), "does not fit: 80.24 of 80 GB"),
        (Fit(179_400_000_000, None, 80_000_000_000), "does not fit: 179 of 80 GB"),
        (Fit(3_140_000_000, 2, 80_000_000_000), "fits: 3.14 of 80 GB"),
        (Fit(77_000_000_000, 2, 80_000_000_000), "fits, but tight: 77 of 80 GB"),
    ],
)
def test_the_verdict_in_words(verdict: Fit, text: str) -> None:
    assert verdict.text() == text
    assert Fit.worst([verdict, verdict]) == verdict


@pytest.mark.parametrize(
    "wrong", [{"optimizer_bytes": -1}, {"data_parallel": 0}, {"rollout_share": 1.0}, {"rollout_s": -1}, {"data_parallel": 1.5}]
)
def test_a_trainer_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(foremoe.InputError, match=next(iter(wrong))):
        foremoe.Trainer(**wrong)  # type: ignore[arg-type]
