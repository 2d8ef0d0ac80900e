"""Problem: what it derives, its ranges and layers, its pasteable form, and one sentence for every bad input."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.laws import placement_violations
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import many_row_problem, plan_of
from foremoe.testing.strategies import problems
from foremoe.workload.workload import Workload


@given(st.data())
def test_the_pasteable_form_is_the_same_problem(data: st.DataObject) -> None:
    problem = data.draw(problems())
    import foremoe

    names = [name for name in foremoe.__all__ if name[0].isupper()]  # rooms may need torch
    assert eval(describe(problem), {name: getattr(foremoe, name) for name in names}).same_as(problem)


@given(st.data())
def test_static_serves_everything_at_home(data: st.DataObject) -> None:
    problem = data.draw(problems())
    note(describe(problem))
    static = problem.static()
    assert placement_violations(problem, static) == []
    for n in range(problem.N):
        for e in range(problem.E):
            h = problem.home_LE[n % problem.L, e]
            assert static.expert_NGS[n, h // problem.B, h % problem.B] == e == problem.base_NGB[n].ravel()[h]
            assert static.quotas_NGS[n, h // problem.B, h % problem.B] == problem.load_NE[n, e]
    assert (static.expert_NGS[:, :, problem.B :] == -1).all() and not static.quotas_NGS[:, :, problem.B :].any()


@given(st.data())
def test_letters_and_views(data: st.DataObject) -> None:
    problem = data.draw(problems())
    assert problem.load_NE.shape == (problem.N, problem.E) and np.shares_memory(problem.load_NE, problem.load_MLE)
    assert problem.N == problem.M * problem.L and problem.S == problem.B + problem.R and problem.B * problem.G == problem.E
    assert (problem.load_NGE is None) == (problem.load_MLGE is None)
    if problem.load_NGE is not None:
        assert (problem.load_NGE.sum(axis=1) == problem.load_NE).all()
        node_G, demand_NVE = problem.cluster.node_of_rank_G, problem.counts().demand_NVE
        assert demand_NVE is problem.counts().demand_NVE and not demand_NVE.flags.writeable
        for v in range(problem.cluster.num_nodes):
            assert (demand_NVE[:, v] == problem.load_NGE[:, node_G == v].sum(axis=1)).all()
    assert problem.counts().located == (problem.load_NGE is not None)
    assert problem.same_as(dataclasses.replace(problem))
    assert not any(array.flags.writeable for array in (problem.load_MLE, problem.home_LE, problem.moe_layer_L))


@given(st.data())
def test_ranges_of_micro_steps_are_problems(data: st.DataObject) -> None:
    problem = data.draw(problems())
    note(describe(problem))
    low = data.draw(st.integers(0, problem.M - 1))
    part = problem[low:]
    assert part.M == problem.M - low == part.schedule.M
    assert (part.load_MLE == problem.load_MLE[low:]).all()
    assert problem[:].same_as(problem)
    plan_of(part, part.static()).check(part)


@given(st.data())
def test_layers_are_problems(data: st.DataObject) -> None:
    problem = data.draw(problems())
    index = data.draw(st.lists(st.integers(0, problem.L - 1), min_size=1, max_size=problem.L, unique=True))
    M, update = problem.M, problem.stage == "update"
    part = problem.layers(index, Schedule.accumulate(M) if update else Schedule.forward_only(M))
    assert (part.load_MLE == problem.load_MLE[:, index]).all() and (part.home_LE == problem.home_LE[index]).all()
    assert part.moe_layer_L.tolist() == problem.moe_layer_L[index].tolist()


def test_another_load_forgets_the_sources() -> None:
    problem = many_row_problem(8)
    other = problem.with_load(problem.load_MLE + 1)
    assert other.load_MLGE is None and (other.load_MLE == problem.load_MLE + 1).all()


def test_of_takes_what_the_workload_knows() -> None:
    load_MLGE = np.random.default_rng(0).integers(0, 9, (2, 3, 4, 8))
    for stage, schedule in (("update", Schedule.accumulate(2)), ("recompute", Schedule.forward_only(2))):
        work = Workload.from_counts(load_MLGE, num_topk=2, stage=stage)
        problem = Problem.of(work, CLUSTER, model=MODEL, redundant=2, replicas="node", slot_depth=2)
        assert problem.schedule.same_as(schedule) and problem.stage == stage and problem.R == problem.slot_depth == 2
        assert (problem.load_MLGE == load_MLGE).all() and (problem.load_MLE == load_MLGE.sum(axis=2)).all()
        assert (problem.home_LE == np.arange(8)).all() and problem.cost == CostModel()
    full = Workload.from_counts(np.ones((1, 48, 4, 128), int), num_topk=8)
    for name in ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"):
        assert Problem.of(full, CLUSTER, model=name).model == Model.preset("qwen3-30b-a3b")
    with pytest.raises(InputError, match="there is no model preset 'qwen3'"):
        Problem.of(full, CLUSTER, model="qwen3")
    with pytest.raises(InputError, match="names no model"):
        Problem.of(work, CLUSTER)
    with pytest.raises(InputError, match="dealt to 4 source ranks but the cluster has 8"):
        Problem.of(work, Cluster.preset("8xh100", num_ranks=8), model=MODEL)


CLUSTER = Cluster.preset("8xh100", num_ranks=4, ranks_per_node=2)
MODEL = dataclasses.replace(Model.preset("qwen3-30b-a3b"), name="eight", num_experts=8, num_topk=2)
GOOD: dict[str, Any] = {
    "model": MODEL, "cluster": CLUSTER, "load_MLE": np.ones((2, 3, 8), int), "home_LE": np.tile(np.arange(8), (3, 1)),
    "schedule": Schedule.accumulate(2), "moe_layer_L": np.arange(3),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"load_MLE": np.ones((2, 3, 9), int)}, "the load has 9 experts but model eight has 8"),
        ({"load_MLE": np.ones((2, 8), int)}, "load_MLE must have shape [any, any, any]; got [2, 8]"),
        ({"load_MLE": np.ones((0, 3, 8), int)}, "at least one micro-step and one layer; got 0 and 3"),
        ({"load_MLE": -np.ones((2, 3, 8), int)}, "48 negative values"),
        ({"load_MLE": np.full((2, 3, 8), 0.5)}, "whole numbers"),
        ({"load_MLE": np.full((2, 3, 8), 2**40)}, "int32"),
        ({"load_MLE": np.full((2, 3, 8), np.nan)}, "48 NaN values"),
        ({"cluster": Cluster.preset("8xh100", num_ranks=3)}, "8 experts do not divide over 3 ranks; choose a number of ranks"),
        ({"cluster": Cluster.preset("8xh100", num_ranks=16)}, "8 experts do not divide over 16 ranks"),
        ({"redundant": -1}, "redundant slots per rank must lie in [0, 8]; got -1"),
        ({"redundant": "auto"}, "must lie in [0, 8]; got auto; foremoe.choose_slots(problem) finds the number that pays off"),
        ({"redundant": 9}, "[0, 8]; got 9"),
        ({"redundant": 1.5}, "[0, 8]; got 1.5"),
        ({"stage": "rollout"}, "stage must be one of recompute, update; got 'rollout'"),
        ({"stage": "recompute"}, "stage recompute needs a schedule without backward passes"),
        ({"schedule": Schedule.forward_only(2)}, "stage update needs a schedule with backward passes"),
        ({"schedule": Schedule.accumulate(3)}, "the schedule runs 3 micro-steps but the load has 2"),
        ({"schedule": Schedule.interleaved(2, 2, 2, 0)}, "3 layers do not divide into 2 chunks"),
        ({"replicas": "rack"}, 'replicas must be "any" or "node"; got \'rack\''),
        ({"home_LE": np.zeros((3, 8), int)}, "home_LE of layer 0 is not a permutation of the 8 home slots"),
        ({"home_LE": np.arange(8)}, "home_LE must have shape [3, 8]; got [8]"),
        ({"moe_layer_L": np.arange(2)}, "moe_layer_L must have shape [3]; got [2]"),
        ({"load_MLGE": np.ones((2, 3, 4, 8), int)}, "load_MLGE summed over source ranks differs from load_MLE"),
        ({"load_MLGE": np.ones((2, 3, 5, 8), int)}, "load_MLGE must have shape [2, 3, 4, 8]"),
        ({"tokens_MG": np.ones((2, 3), int)}, "tokens_MG must have shape [2, 4]; got [2, 3]"),
        ({"tokens_MG": -np.ones((2, 4), int)}, "tokens_MG holds 8 negative values"),
        ({"attention_MG": -np.ones((2, 4))}, "attention_MG holds 8 negative values"),
        ({"slot_depth": 0}, "slot_depth must be a whole number from 1 to 1024; got 0"),
        ({"slot_depth": 1025}, "slot_depth must be a whole number from 1 to 1024; got 1025"),
        ({"slot_depth": 1.0}, "slot_depth must be a whole number from 1 to 1024; got 1.0"),
    ],
)
def test_bad_input_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    Problem(**GOOD)
    with pytest.raises(InputError, match=re.escape(sentence)) as caught:
        Problem(**{**GOOD, **change})
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_defaults() -> None:
    problem = Problem(**GOOD)
    assert (problem.stage, problem.redundant, problem.replicas, problem.slot_depth) == ("update", 1, "any", 3)
