"""What a stage takes besides its layers, and the whole step: each term on a case computed by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import foremoe
from foremoe.machine.trainer import Trainer, step_speedups
from foremoe.plan.figures import traffic
from foremoe.problem.problem import Problem
from foremoe.simulate import Judge, head_seconds, optimizer_seconds, reduction_seconds, replacement_seconds, simulate
from foremoe.simulate.systems import System, simulate_systems
from foremoe.solvers import HomeSolver
from foremoe.solvers.home.price import price_L

MODEL = foremoe.Model(
    name="toy", num_layers=2, first_moe_layer=0, num_experts=4, num_topk=1, hidden_size=10, ffn_size=5, attention_params=300,
    num_heads=2, qk_head_dim=3, v_head_dim=4, vocab_size=7, source="made up",
)  # fmt: skip
EXPERTS, DENSE = 2 * 2 * (3 * 10 * 5), 2 * 300 + 2 * 7 * 10  # parameters of one of two ranks
CLUSTER = dataclasses.replace(
    foremoe.Cluster.preset("8xh100", num_ranks=2), peer_bytes_per_s=1e3, rdma_bytes_per_s=1e2, memory_bytes_per_s=1e4,
    flops_per_s=1e6, compute_efficiency=0.5, attention_efficiency=0.25, layer_overhead_s=0.0, pair_overhead_s=0.0,
)  # fmt: skip


def two_ranks(cluster: foremoe.Cluster = CLUSTER, **changes: object) -> Problem:
    load_MLGE = np.zeros((2, 2, 2, 4), np.int64)
    load_MLGE[:, :, 0, 0], load_MLGE[:, :, 1, :] = 100, 50
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=1)
    return dataclasses.replace(foremoe.Problem.of(work, cluster, model=MODEL), **changes)


def test_the_head_takes_two_flops_per_weight_and_token() -> None:
    # 100 and 200 tokens, 70 weights, a quarter of 1 MFLOP/s.
    assert head_seconds(two_ranks()).tolist() == [[pytest.approx(0.056), pytest.approx(0.112)]] * 2
    assert not head_seconds(two_ranks().layers([0])).any()  # not the model's last layer
    assert not head_seconds(two_ranks(model=dataclasses.replace(MODEL, vocab_size=0))).any()


def test_the_reduction_moves_gradients_and_weights() -> None:
    problem = two_ranks()
    inside_s = 6 * DENSE / 2 / 1e3  # 4 bytes of gradient, 2 of weight; half of them over the peer link of each rank
    assert reduction_seconds(problem, foremoe.Trainer()) == pytest.approx(inside_s)
    experts_s = 6 * EXPERTS * 3 / 4 / 1e2
    between_s = 6 * DENSE * 3 / 4 / (2 * 1e2)  # over the NICs of both ranks
    assert reduction_seconds(problem, foremoe.Trainer(data_parallel=4)) == pytest.approx(experts_s + max(inside_s, between_s))
    again = two_ranks(stage="recompute", schedule=foremoe.Schedule.forward_only(2))
    assert reduction_seconds(again, foremoe.Trainer(data_parallel=4)) == 0.0


def test_the_optimizer_runs_at_the_memorys_bandwidth() -> None:
    problem = two_ranks()
    per_param = 2 * 12 + 4 + 2
    assert optimizer_seconds(problem, foremoe.Trainer()) == pytest.approx(per_param * (EXPERTS + DENSE / 2) / 1e4)
    shared = foremoe.Trainer(data_parallel=4)
    assert optimizer_seconds(problem, shared) == pytest.approx(per_param * (EXPERTS / 4 + DENSE / 8) / 1e4)
    assert optimizer_seconds(problem, foremoe.Trainer(optimizer_bytes=0)) == 0.0
    unknown = two_ranks(dataclasses.replace(CLUSTER, memory_bytes_per_s=None))
    assert optimizer_seconds(unknown, foremoe.Trainer()) == 0.0


def test_overheads_are_paid_per_layer_and_per_pair_of_every_pass() -> None:
    plain = two_ranks(stage="recompute", schedule=foremoe.Schedule.forward_only(2))
    static = foremoe.Planner(rank=()).plan(plain)[0]
    slow = dataclasses.replace(plain, cluster=dataclasses.replace(CLUSTER, layer_overhead_s=0.5, pair_overhead_s=0.25))
    before, after = (simulate(problem, static).parts for problem in (plain, slow))
    assert after.window_s - before.window_s == pytest.approx(2 * 2 * 0.5)
    assert after.compute_s - before.compute_s == pytest.approx(2 * 2 * 200 * 0.25)  # rank 0 serves 150 + 50 pairs of a row


def test_a_step_gains_less_than_its_stages() -> None:
    half = foremoe.Trainer(rollout_share=0.5)
    assert half.outside_s(10.0) == pytest.approx(10.0)
    assert half.step_speedup(5.0, 10.0) == pytest.approx(20 / 15)
    assert foremoe.Trainer(rollout_share=0.0).step_speedup(5.0, 10.0) == pytest.approx(2.0)
    assert foremoe.Trainer(rollout_share=0.2).step_speedup(5.0, 10.0) == pytest.approx(12.5 / 7.5)
    assert foremoe.Trainer(rollout_s=30.0).step_speedup(5.0, 10.0) == pytest.approx(40 / 35)


def test_a_step_of_which_nobody_said_what_lies_outside_has_no_single_gain() -> None:
    assert foremoe.Trainer().outside_s(10.0) is None and foremoe.Trainer().step_speedup(5.0, 10.0) is None
    found = step_speedups(5.0, 10.0)
    assert found == pytest.approx({"50": 20 / 15, "85": 100 / 92.5, "95": 100 / 97.5})
    for percent, gain in found.items():
        assert foremoe.Trainer(rollout_share=int(percent) / 100).step_speedup(5.0, 10.0) == pytest.approx(gain)


def test_systems_and_the_judge_tell_the_same() -> None:
    problem, trainer = two_ranks(), foremoe.Trainer(data_parallel=2, rollout_share=0.25)
    systems = {"static": System(planner=foremoe.Planner(rank=())), "plan": System(), "even": System(even=True)}
    rows = {row["solver"]: row for row in simulate_systems([problem], systems, trainer=trainer)}
    judge = Judge.of(problem, trainer)
    found = judge(problem, foremoe.Planner().plan(problem)[0])
    assert tuple(found) == Judge.FIGURES
    assert rows["plan"]["step_speedup_at"] == pytest.approx(found.pop("step_speedup_at"))
    assert {name: rows["plan"][name] for name in found} == pytest.approx(found)
    assert rows["static"]["simulated_stage_s"] == pytest.approx(judge.static_s)
    assert rows["even"]["simulated_stage_s"] == pytest.approx(judge.balanced_s)
    fixed_s = reduction_seconds(problem, trainer) + optimizer_seconds(problem, trainer)
    head_s = (1 + CLUSTER.window_backward_ratio) * head_seconds(problem).max(axis=1).sum()
    plain_s = simulate(problem, foremoe.Planner(rank=()).plan(problem)[0]).total_s
    assert judge.static_s == pytest.approx(plain_s + head_s + fixed_s)


class Apart(HomeSolver):
    """Swaps the second expert with the third one."""

    def solve(self, problem: foremoe.Problem) -> np.ndarray:
        return np.broadcast_to(np.array([0, 2, 1, 3], np.int32), (problem.L, 4)).copy()


def test_moves_of_homes_are_spread_over_the_step_that_they_serve() -> None:
    load_MLGE = np.zeros((2, 2, 2, 4), np.int64)
    load_MLGE[:, :, :, :2] = 100  # both hot experts live on rank 0
    problem = foremoe.Problem.of(foremoe.Workload.from_counts(load_MLGE, num_topk=1), CLUSTER, model=MODEL)
    planner = foremoe.Planner(home=Apart(), rank=())
    home_LE = planner.homes(problem)
    # In each of two layers an expert goes each way: 2 bytes and 12 of state per parameter, at 1 kB/s, and a latency.
    whole_s = 2 * (14 * 150 / 1e3 + CLUSTER.peer_latency_s)
    assert price_L(problem, home_LE, 12.0).sum() == pytest.approx(whole_s)
    moved = dataclasses.replace(problem, home_LE=home_LE)
    plan, found_s = planner.plan(moved)[0], []
    for micro_steps, share in ((None, 1.0), (2, 1.0), (8, 0.25)):
        trainer = foremoe.Trainer(micro_steps=micro_steps)
        (row,) = simulate_systems([problem], {"homes": System(planner=planner)}, trainer=trainer)
        assert row["moves_s"] == pytest.approx(share * whole_s)
        assert row["simulated_stage_s"] == pytest.approx(Judge.of(problem, trainer)(moved, plan)["simulated_stage_s"])
        found_s.append(row["simulated_stage_s"])
    assert found_s[0] == found_s[1] and found_s[0] - found_s[2] == pytest.approx(0.75 * whole_s)
    with pytest.raises(foremoe.InputError, match="a stage of 2 micro-steps is longer than the training step of 1"):
        simulate_systems([problem], {"homes": System(planner=planner)}, trainer=foremoe.Trainer(micro_steps=1))
    with pytest.raises(foremoe.InputError, match="micro_steps of Trainer"):
        foremoe.Trainer(micro_steps=0)


def test_plans_that_replace_experts_bear_their_moves() -> None:
    problem = two_ranks()
    plan = foremoe.STRATEGIES["eplb-exact"].plan(problem)[0]
    assert not plan.executable
    judge = Judge.of(problem)
    found, moves_s = judge(problem, plan), replacement_seconds(problem, plan)
    alone_s = simulate(problem, plan, outside_s_MG=head_seconds(problem)).total_s
    ends_s = reduction_seconds(problem, Trainer()) + optimizer_seconds(problem, Trainer())
    # Weights come and float32 gradients go, over the links of two ranks at once.
    moved = traffic(problem, plan)[0] * plan.N
    assert moved > 0
    assert moves_s == pytest.approx(moved / 2 * (problem.model.expert_bytes + problem.model.gradient_bytes) / 1e3)
    assert found["simulated_stage_s"] == pytest.approx(alone_s + moves_s + ends_s)
    assert found["speedup_vs_static"] == judge.static_s / found["simulated_stage_s"]
    assert replacement_seconds(problem, foremoe.Planner().plan(problem)[0]) == 0.0
