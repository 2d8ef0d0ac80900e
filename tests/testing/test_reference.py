"""The reference executor equals the dense computation for every valid plan, and tells broken transfers from good ones."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st
from mutations import copying_plans, mutated, strangers
from reference import dense_reference, run_reference

from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import plan_of, random_placement, random_sources
from foremoe.testing.strategies import plans, problems

TOLERANCE = 1e-10


def worst_difference(problem: Problem, plan: Plan) -> float:
    """Largest difference from dense over both landings; infinity where NaN was read."""
    load_MLGE = random_sources(problem, np.random.default_rng(7))
    dense = dense_reference(load_MLGE, backward=problem.schedule.trains)
    object.__setattr__(plan, "_checked", True)  # the executor must see for itself what the laws would refuse
    return max(run_reference(plan, load_MLGE, land=land).difference(dense) for land in ("early", "late"))


def with_transfers(plan: Plan, transfers: TransferList) -> Plan:
    return dataclasses.replace(plan, transfers=transfers)


@given(st.data())
def test_every_valid_plan_computes_what_dense_computes(data: st.DataObject) -> None:
    problem = data.draw(problems(max_pairs=12))
    note(describe(problem))
    plan = data.draw(plans(problem))
    plan.check(problem)
    assert worst_difference(problem, plan) < TOLERANCE


@given(st.data())
def test_transfers_that_pass_the_check_compute_what_dense_computes(data: st.DataObject) -> None:
    problem, plan = data.draw(copying_plans())
    broken = with_transfers(plan, data.draw(mutated(plan.transfers)))
    if not broken.violations(problem):
        assert worst_difference(problem, broken) < TOLERANCE


@given(copying_plans())
def test_plans_with_many_copies_compute_what_dense_computes(drawn: tuple[Problem, Plan]) -> None:
    problem, plan = drawn
    assert worst_difference(problem, plan) < TOLERANCE


@given(st.data())
def test_check_and_executor_both_see_a_missing_copy(data: st.DataObject) -> None:
    problem, plan = data.draw(copying_plans())
    c = data.draw(st.integers(0, len(plan.transfers) - 1))
    broken = with_transfers(plan, plan.transfers.cut(C=np.arange(len(plan.transfers)) != c))
    assert {v.law for v in broken.violations(problem)} == {"residency"}
    assert worst_difference(problem, broken) > TOLERANCE


@given(st.data())
def test_check_and_executor_both_see_a_copy_that_may_land_too_early(data: st.DataObject) -> None:
    problem, plan = data.draw(copying_plans())
    waits = np.flatnonzero(plan.transfers.after_C >= 0)
    assume(len(waits) > 0)
    c = data.draw(st.sampled_from(waits.tolist()))
    after_C = plan.transfers.after_C.copy()
    after_C[c] -= 1
    broken = with_transfers(plan, plan.transfers.replace(after_C=after_C))
    assert broken.violations(problem)
    assert worst_difference(problem, broken) > TOLERANCE


@given(st.data())
def test_check_and_executor_both_see_weights_from_the_wrong_rank(data: st.DataObject) -> None:
    problem, plan = data.draw(copying_plans())
    c = data.draw(st.integers(0, len(plan.transfers) - 1))
    src_C, link_C = plan.transfers.src_C.copy(), plan.transfers.link_C.copy()
    src_C[c], link_C[c] = data.draw(st.sampled_from(strangers(plan, c))), 0
    broken = with_transfers(plan, plan.transfers.replace(src_C=src_C, link_C=link_C))
    assert {v.law for v in broken.violations(problem)} == {"residency"}
    assert worst_difference(problem, broken) == float("inf")


SMALL = (
    "Problem(model=Model(name='toy', num_layers=1, first_moe_layer=0, num_experts=4, num_topk=1, hidden_size=4, ffn_size=8, "
    "attention_params=64, num_heads=1, qk_head_dim=4, v_head_dim=4, source='made up'), cluster=Cluster(name='toy', num_ranks=2, "
    "node_of_rank_G=[0, 1], flops_per_s=1e9, compute_efficiency=1.0, slot_overhead_s=0.0, peer_bytes_per_s=1e9, "
    "rdma_bytes_per_s=1e9, host_bytes_per_s=1e9, peer_latency_s=0.0, rdma_latency_s=0.0, host_latency_s=0.0, "
    "copy_contention=0.0, memory_bytes=1000, source='made up'), load_MLE=[[[9, 1, 0, 2]]], home_LE=[[0, 1, 2, 3]], "
    "schedule=Schedule(micro_step_X=[0, 0], phase_X=[0, 1], chunk_X=[0, 0]), load_MLGE=[[[[5, 1, 0, 0], [4, 0, 0, 2]]]], "
    "moe_layer_L=[0])"
)


def small_problem() -> Problem:
    return eval(SMALL, {cls.__name__: cls for cls in (Cluster, Model, Problem, Schedule)})


def test_numbers_do_not_depend_on_the_plan_but_on_the_seed() -> None:
    problem = small_problem()
    plan = plan_of(problem, random_placement(problem, np.random.default_rng(0), density=1.0))
    assert plan.num_replicas > 0
    first, again = run_reference(plan, problem.load_MLGE), run_reference(plan, problem.load_MLGE)
    assert first.difference(again) == 0.0
    assert first.output_ZH.shape[0] == problem.load_MLE.sum()
    assert first.difference(run_reference(plan, problem.load_MLGE, seed=1)) > 0.1


def test_a_forward_stage_has_no_gradients() -> None:
    problem = small_problem()
    dense = dense_reference(problem.load_MLGE, backward=False)
    assert not dense.weight_grad_LE.any() and not dense.input_grad_ZH.any() and dense.output_ZH.any()


def test_what_the_executor_cannot_run_is_refused() -> None:
    problem = small_problem()
    plan = plan_of(problem, problem.static())
    with pytest.raises(InputError, match="early"):
        run_reference(plan, problem.load_MLGE, land="sometime")
    moved = dataclasses.replace(plan, header=dataclasses.replace(plan.header, keeps_homes=False))
    with pytest.raises(InputError, match="homes"):
        run_reference(moved, problem.load_MLGE)
    with pytest.raises(InputError, match="differ"):
        run_reference(plan, problem.load_MLGE + 1)
