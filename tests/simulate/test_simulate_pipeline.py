"""Pipelines: closed forms of 1F1B, and what holds for any stages."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe.simulate import PipelineRank, pipeline_problems, simulate, simulate_pipeline

STATIC = foremoe.Planner(rank=())


def plan_pipeline(problem: foremoe.Problem, planner: foremoe.Planner, pp: int, vpp: int = 1) -> list[PipelineRank]:
    return [PipelineRank(problem=one, plan=planner.plan(one)[0]) for one in pipeline_problems(problem, pp, vpp)]


def even(num_micro_steps=6, num_layers=8, *, reforward=False):
    """A load that is even everywhere, on links that take no time."""
    work = foremoe.synthetic_workload(
        "qwen3-30b-a3b",
        num_ranks=4,
        tokens_per_rank=256,
        micro_steps=num_micro_steps,
        seed=0,
        num_layers=num_layers,
        regime="mid",
    )
    cluster = dataclasses.replace(
        foremoe.Cluster.preset("8xh100", num_ranks=4), peer_bytes_per_s=1e300, rdma_bytes_per_s=1e300, host_bytes_per_s=1e300,
        peer_latency_s=0.0, rdma_latency_s=0.0, host_latency_s=0.0,
    )  # fmt: skip
    problem = foremoe.Problem.of(work, cluster, schedule=foremoe.Schedule.accumulate(num_micro_steps, reforward))
    load_MLGE = np.full_like(problem.load_MLGE, 16)
    tokens_MG = np.full_like(problem.tokens_MG, 256)
    return dataclasses.replace(
        problem, load_MLGE=load_MLGE, load_MLE=load_MLGE.sum(axis=2), tokens_MG=tokens_MG, attention_MG=tokens_MG * 64.0
    )


@pytest.mark.parametrize("reforward", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_1f1b_of_even_stages_takes_its_passes_and_a_bubble(pp, reforward):
    problem = even(reforward=reforward)
    one_s = simulate(problem, STATIC.plan(problem)[0]).total_s / (problem.M * pp)  # forward and backward of one stage
    found = simulate_pipeline(plan_pipeline(problem, STATIC, pp))
    assert [stage.total_s for stage in found] == pytest.approx([(problem.M + pp - 1) * one_s] * pp)
    assert [stage.parts.bubble_s for stage in found] == pytest.approx([(pp - 1) * one_s] * pp)


def test_interleaved_chunks_shorten_the_bubble():
    problem = even(num_micro_steps=8)
    plain, interleaved = (simulate_pipeline(plan_pipeline(problem, STATIC, 4, vpp)) for vpp in (1, 2))
    assert interleaved[0].parts.bubble_s == pytest.approx(plain[0].parts.bubble_s / 2)


def test_stages_hold_all_layers_once_also_uneven_ones():
    problem = even(num_micro_steps=4, num_layers=7)
    for pp, vpp in ((2, 1), (4, 1), (2, 2)):
        layers = np.concatenate([one.moe_layer_L for one in pipeline_problems(problem, pp, vpp)])
        assert sorted(layers.tolist()) == problem.moe_layer_L.tolist()
        simulate_pipeline(plan_pipeline(problem, STATIC, pp, vpp))


@examples(10)
@given(st.integers(0, 100), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1)]), st.booleans())
def test_a_pipeline_of_skewed_stages(seed, shape, recompute):
    work = foremoe.synthetic_workload(
        "qwen3-30b-a3b", num_ranks=8, tokens_per_rank=512, micro_steps=4, seed=seed, num_layers=8, regime="mid"
    )
    schedule = foremoe.Schedule.forward_only(4) if recompute else foremoe.Schedule.accumulate(4)
    work = dataclasses.replace(work, stage="recompute" if recompute else "update")
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=8), schedule=schedule)
    stages = plan_pipeline(problem, foremoe.Planner(), *shape)
    found = simulate_pipeline(stages)
    assert len({round(stage.total_s, 12) for stage in found}) == 1
    alone = [simulate(stage.problem, stage.plan).total_s for stage in stages]
    assert found[0].total_s >= max(alone) * (1 - 1e-9)
    assert found[0].total_s <= sum(alone) * 1.1 + 1.0


def test_what_cannot_be_a_pipeline_is_refused():
    problem = even(num_micro_steps=4, num_layers=3)
    with pytest.raises(foremoe.InputError, match="needs 4 layers"):
        pipeline_problems(problem, 4)
    first, last = plan_pipeline(problem, STATIC, 2)
    with pytest.raises(foremoe.InputError, match="wait for each other"):
        simulate_pipeline([last, first])
