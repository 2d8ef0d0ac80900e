"""What-ifs: closed forms on cases by hand, against the simulator, and against turns played out event by event."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foremoe
from foremoe.base.errors import InputError
from foremoe.problem.problem import Problem
from foremoe.simulate import (
    System,
    low_precision_speeds,
    multiplexed,
    plan_pipeline,
    round_seconds,
    simulate,
    simulate_pipeline,
    simulate_systems,
)

MODEL = foremoe.Model(
    name="toy", num_layers=2, first_moe_layer=0, num_experts=4, num_topk=1, hidden_size=10, ffn_size=5, attention_params=300,
    num_heads=2, qk_head_dim=3, v_head_dim=4, vocab_size=7, source="made up",
)  # fmt: skip
# A pair has 2 * 3 * 10 * 5 FLOPs: 300 of half of 1 MFLOP/s.
CLUSTER = dataclasses.replace(
    foremoe.Cluster.preset("8xh100", num_ranks=2), flops_per_s=1e6, compute_efficiency=0.5, pair_overhead_s=1e-4,
    slot_overhead_s=0.0, backward_ratio=2.0, tile_pairs=1, element_overhead_s=0.0, plain_bytes_per_s=None,
)  # fmt: skip
GEMM_S = 300 / 0.5e6
SECONDS = st.floats(0.01, 100.0)


@pytest.fixture
def problem() -> Problem:
    """Two ranks, two micro-steps, two layers: rank 0 has 300 pairs of a row, rank 1 has 100."""
    load_MLGE = np.zeros((2, 2, 2, 4), np.int64)
    load_MLGE[:, :, :, 0], load_MLGE[:, :, :, 2] = 150, 50
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=1)
    return foremoe.Problem.of(work, CLUSTER, model=MODEL)


def static(problem: Problem) -> foremoe.Plan:
    return foremoe.Planner(rank=()).plan(problem)[0]


def test_ranks_above_the_mean_are_faster() -> None:
    load_NG = np.array([[300, 100], [200, 200], [0, 0], [50, 350]])
    assert low_precision_speeds(load_NG, 1.5).tolist() == [[1.5, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.5]]
    for wrong in (0.9, float("nan"), float("inf")):
        with pytest.raises(InputError, match="at least 1"):
            low_precision_speeds(load_NG, wrong)


@pytest.mark.parametrize(("speedup", "forward_s"), [
    (1.0, 300 * (GEMM_S + 1e-4)), (2.0, 300 * (GEMM_S / 2 + 1e-4)), (1e6, 300 * 1e-4 + 300 * GEMM_S / 1e6),
])  # fmt: skip
def test_the_simulator_computes_so(problem: Problem, speedup: float, forward_s: float) -> None:
    """Two micro-steps of two layers, backward twice as long; the other rank is late where its 100 pairs take longer."""
    forward_s = max(forward_s, 100 * (GEMM_S + 1e-4))
    found = simulate(problem, static(problem), low_precision=speedup)
    assert found.parts.compute_s == pytest.approx(2 * 2 * (1 + 2) * forward_s)
    plain = simulate(problem, static(problem))
    assert plain.total_s - found.total_s == pytest.approx(plain.parts.compute_s - found.parts.compute_s)
    ranks = simulate_pipeline(plan_pipeline(problem, foremoe.Planner(rank=()), 2), low_precision=speedup)
    assert all(rank.parts.compute_s == pytest.approx(2 * (1 + 2) * forward_s) for rank in ranks)


def test_a_system_in_lower_precision_says_so(problem: Problem) -> None:
    planner = foremoe.Planner(rank=())
    rows = simulate_systems([problem], {"static": System(planner=planner), "low": System(planner=planner, low_precision=2.0)})
    assert [row["changes_numerics"] for row in rows] == [False, True]
    assert rows[1]["compute_s"] < rows[0]["compute_s"] and rows[1]["skew_mean"] == rows[0]["skew_mean"]


def played_round(jobs: int, outside_s: float, plan_s: float, stage_s: float) -> float:
    """Seconds of a round once turns repeat: every job rolls out, plans, trains; either set of GPUs serves first come, first."""
    ready_J, rollout_s, training_s, ends = [0.0] * jobs, 0.0, 0.0, []
    for _ in range(60):
        for j in range(jobs):
            rollout_s = max(rollout_s, ready_J[j]) + outside_s
            training_s = max(training_s, rollout_s + plan_s) + stage_s
            ready_J[j] = training_s
        ends.append(training_s)
    return (ends[-1] - ends[-21]) / 20


@given(st.integers(1, 5), SECONDS, SECONDS, SECONDS)
def test_a_round_is_as_turns_play_out(jobs: int, outside_s: float, plan_s: float, stage_s: float) -> None:
    assert round_seconds(jobs, outside_s, plan_s, stage_s) == pytest.approx(played_round(jobs, outside_s, plan_s, stage_s))


def test_what_turns_give_by_hand() -> None:
    """Rollout takes 4 s, planning 1 s, the stage 6 s, of which 2 s fill host stores."""
    row = {"simulated_stage_s": 6.0, "plan_exposed_s": 1.0, "fill_s": 2.0}
    alone, two, three = (multiplexed(row, jobs, 4.0) for jobs in (1, 2, 3))
    assert alone == {"alone_s": 11, "round_s": 11, "gain": 1, "planning_s": 1, "filling_s": 2, "busy": pytest.approx(6 / 11)}
    # Two jobs keep the GPUs of training busy: planning hides in the wait, filling is paid by both, but for 9 s without it.
    assert two == {"alone_s": 11, "round_s": 12, "gain": pytest.approx(22 / 12), "planning_s": 0, "filling_s": 3, "busy": 1}
    assert three == {"alone_s": 11, "round_s": 18, "gain": pytest.approx(33 / 18), "planning_s": 0, "filling_s": 6, "busy": 1}
    # Where rollout is the longer part, its GPUs are the busy ones, and neither costs anything.
    assert multiplexed(row, 2, 12.0) | {"alone_s": 19} == {
        "alone_s": 19, "round_s": 24, "gain": pytest.approx(38 / 24), "planning_s": 0, "filling_s": 0, "busy": 0.5,
    }  # fmt: skip
    with pytest.raises(InputError, match="at least 1 job"):
        multiplexed(row, 0, 4.0)
