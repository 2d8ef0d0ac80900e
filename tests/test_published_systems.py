"""bench.systems: what each published system holds, when it plans and what it exposes, on a stage whose seconds are known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.systems import GRANTED, OURS, REPLACED, ULTRAEP_S, buffers, group_problems, recorded_r1, systems
from foremoe.machine.cluster import Cluster
from foremoe.problem.problem import Problem
from foremoe.simulate import simulate_systems
from foremoe.synthetic import synthetic_workload

EP, MICRO_STEPS, LAYERS, EXPERTS_PER_RANK = 16, 2, 3, 8
FORWARDS, AUTO = MICRO_STEPS * LAYERS, 2


def problem_of(ranks_per_node: int) -> Problem:
    work = synthetic_workload(
        "qwen3-30b-a3b", num_ranks=EP, tokens_per_rank=4096, micro_steps=MICRO_STEPS, regime="mid", num_layers=LAYERS
    )
    return group_problems(work, "qwen3-30b-a3b", EP, 8, Cluster.preset("8xh100", EP, ranks_per_node=ranks_per_node), 1)[0]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(8)


@pytest.fixture(scope="module")
def rows(problem: Problem) -> dict[str, dict[str, Any]]:
    return {row["solver"]: row for row in simulate_systems([problem], systems(EXPERTS_PER_RANK, AUTO))}


def test_rows_are_what_their_lists_say(rows: dict[str, dict[str, Any]]) -> None:
    assert {*REPLACED, *GRANTED, *OURS} < set(rows)
    for name in REPLACED:
        assert rows[name]["moves_s"] > 0 and not rows[name]["executable"]


@pytest.mark.parametrize(
    ("name", "planning_s"),
    [
        ("LPLB", 100e-6), ("UltraEP-like", ULTRAEP_S), ("MoonEP-like", ULTRAEP_S), ("ECHO-like", ULTRAEP_S), ("LLEP", ULTRAEP_S),
        ("TAOT-like", ULTRAEP_S), ("TAOT-like, exposed", ULTRAEP_S), ("FEPLB-like", 0.0), ("ReLibra-like", 0.0), ("foremoe", 0.0),
        *((name, 0.0) for name in GRANTED),
    ],
)  # fmt: skip
def test_planning_is_exposed_once_per_layer_and_forward(rows: dict[str, dict[str, Any]], name: str, planning_s: float) -> None:
    assert rows[name]["planning_s"] == pytest.approx(FORWARDS * planning_s)


@pytest.mark.parametrize(
    ("exposed", "hidden"),
    [
        ("UltraEP-like", "UltraEP-like, hidden"), ("MoonEP-like", "MoonEP-like, hidden"), ("LLEP", "LLEP, hidden"),
        ("ECHO-like", "ECHO-like, with foresight"), ("TAOT-like, exposed", "TAOT-like"),
    ],
)  # fmt: skip
def test_two_rows_of_a_system_have_one_plan_and_differ_in_what_is_exposed(
    rows: dict[str, dict[str, Any]], exposed: str, hidden: str
) -> None:
    late, early = rows[exposed], rows[hidden]
    for key in ("skew_mean", "replicas_per_layer", "bytes_per_layer", "slots_per_rank"):
        assert late[key] == early[key], key
    assert early["transfer_s"] < late["transfer_s"] and early["simulated_stage_s"] < late["simulated_stage_s"]


@pytest.mark.parametrize(
    ("name", "slots", "held", "inside"),
    [
        ("UltraEP-like", 2, 2, True),  # R = 2, buffers shared by all layers, inside the NVLink domain
        ("MoonEP-like", EXPERTS_PER_RANK, EXPERTS_PER_RANK, True),  # a second set of experts for all layers, inside the domain
        ("FEPLB-like", 4, 4 * 3, True),
        ("LLEP", EXPERTS_PER_RANK, EXPERTS_PER_RANK * 3, False),
        ("ECHO-like", 1, 3, False),
        ("TAOT-like", 2, 6, False),
        ("quota anywhere, with foresight", 1, 3, False),
        ("ReLibra-like", 1, 3, True),
        ("foremoe", 2, 6, False),
        ("foremoe, R = 1", 1, 3, False),
    ],
)
def test_slots_buffers_and_domain(
    problem: Problem, rows: dict[str, dict[str, Any]], name: str, slots: int, held: int, inside: bool
) -> None:
    system = systems(EXPERTS_PER_RANK, AUTO)[name]
    assert rows[name]["slots_per_rank"] <= slots and dataclasses.replace(problem, **system.changes).redundant == slots
    assert buffers(system, problem) == (held, held * problem.model.expert_bytes)
    assert (rows[name]["bytes_by_link"]["rdma"] == 0) == inside


def test_rows_without_replicas_and_those_that_replace_experts_hold_no_buffers(problem: Problem) -> None:
    named = systems(EXPERTS_PER_RANK)
    assert {name for name, system in named.items() if buffers(system, problem) is None} == {"static", "force-balanced", *REPLACED}


def test_one_domain_is_level_with_a_second_set_of_experts() -> None:
    found = {row["solver"]: row for row in simulate_systems([problem_of(EP)], systems(EXPERTS_PER_RANK))}
    assert found["MoonEP-like"]["skew_mean"] == pytest.approx(1.0, abs=1e-3)
    assert found["UltraEP-like"]["skew_mean"] < 1.05 < found["static"]["skew_mean"]


def test_recorded_counts_of_r1_have_their_pairs() -> None:
    work = recorded_r1(8, tokens_per_rank=64, micro_steps=2, num_layers=3)
    if work is None:
        pytest.skip("recorded counts are not here")
    assert work.load_MLGE.shape == (2, 3, 8, 256) and (work.load_MLGE.sum(axis=3) == 8 * 64).all()
