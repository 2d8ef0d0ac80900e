"""Host stores in the simulator: their filling gates what reads them and nothing else, and plans take them only where it pays."""

import dataclasses

import numpy as np
import pytest

import foremoe
from foremoe import Cluster, Planner, Problem
from foremoe.plan.transfers import Link
from foremoe.simulate import simulate
from foremoe.simulate.result import LINKS


def synthetic(model, kind, *, host_store, seed=0, dispatch="pairs", redundant=1, **options):
    work = foremoe.synthetic_workload(model, num_ranks=16, num_layers=6, seed=seed, **options)
    return Problem.of(work, Cluster.preset(kind, 16, dispatch=dispatch, host_store=host_store), redundant=redundant)


def far_by_host(problem, plan, only=None):
    """The plan with every copy between nodes (or one of them) from the host store."""
    t, node_G = plan.transfers, problem.cluster.node_of_rank_G
    far_C = node_G[plan.home_LE[t.layer_C, t.expert_C] // plan.B] != node_G[t.dst_C]
    if only is not None:
        far_C &= np.arange(len(t)) == only(far_C)
    link_C, src_C = np.where(far_C, Link.HOST, t.link_C), np.where(far_C, -1, t.src_C)
    return dataclasses.replace(plan, transfers=t.replace(link_C=link_C.astype(np.uint8), src_C=src_C.astype(np.int16)))


def test_a_copy_waits_for_its_own_filling():
    problem = synthetic("qwen3-30b-a3b", "8xh100", host_store=True, tokens_per_rank=1024, micro_steps=2, stage="recompute")
    plan = far_by_host(problem, Planner().plan(problem)[0], only=lambda far_C: np.argmax(far_C))
    found, c = simulate(problem, plan, share_links=False), int(np.argmax(plan.transfers.link_C == Link.HOST))
    _, rdma_s, host_s = problem.cluster.copy_seconds(problem.model.expert_bytes)
    # Sent and written from the begin on; what else its home sends in the first uses goes before it or after it.
    assert found.copy_start_C[c] >= rdma_s + host_s
    assert found.copy_end_C[c] == pytest.approx(found.copy_start_C[c] + host_s)


def test_filling_holds_up_nothing_that_does_not_read_it():
    problem = synthetic("qwen3-30b-a3b", "8xh100", host_store=True, tokens_per_rank=1024, micro_steps=2, stage="recompute")
    slow = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, copy_contention=0.0))
    plan, _ = Planner().plan(slow)
    last = far_by_host(slow, plan, only=lambda far_C: np.flatnonzero(far_C)[-1])
    need = int(plan.transfers.need_C[last.transfers.link_C == Link.HOST][0])
    never = dataclasses.replace(slow, cluster=dataclasses.replace(slow.cluster, host_latency_s=100.0))
    direct, stuck = simulate(slow, plan, share_links=False), simulate(never, last, share_links=False)
    assert need > 0 and stuck.total_s > 100.0
    assert stuck.start_U[0] == 0.0 and stuck.ready_U[:need] == pytest.approx(direct.ready_U[:need])


def test_a_full_store_is_never_slower_and_nothing_is_sent_to_it():
    problem = synthetic("qwen3-30b-a3b", "8xh100", host_store=True, tokens_per_rank=512, micro_steps=2, stage="recompute")
    plan = far_by_host(problem, Planner().plan(problem)[0])
    filled, full = (simulate(problem, plan, full_stores=full) for full in (False, True))
    assert full.total_s < filled.total_s
    rdma_out = LINKS.index("rdma out")
    assert full.link_busy_WG[rdma_out].sum() < filled.link_busy_WG[rdma_out].sum()


@pytest.mark.parametrize("seed", range(8))
def test_a_host_store_slows_no_default_plan_down_on_two_nodes_of_h100(seed):
    rng = np.random.default_rng(seed)
    model = str(rng.choice(["qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3", "mixtral-8x7b"]))
    if foremoe.Model.preset(model).num_experts % 16:
        model = "gpt-oss-20b"
    options = {
        "regime": str(rng.choice(["mild", "mid", "skew"])), "tokens_per_rank": int(rng.choice([256, 512, 1024, 4096])),
        "micro_steps": int(rng.choice([2, 4])), "stage": str(rng.choice(["update", "recompute"])), "seed": seed,
        "dispatch": str(rng.choice(["pairs", "node"])), "redundant": int(rng.integers(1, 3)),
    }  # fmt: skip
    without, having = (synthetic(model, "8xh100", host_store=has, **options) for has in (False, True))
    found, plain = (simulate(problem, Planner().plan(problem)[0]).total_s for problem in (having, without))
    assert found <= plain


def test_a_host_store_pays_where_ranks_share_a_nic():
    options = {
        "regime": "skew", "tokens_per_rank": 256, "micro_steps": 2, "stage": "recompute", "seed": 71, "dispatch": "node",
    }  # fmt: skip
    seconds = {}
    for has in (False, True):
        problem = synthetic("qwen3-30b-a3b", "8xpcie", host_store=has, **options)
        plan, _ = Planner().plan(problem)
        seconds[has] = simulate(problem, plan).total_s
        assert (plan.transfers.link_C == Link.HOST).any() == has
    assert seconds[True] < 0.98 * seconds[False]
