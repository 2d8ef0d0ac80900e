"""to_eplb: EPLB's published example, and what the loaders of vLLM and SGLang expect of such arrays.

The two loaders are written from what their sources state and assert: vLLM's ``distributed/eplb`` (commits 0014ec6c, 009a5c02) and
SGLang's ``srt/eplb/expert_location.py`` (commit 01fec5c2).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from complete_plan import complete_plan
from eplb_policy import PUBLISHED_LOAD, PUBLISHED_PLACES
from hypothesis import given
from hypothesis import strategies as st
from page_blocks import blocks_of

import foremoe
from foremoe.solvers.published.eplb import Eplb

# Letters: M micro-steps, L layers, P physical experts, E logical experts, X most copies of one.


def plan_of(load_MLGE, *, per_node, redundant, planner=None) -> foremoe.Plan:
    work = foremoe.Workload.from_counts(np.asarray(load_MLGE, np.int32), num_topk=1)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=work.G, ranks_per_node=per_node)
    model = dataclasses.replace(foremoe.Model.preset("qwen3-30b-a3b"), num_experts=work.E, num_topk=1)
    problem = foremoe.Problem.of(work, cluster, redundant=redundant, model=model)
    return (planner or foremoe.Planner()).plan(problem)[0]


def test_the_published_example():
    """Two layers of 12 experts on 16 physical ones: the table that EPLB's README prints, put into a plan that moves homes."""
    load_MLGE = np.zeros((1, 2, 4, 12), np.int32)
    load_MLGE[0, :, 0] = PUBLISHED_LOAD
    plan = plan_of(load_MLGE, per_node=2, redundant=1, planner=foremoe.Planner(rank=(Eplb(num_groups=4),)))
    plan = dataclasses.replace(plan, expert_MLGS=np.array(PUBLISHED_PLACES).reshape(1, 2, 4, 4))
    phy2log, log2phy, logcnt = plan.to_eplb()
    assert phy2log.tolist() == PUBLISHED_PLACES
    assert logcnt.tolist() == [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
    assert log2phy[0].tolist() == [
        [12, -1], [13, 15], [11, -1], [6, -1], [5, 7], [0, 2], [1, -1], [3, -1], [4, -1], [9, -1], [8, 10], [14, -1],
    ]  # fmt: skip
    assert all(of.dtype == np.int64 for of in (phy2log, log2phy, logcnt))


@st.composite
def plans(draw) -> foremoe.Plan:
    num_ranks, per_rank = draw(st.sampled_from([2, 4])), draw(st.integers(1, 3))
    layers, seed = draw(st.integers(1, 3)), draw(st.integers(0, 2**16))
    load_MLGE = np.random.default_rng(seed).geometric(0.02, (2, layers, num_ranks, num_ranks * per_rank))
    load_MLGE[:, :, :, seed % per_rank] *= 20
    return plan_of(load_MLGE, per_node=num_ranks // draw(st.sampled_from([1, 2])), redundant=draw(st.integers(0, 2)))


@given(plan=plans(), data=st.data())
def test_maps_say_what_the_plan_says(plan, data):
    micro_step, layer = data.draw(st.integers(0, plan.M - 1)), data.draw(st.integers(0, plan.L - 1))
    phy2log, log2phy, logcnt = plan.to_eplb(layer, micro_step)
    assert phy2log.shape == (plan.G * plan.S,) and log2phy.shape == (plan.E, logcnt.max()) and logcnt.shape == (plan.E,)
    served_GS = plan.quota_MLGS[micro_step, layer] > 0
    served_GS[:, : plan.B] = True
    assert (phy2log.reshape(plan.G, plan.S)[served_GS] == plan.expert_MLGS[micro_step, layer][served_GS]).all()
    every = plan.to_eplb(micro_step=micro_step)
    assert (phy2log == every.phy2log[layer]).all() and (logcnt == every.logcnt[layer]).all()
    # No rank gets an expert that it does not hold in the plan.
    for g, held_S in enumerate(phy2log.reshape(plan.G, plan.S)):
        assert set(held_S) == set(plan.expert_MLGS[micro_step, layer, g][served_GS[g]])


@given(plan=plans())
def test_loaders_of_serving_engines_take_them(plan):
    phy2log, log2phy, logcnt = plan.to_eplb(micro_step=0)
    vllm_takes(phy2log, log2phy, logcnt, num_ranks=plan.G, num_redundant=plan.G * plan.S - plan.E)
    sglang_takes(phy2log, log2phy, logcnt, num_ranks=plan.G, num_experts=plan.E)


def vllm_takes(phy2log, log2phy, logcnt, *, num_ranks: int, num_redundant: int) -> None:
    """Int64 maps over all physical experts, in ranks of equal size; log2phy is padded with -1 to 1024 columns at most."""
    assert phy2log.dtype == log2phy.dtype == logcnt.dtype == np.int64
    num_layers, num_physical = phy2log.shape
    assert num_physical % num_ranks == 0 and num_physical == logcnt.shape[1] + num_redundant
    assert log2phy.shape[:2] == logcnt.shape == (num_layers, num_physical - num_redundant) and log2phy.shape[2] <= 1024
    assert (logcnt == (log2phy != -1).sum(axis=-1)).all() and (logcnt >= 1).all()
    for layer in range(num_layers):  # the router takes copy number i mod logcnt: none of the first ones may be -1
        for e, count in enumerate(logcnt[layer]):
            assert (phy2log[layer, log2phy[layer, e, :count]] == e).all() and (log2phy[layer, e, count:] == -1).all()


def sglang_takes(phy2log, log2phy, logcnt, *, num_ranks: int, num_experts: int) -> None:
    """It takes phy2log alone, where -1 would name the last expert, makes the others itself, and dispatches to every expert."""
    num_physical = phy2log.shape[1]
    assert num_physical % num_ranks == 0 and phy2log.min() >= 0 and phy2log.max() < num_experts
    made = [[[p for p in range(num_physical) if row[p] == e] for e in range(num_experts)] for row in phy2log.tolist()]
    most = max(len(places) for row in made for places in row)
    padded = np.array([[places + [-1] * (most - len(places)) for places in row] for row in made])
    assert (padded == log2phy).all() and (np.count_nonzero(padded != -1, axis=-1) == logcnt).all() and most <= num_physical


def test_empty_slots_change_no_rank_load():
    """Second copies lie beside the first: an even split leaves each rank with what it would have without them."""
    load_MLGE = np.full((1, 1, 4, 8), 10)
    load_MLGE[..., 0] = 400
    plan = plan_of(load_MLGE, per_node=4, redundant=2)
    phy2log, _, logcnt = plan.to_eplb(0, 0)
    load_E = plan.load_MLE[0, 0]
    expert_GS = np.where(plan.quota_MLGS[0, 0] > 0, plan.expert_MLGS[0, 0], -1)
    even = [sum(load_E[e] / (expert_GS == e).sum() for e in expert_S if e >= 0) for expert_S in expert_GS]
    assert (expert_GS < 0).any()
    filled = [sum(load_E[e] / logcnt[e] for e in expert_S) for expert_S in phy2log.reshape(4, -1)]
    assert np.allclose(even, filled)


def test_a_placement_of_every_micro_step_is_refused_where_they_differ():
    plan = complete_plan()
    with pytest.raises(foremoe.InputError, match="choose one with micro_step="):
        plan.to_eplb()
    with pytest.raises(foremoe.InputError, match="layer=4 does not exist; the plan has 4"):
        plan.to_eplb(4, 0)
    with pytest.raises(foremoe.InputError, match="micro_step=9 does not exist"):
        plan.to_eplb(0, 9)


def test_the_example_of_the_page_prints_what_it_shows(capsys):
    blocks = blocks_of("docs/from-eplb.md")
    ((i, code),) = ((i, text) for i, (language, text) in enumerate(blocks) if language == "python" and "to_eplb" in text)
    exec(code, {})
    assert capsys.readouterr().out == blocks[i + 1][1]
