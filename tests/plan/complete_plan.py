"""A plan that uses every tensor and every header key, each with a value that is not its default.

Golden files were written from it. A new format gets one of its own::

    PYTHONPATH=tests/plan python -c "import complete_plan as c; c.complete_plan().save('tests/plan/golden/plan_v4.safetensors')"
"""

from __future__ import annotations

import dataclasses

import numpy as np

import foremoe
from foremoe.plan.plan import Plan
from foremoe.solvers import Deadline
from foremoe.workload import Dealt

# Letters: M micro-steps, L layers, G ranks, E experts, S slots per rank.
M, L, G, E = 4, 4, 4, 8

MODEL = foremoe.Model(
    name="tiny", num_layers=L, first_moe_layer=1, num_experts=E, num_topk=2, hidden_size=64, ffn_size=96, num_matrices=2,
    bytes_per_weight=1.0, bytes_per_gradient=2.0, bytes_per_activation=4.0, attention_params=16384, num_heads=4,
    qk_head_dim=16, v_head_dim=24, num_expert_groups=2, vocab_size=5, shared_ffn_size=32, dense_ffn_size=128, source="made up",
)  # fmt: skip
CLUSTER = foremoe.Cluster(
    name="two nodes", num_ranks=G, node_of_rank_G=np.array([0, 1, 0, 1]), flops_per_s=1e12, compute_efficiency=0.5,
    slot_overhead_s=2e-6, peer_bytes_per_s=1e9, rdma_bytes_per_s=1e8, host_bytes_per_s=2e8, peer_latency_s=1e-6,
    rdma_latency_s=3e-6, host_latency_s=2e-6, nic_sharing=2, dispatch="node", exchange_bytes_per_s=5e8,
    copy_contention=0.25, memory_bytes=2**30, memory_bytes_per_s=1e9,
    attention_efficiency=0.75, backward_ratio=2.25, attention_backward_ratio=2.5,
    layer_overhead_s=1e-6, pair_overhead_s=1e-9, plain_bytes_per_s=8e8, return_bytes_per_s=3e8, score_flops_per_s=4e11,
    element_overhead_s=1e-11, tile_pairs=16, host_layer_s=1e-4, precision="fp8", calibrated=True, residual=0.125,
    slot_backward_s=3e-6, source="made up",
)  # fmt: skip


def complete_plan() -> Plan:
    """Blocks of re-forward, a fitted cluster, whole sequences dealt."""
    mix = np.arange(M * L * G * E).reshape(M, L, G, E)
    load_MLGE = ((mix * 7919 + 13) % 23 + 40 * ((mix * 31) % 17 == 0)).astype(np.int32)
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=2, model="tiny", moe_layer_L=np.arange(1, 1 + L, dtype=np.int32))
    schedule = dataclasses.replace(foremoe.Schedule.interleaved(M, 2, 2, 0, reforward=True), chunk_L=np.array([0, 0, 0, 1]))
    schedule = dataclasses.replace(schedule, block_L=np.array([0, 0, 1, 2]))
    problem = foremoe.Problem.of(
        work, CLUSTER, model=MODEL, redundant=1, schedule=schedule, cost=foremoe.CostModel(objective="balance", overlap=0.5),
        slot_depth=2,
    )  # fmt: skip
    key = foremoe.PlanKey(step=3, stage="update", mini_batch=1, ep_group=2)
    planner = foremoe.Planner(path=Deadline())
    plan, _ = planner.plan(problem, key=key)
    header = dataclasses.replace(
        plan.header, trace_id="of no trace",
        dealt=Dealt(tokens_per_rank=8, packer="AsGiven()", seed=5, over_budget=(1, 4), dropped_micro_steps=2),
    )  # fmt: skip
    return dataclasses.replace(plan, header=header, transfers=planner.path.solve(problem, plan.transfers))
