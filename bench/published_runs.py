"""Predicts the throughput of published training runs from their settings: one simulated layer and all other work of a step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from bench.published_rows import Row
from foremoe.machine.cluster import Cluster
from foremoe.machine.elements import element_shares
from foremoe.machine.model import Model
from foremoe.machine.trainer import Trainer
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.simulate import head_seconds, optimizer_seconds, reduction_seconds, simulate
from foremoe.simulate.result import Simulation
from foremoe.workload.workload import Workload

# Boxes of GPUs that have a preset.
PRESETS = {
    "H100": "8xh100", "H200": "8xh200", "H800": "8xh800", "A100": "8xa100", "B200": "8xb200", "B300": "8xb300",
    "GB200": "gb200-nvl72", "GB300": "gb300-nvl72",
}  # fmt: skip
# Dispatchers whose host reads counts from the device in every layer, and host seconds of a launch: `bench.overheads`.
COUNTED, LAUNCH_S = ("alltoall", "deepep"), 59e-6
# Kernel launches of a layer's forward pass, a third of the 150.8 of both passes, as the backward pass has two GEMMs for each GEMM
# of the forward pass (Megatron Bridge, skill moe-comm-overlap: Qwen3-30B-A3B, with the router in a graph).
LAUNCHES = 150.8 * (1.0 / 3.0)
# Key of a setting that holds constants which a fit tries.
TRIED = "_cluster"
# Share of a GPU's SMs that exchange kernels take: 24 of DeepEP (its page on V1) of 132 and 148.
EXCHANGE_SMS = {gpu: 24 / (132 if gpu in ("H100", "H200", "H800") else 148) for gpu in PRESETS}
# Backward's share of forward and backward: what is left of a reduction behind the last micro-step's backward shows.
_BACKWARD = 2.0 / 3.0


class Lacks(Exception):
    """The model cannot express a row; the message says what it lacks."""


class Stage(NamedTuple):
    """The layers of one pipeline rank."""

    moe: int
    heads: int


def preset(row: Row, num_ranks: int, dispatch: str) -> Cluster:
    """The preset of the usual box of a row's GPU, at the precision of the row's GEMMs; MXFP8 is FP8 with smaller blocks."""
    if row.gpu not in PRESETS:
        raise Lacks(f"a preset of {row.gpu}")
    precision = "fp8" if row.kind in ("throughput", "gemm") and row.precision.endswith("FP8") else "bf16"
    per_node = row.setting.get("ranks_per_node")
    cluster = Cluster.preset(PRESETS[row.gpu], num_ranks, ranks_per_node=per_node, dispatch=dispatch, precision=precision)
    tried = {key: value for key, value in row.setting.get(TRIED, {}).items() if key != "launch_s"}
    return dataclasses.replace(cluster, **tried)


def cluster_of(row: Row) -> Cluster:
    """The cluster of a row's EP group."""
    s = row.setting
    cluster = preset(row, s["ep"], "pairs" if s["dispatcher"] == "alltoall" else "node")
    if {"grouped_mlp", "fp8_attention"} <= set(s.get("fused", ())):
        # The activation is a part of the GEMMs, and scores run at FP8's speed, twice that of bf16.
        left = 1.0 - element_shares(_model_of(row)).activation
        assert cluster.score_flops_per_s is not None
        cluster = dataclasses.replace(
            cluster, element_overhead_s=left * cluster.element_overhead_s, score_flops_per_s=2.0 * cluster.score_flops_per_s
        )
    counted = s["dispatcher"] in COUNTED and "iteration" not in s.get("graphs", ())
    launch_s = s.get(TRIED, {}).get("launch_s", LAUNCH_S)
    return dataclasses.replace(cluster, host_layer_s=LAUNCHES * launch_s) if counted else cluster


def _model_of(row: Row) -> Model:
    return Model.preset(row.model)


def stages(model: Model, setting: Mapping[str, Any]) -> list[Stage]:
    """The layers of every pipeline rank: by the row's layout, else even, embedding and head in the outer stages."""
    pp, total = setting["pp"], model.num_layers + model.first_moe_layer
    if "layout" in setting:
        text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), setting["layout"])
        chunks = re.sub(r"t\*(\d+)", lambda m: "t" * int(m[1]), text).split("|")
        return [Stage(sum(c.count("t") for c in chunks[r::pp]), sum(c.count("L") for c in chunks[r::pp])) for r in range(pp)]
    most = -(-total // pp)
    return [Stage(most, 0)] * (pp - 1) + [Stage(most if total % pp == 0 else most - 1, 1)]


def posed(row: Row, num_layers: int, heads: int) -> Problem:
    """One micro-step of `num_layers` MoE layers with even routing, pair by pair; with `heads`, the last layers."""
    s, model, cluster = row.setting, _model_of(row), cluster_of(row)
    num_layers = min(num_layers, model.num_layers)
    tokens = s["micro_batch_size"] * s["sequence_length"] // (s["tp"] * s["cp"])
    load_MLGE = np.full((1, num_layers, s["ep"], model.num_experts), tokens * model.num_topk // model.num_experts)
    first = model.first_moe_layer + (model.num_layers - num_layers if heads else min(1, model.num_layers - num_layers))
    squares = s["micro_batch_size"] * s["sequence_length"] ** 2 / (s["tp"] * s["cp"])
    work = Workload.from_counts(
        load_MLGE, num_topk=model.num_topk, tokens_MG=np.full((1, s["ep"]), tokens), model=row.model,
        attention_MG=np.full((1, s["ep"]), squares), moe_layer_L=np.arange(first, first + num_layers),
    )  # fmt: skip
    schedule = Schedule.accumulate(1, reforward="full" in s["recompute"])
    return Problem.of(work, cluster, model=model, redundant=0, schedule=schedule)


def recompute_seconds(model: Model, cluster: Cluster, parts: Collection[str], tokens: float, sum_len_sq: float) -> float:
    """Seconds that recomputation adds to a layer's backward pass, without exchanges and with balanced ranks.

    `parts` names norms (layernorm), the experts' activation (moe_act), shared experts (mlp), scores and values (core_attn), and
    everything in the experts (moe). Other names add no time. `sum_len_sq` is the sum of the squared sequence lengths.
    """
    norms, activation, moved = element_shares(model)
    again = norms * ("layernorm" in parts) + activation * ("moe_act" in parts or "moe" in parts) + moved * ("moe" in parts)
    params = model.shared_params * ("mlp" in parts or "moe" in parts) + model.num_topk * model.expert_params * ("moe" in parts)
    token_s = again * model.hidden_size * cluster.element_overhead_s + 2.0 * params / cluster.expert_flops_per_s
    scores = float(model.attention_flops(0.0, sum_len_sq)) * ("core_attn" in parts)
    return token_s * tokens + scores / (cluster.score_flops_per_s or cluster.attention_flops_per_s)


def layer_seconds(row: Row, simulation: Simulation) -> float:
    """Seconds of one layer, with what it recomputes.

    Exchanges that overlap another micro-step's compute show what is longer than it; compute lacks their SMs meanwhile.
    """
    s, parts, model = row.setting, simulation.parts, _model_of(row)
    tokens = s["micro_batch_size"] * s["sequence_length"] / (s["tp"] * s["cp"])
    exchange_s = parts.dispatch_s + parts.combine_s
    again_s = recompute_seconds(model, cluster_of(row), s["recompute"], tokens, tokens * s["sequence_length"])
    if "moe" in s["recompute"]:
        exchange_s *= 1.5  # a dispatch and a combine beside those of forward and backward
    work_s = parts.total_s - parts.dispatch_s - parts.combine_s + again_s
    if "ep" in s["overlap"]:
        return max(exchange_s, work_s + EXCHANGE_SMS[row.gpu] * min(exchange_s, work_s))
    return work_s + exchange_s


def step_seconds(row: Row) -> float:
    """Seconds of one training step."""
    s, model, cluster = row.setting, _model_of(row), cluster_of(row)
    one = posed(row, 1, 0)
    layer_s = layer_seconds(row, simulate(one, Planner(rank=()).plan(one)[0]))
    # Attention gathers its tokens and scatters its sums: two exchanges forward, three backward, of what the other ranks have.
    tokens = s["micro_batch_size"] * s["sequence_length"] // s["cp"]
    layer_s += 5 * tokens * model.token_bytes * (s["tp"] - 1) / s["tp"] / cluster.peer_bytes_per_s
    with_head = posed(row, 1, 1)
    passes = 1.0 + cluster.window_backward_ratio + with_head.schedule.reforward
    head_s = passes * float(head_seconds(with_head).max())
    every = stages(model, s)
    stage_s = max(stage.moe * layer_s + stage.heads * head_s for stage in every)
    micro_steps = s["global_batch_size"] // (s["micro_batch_size"] * s["dp"])
    run_s = stage_s * (micro_steps + (s["pp"] - 1) / s["vpp"])
    full = posed(row, every[-1].moe, 1)
    trainer = Trainer(data_parallel=max(1, row.num_gpus // (s["ep"] * s["pp"])))
    reduction_s = reduction_seconds(full, trainer)
    if {"grad", "param"} <= set(s["overlap"]) or s["sharding"] == "parameters":
        reduction_s = max(0.0, reduction_s - _BACKWARD * stage_s)
    return run_s + reduction_s + optimizer_seconds(full, trainer)


def throughput(row: Row) -> float:
    """The figure of a row in its own unit."""
    s, seconds = row.setting, step_seconds(row)
    if row.unit == "s/step":
        return seconds
    tokens_per_s = s["global_batch_size"] * s["sequence_length"] / (row.num_gpus * seconds)
    return tokens_per_s * s["gflop_per_token"] / 1e3 if row.unit == "TFLOP/s/GPU" else tokens_per_s
