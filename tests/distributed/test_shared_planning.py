"""Ranks that plan together get the plan that one planner would have made; `runtime/test_agreement.py` has faults of one rank."""

from __future__ import annotations

import dataclasses
import time
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from profiles import examples

from foremoe.base.errors import InputError
from foremoe.distributed.group import Group
from foremoe.distributed.planning import Planned, PlanningTask, homes_together, plan_together
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.schedule import Schedule
from foremoe.solvers import Anneal
from foremoe.testing.ranks import get_pool, run_threads
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, P physical slots.

E, K = 8, 2


def a_task(M: int, L: int, G: int, **options: Any) -> PlanningTask:
    model = Model(
        name="toy", num_layers=2 * L, num_experts=E, num_topk=K, hidden_size=4, ffn_size=8, first_moe_layer=0,
        attention_params=64, num_heads=1, qk_head_dim=4, v_head_dim=4, source="made up for this test",
    )  # fmt: skip
    cluster = dataclasses.replace(Cluster.preset("8xh100", num_ranks=G), node_of_rank_G=np.arange(G, dtype=np.int32) // 2)
    given_ = {
        "model": model, "cluster": cluster, "stage": "update", "schedule": Schedule.one_f_one_b(M, 2, 0), "redundant": 1,
        "moe_layer_L": np.arange(1, 2 * L, 2, dtype=np.int32), "cost": CostModel(objective="balance"),
        "home_LE": np.tile(np.arange(E, dtype=np.int32), (L, 1)),
    }  # fmt: skip
    return PlanningTask(**(given_ | options))


def counts(M: int, L: int, G: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """load_MLGE of tokens whose number differs from rank to rank, and tokens_MG."""
    rng = np.random.default_rng(seed)
    tokens_MG = rng.integers(0, 20, (M, G))
    load_MLGE = np.zeros((M, L, G, E), np.int32)
    for m, layer, g in np.ndindex(M, L, G):
        weight_E = rng.random(E) ** 3 + 0.01
        load_MLGE[m, layer, g] = rng.multinomial(K * tokens_MG[m, g], weight_E / weight_E.sum())
    return load_MLGE, tokens_MG


def plan_here(group: Group, task: PlanningTask, load_MLGE: np.ndarray, tokens_MG: np.ndarray) -> Planned:
    """Runs on a rank, which looks at its own counts only."""
    return plan_together(
        group, Planner(), task, load_MLGE[:, :, group.rank], tokens_MG[:, group.rank], device=torch.device("cpu"), num_threads=1
    )


def check_whole(task: PlanningTask, load_MLGE: np.ndarray, tokens_MG: np.ndarray, answers: list[Planned]) -> None:
    """Equal to one planner that sees all counts of all layers."""
    work = Workload.from_counts(
        load_MLGE, num_topk=K, stage=task.stage, tokens_MG=tokens_MG.astype(np.int32), moe_layer_L=task.moe_layer_L
    )
    problem = task.problem(work, range(load_MLGE.shape[1]))
    plan, _ = Planner().plan(problem, num_threads=1)
    for rank, answer in enumerate(answers):
        answer.plan.check(problem)
        for name in ("home_LE", "load_MLE", "expert_MLGS", "quota_MLGS", "bound_ML", "load_bound_ML", "stop_ML"):
            np.testing.assert_array_equal(getattr(answer.plan, name), getattr(plan, name), err_msg=name)
        assert answer.plan.transfers.same_as(plan.transfers) and answer.plan.cost_ML.same_as(plan.cost_ML)
        assert answer.plan.header.schedule.same_as(task.schedule)
        np.testing.assert_array_equal(answer.split_MLP, plan.rows_for(work, rank))
        assert answer.plan_s >= 0 and answer.share_s >= 0


@given(
    st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3]),
)  # fmt: skip
@examples(25)
def test_the_plan_is_that_of_one_planner(M: int, L: int, G: int, seed: int, slot_depth: int) -> None:
    """Also where there are more ranks than layers, and where tokens are none."""
    task, (load_MLGE, tokens_MG) = a_task(M, L, G, slot_depth=slot_depth), counts(M, L, G, seed)
    check_whole(task, load_MLGE, tokens_MG, run_threads(plan_here, G, task, load_MLGE, tokens_MG))


def test_between_processes() -> None:
    task, (load_MLGE, tokens_MG) = a_task(3, 3, 2), counts(3, 3, 2, seed=0)
    answers = get_pool(2).run(plan_here, task, load_MLGE, tokens_MG, num_ranks=2)
    assert answers[0].plan.num_replicas > 0
    check_whole(task, load_MLGE, tokens_MG, answers)


def test_homes_are_those_of_one_planner() -> None:
    task, (load_MLGE, tokens_MG) = a_task(3, 3, 4), counts(3, 3, 4, seed=1)
    planner = Planner(home=Anneal())

    def homes(group: Group) -> np.ndarray:
        return homes_together(group, planner, [task], [load_MLGE[:, :, group.rank]], [tokens_MG[:, group.rank]])

    work = Workload.from_counts(
        load_MLGE, num_topk=K, stage="update", tokens_MG=tokens_MG.astype(np.int32), moe_layer_L=task.moe_layer_L
    )
    expected_LE = planner.homes(task.problem(work, range(3)))
    for home_LE in run_threads(homes, 4):
        np.testing.assert_array_equal(home_LE, expected_LE)
        assert (np.sort(home_LE, axis=1) == np.arange(E)).all()


def test_a_planner_that_is_too_slow_is_told_to_stop() -> None:
    task, (load_MLGE, tokens_MG) = a_task(2, 1, 2), counts(2, 1, 2, seed=4)
    told: list[bool] = []

    def plan(self: Planner, problem: Any, *, num_threads: Any, cancel: Any) -> Any:
        told.append(cancel.wait(20.0))
        raise InputError("cancelled")

    def limited(group: Group) -> Planned:
        return plan_together(group, Planner(), task, load_MLGE[:, :, group.rank], tokens_MG[:, group.rank], plan_limit_s=0.05)

    with patch.object(Planner, "plan", plan):
        errors = run_threads(limited, 2, errors=True)
    assert all(isinstance(error, InputError) and "planning took longer than 0.05 s" in str(error) for error in errors)


def test_compiling_does_not_count_as_planning() -> None:
    """A planner that compiles for much longer than it may plan."""
    task, (load_MLGE, tokens_MG) = a_task(2, 1, 1), counts(2, 1, 1, seed=4)
    limit_s, plan_here = 1.0, Planner.plan

    def slow_to_compile(self: Planner, problem: Any, **options: Any) -> Any:
        begin_s, n = time.perf_counter(), 0
        while time.perf_counter() - begin_s < 3.0 * limit_s:
            n += 1
            scope: dict[str, Any] = {}
            exec(f"def f(x):\n return x + {n}", scope)
            assert njit(scope["f"])(1) == n + 1
        return plan_here(self, problem, **options)

    def limited(group: Group) -> Planned:
        return plan_together(group, Planner(), task, load_MLGE[:, :, 0], tokens_MG[:, 0], plan_limit_s=limit_s)

    with patch.object(Planner, "plan", slow_to_compile):
        (found,) = run_threads(limited, 1)
    assert found.plan_s > 3.0 * limit_s


@pytest.mark.parametrize("unknown", [0, 3])
def test_pairs_without_routing_are_no_fault(unknown: int) -> None:
    """-1 in routing: fewer pairs than tokens have experts."""
    task, (load_MLGE, tokens_MG) = a_task(2, 2, 2), counts(2, 2, 2, seed=5)
    answers = run_threads(plan_here, 2, task, load_MLGE, tokens_MG + unknown)
    np.testing.assert_array_equal(answers[0].plan.load_MLE, load_MLGE.sum(axis=2))
