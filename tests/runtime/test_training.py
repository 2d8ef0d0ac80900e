"""Twenty optimizer steps by plans equal twenty dense ones: recompute, then update, with other loads and plans every step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from runtime_util import relative
from stage_util import Case, case_of, make_bank, run_dense, run_passes

from foremoe.distributed.group import Group, ThreadGroup
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.runtime import Runtime
from foremoe.testing.ranks import run_threads
from foremoe.testing.samples import plan_of, random_placement

# Letters: M micro-steps, L layers, G ranks, E experts.

M, L, E, STEPS = 3, 2, 4, 20
TOLERANCE = 1e-10
OPTIMIZERS = {"adam": lambda params: torch.optim.Adam(params, lr=0.02), "sgd": lambda params: torch.optim.SGD(params, lr=0.0002)}


def draw_case(stage: str, num_ranks: int, slot_depth: int, mode: str, rng: np.random.Generator) -> Case:
    """A random plan for random skewed loads; a twentieth of the rows is not as planned."""
    popular_E = rng.permutation(12 / np.arange(1, E + 1))
    load_MLGE = (popular_E * rng.random((M, L, num_ranks, E)) * 2).astype(np.int32)
    update = Schedule.one_f_one_b(M, 3, 1, mode != "kept")
    problem = Problem(
        model=dataclasses.replace(Model.preset("qwen3-30b-a3b"), num_experts=E, num_topk=2),
        cluster=Cluster.preset("8xh100", num_ranks=num_ranks, ranks_per_node=2 if num_ranks > 1 else 1, host_store=True),
        cost=CostModel(objective="balance"),
        stage=stage,
        schedule=update if stage == "update" else Schedule.forward_only(M),
        redundant=1,
        slot_depth=slot_depth,
        home_LE=np.stack([np.arange(E), np.arange(E)[::-1]]),
        load_MLE=load_MLGE.sum(axis=2),
        moe_layer_L=np.arange(L),
    )
    plan = plan_of(problem, random_placement(problem, rng, density=1.0))
    return case_of(plan, load_MLGE, rng, unplanned=0.05, mode=mode if stage == "update" else "kept", square=True)


def train(group: Group, steps: list[tuple[Case, Case]], optimizer: str) -> dict[str, Any]:
    bank = make_bank(steps[0][0], group.rank, group.size)
    step = OPTIMIZERS[optimizer](bank.parameters())
    losses = []
    with Runtime(bank, group=group, backends=("local",), debug=True) as runtime:
        for recompute, update in steps:
            runtime.begin(recompute.plan, recompute.split(group.rank))
            with torch.no_grad():
                losses.append(run_passes(recompute, group.rank, runtime.moe)["loss"])
            runtime.end()
            runtime.begin(update.plan, update.split(group.rank), same_weights=True)
            losses.append(run_passes(update, group.rank, runtime.moe)["loss"])
            runtime.end()
            step.step()
            step.zero_grad()
        return {"losses": losses, "weights": bank.gather(group)}


def train_dense(steps: list[tuple[Case, Case]], optimizer: str) -> dict[str, Any]:
    weights = make_bank(steps[0][0], 0, 1).gather(ThreadGroup.of(1)[0])
    step, losses = OPTIMIZERS[optimizer](list(weights.values())), []
    for recompute, update in steps:
        losses.append(run_dense(recompute, weights)[0]["loss"])
        results, grads = run_dense(update, weights)
        losses.append(results["loss"])
        for name, w in weights.items():
            w.grad = grads[name]
        step.step()
    return {"losses": losses, "weights": weights}


@pytest.mark.parametrize(
    ("optimizer", "num_ranks", "slot_depth", "mode"),
    [
        ("adam", 2, 2, "kept"),
        ("adam", 4, 1, "non-reentrant"),
        ("sgd", 2, 3, "reentrant"),
    ],
)
def test_twenty_steps_equal_the_dense_ones(optimizer: str, num_ranks: int, slot_depth: int, mode: str) -> None:
    rng = np.random.default_rng(num_ranks)
    steps = [tuple(draw_case(stage, num_ranks, slot_depth, mode, rng) for stage in ("recompute", "update")) for _ in range(STEPS)]
    assert sum(case.plan.num_replicas for step in steps for case in step) > STEPS * num_ranks
    dense = train_dense(steps, optimizer)
    before = make_bank(steps[0][0], 0, 1).home(0, 0)[0]
    assert 0.01 < relative(dense["weights"]["gate_up"][0, 0].flatten(), before) < 10.0, "the steps must move the weights"
    for result in run_threads(train, num_ranks, steps, optimizer):
        for name, weight in dense["weights"].items():
            assert relative(result["weights"][name], weight) < TOLERANCE
        for mine, theirs in zip(result["losses"], dense["losses"], strict=True):
            for key, loss in mine.items():
                assert relative(loss, theirs[key], floor=1.0) < TOLERANCE
