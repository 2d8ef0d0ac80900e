"""Predicts published bandwidths, copy times, grouped GEMMs and ratios from their settings."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

import foremoe
from bench.published_rows import Row
from bench.published_runs import cluster_of, preset
from bench.systems import systems
from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.machine.tiles import padded_pairs
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.simulate import System, simulate, simulate_systems
from foremoe.simulate.traffic import exchange
from foremoe.solvers import LeastLoaded
from foremoe.synthetic.counts import Regime, synthetic_workload
from foremoe.workload.workload import Workload

# Letters: T tokens, G ranks, K top-k, E experts, V nodes or groups of experts, M micro-steps, L layers.

NUM_GROUPS = 8  # of experts, where a row bounds the groups of a token (DeepSeek-V3)


def topk_of(rng: np.random.Generator, num_tokens: int, num_experts: int, topk: int, groups: int | None) -> Array:
    """int64 [T, K]: distinct random experts of each token, of at most `groups` groups."""
    score_TVX = rng.random((num_tokens, NUM_GROUPS if groups else 1, num_experts // (NUM_GROUPS if groups else 1)), np.float32)
    if groups:
        far_TV = np.argsort(-score_TVX.max(axis=2), axis=1)[:, groups:]
        np.put_along_axis(score_TVX, far_TV[:, :, None], -1.0, axis=1)
    return np.argpartition(-score_TVX.reshape(num_tokens, num_experts), topk, axis=1)[:, :topk]


def kernel_bandwidth(cluster: Cluster, model: Model, tokens_per_rank: int, groups: int | None) -> float:
    """GB/s as DeepEP counts them: bytes of a rank's tokens, once for every node (or rank, in one node) that serves them."""
    G, V = cluster.num_ranks, cluster.num_nodes
    topk_TK = topk_of(np.random.default_rng(0), G * tokens_per_rank, model.num_experts, model.num_topk, groups)
    trace = foremoe.RoutingTrace(
        topk_TLK=topk_TK[:, None], num_experts=model.num_experts, seq_len_Q=np.full(G, tokens_per_rank), moe_layer_L=np.array([0])
    )  # fmt: skip
    work = Workload.from_trace(trace, num_ranks=G, tokens_per_rank=tokens_per_rank)
    problem = Problem.of(work, cluster, model=model, redundant=0, routed=foremoe.RoutedTokens.of(trace, work))
    plan, _ = foremoe.resolve("static").plan(problem)
    sent = exchange(problem, plan, np.ones(1, np.int64))
    seconds = max(float(sent.peer_N[0]), float(sent.rdma_N[0])) + cluster.exchange_latency_s
    place_TK = np.sort(topk_TK // (model.num_experts // (G if V == 1 else V)), axis=1)
    copies = place_TK.shape[0] + int((np.diff(place_TK, axis=1) > 0).sum())
    return copies / G * model.token_bytes / seconds / 1e9


def bandwidth(row: Row) -> float:
    """GB/s of a collective, counted as its source counts them."""
    s, G = row.setting, row.num_gpus
    plain = s["kernel"] == "nccl"
    cluster = preset(row, G, "pairs" if plain else "node")
    if not plain:
        # FP8 sends a byte for each number and a scale of four for every 128.
        size = 1.0 + 4.0 / 128.0 if row.precision == "FP8" else 2.0
        model = Model.of(
            num_layers=1, num_experts=s["num_experts"], num_topk=s["topk"], hidden_size=s["hidden_size"], ffn_size=2048,
            bytes_per_activation=size,
        )  # fmt: skip
        return kernel_bandwidth(cluster, model, s["tokens_per_rank"], s.get("topk_nodes"))
    near, size = min(s["ranks_per_node"], G), s["message_bytes"]
    peer, far = (1.0, 0.0) if s["collective"] == "sendrecv" else ((near - 1) / G, (G - near) / G)
    seconds = size * max(peer / cluster.kernel_bytes_per_s, far / cluster.rdma_bytes_per_s_per_rank) + cluster.exchange_latency_s
    return size * (peer + far) / seconds / 1e9


def copy_ms(row: Row) -> float:
    """Milliseconds of the busiest rank's copies: one after the other, or by relays, which double what can be sent each round."""
    s, cluster = row.setting, preset(row, row.num_gpus, "node")
    rounds = math.ceil(math.log2(s["copies_max"] + 1)) if s["path"] == "relay" else s["copies_max"]
    seconds = cluster.return_seconds if s["what"] == "gradients" else cluster.copy_seconds
    return 1e3 * rounds * seconds(s["expert_bytes"])[0]


def gemm(row: Row) -> float:
    """TFLOP/s or milliseconds of one grouped GEMM."""
    s = row.setting
    cluster = preset(row, 1, "node")
    rows_X = np.broadcast_to(s["rows_of_groups"], s["groups"])
    row_flops, padded_X = 2.0 * s["n"] * s["k"], padded_pairs(rows_X, cluster.tile_pairs)
    seconds = row_flops * float(padded_X.sum()) / cluster.expert_flops_per_s + s["groups"] * cluster.slot_overhead_s
    return 1e3 * seconds if row.unit == "ms" else row_flops * float(rows_X.sum()) / seconds / 1e12


# Ratios.


def hot_ratio(row: Row) -> float:
    """Speed-up of a layer's forward where the first experts have a share of all pairs."""
    s = row.setting
    E, G = s["num_experts"], s["ep"]
    model = Model.of(num_layers=1, num_experts=E, num_topk=s["topk"], hidden_size=s["hidden_size"], ffn_size=s["ffn_size"])
    pairs, hot = s["tokens_per_rank"] * s["topk"], s["hot_experts"]
    share_E = np.where(np.arange(E) < hot, s["hot_share"] / hot, (1.0 - s["hot_share"]) / (E - hot))
    edge_E = np.rint(pairs * np.cumsum(share_E)).astype(np.int64)
    load_E = np.diff(edge_E, prepend=0)
    load_MLGE = np.broadcast_to(load_E, (1, 1, G, E))
    work = Workload.from_counts(load_MLGE, num_topk=s["topk"], moe_layer_L=np.array([0]), stage="recompute")
    problem = Problem.of(work, cluster_of(row), model=model, redundant=0)
    spread = dataclasses.replace(problem, redundant=E // G)
    static, spilled = Planner(rank=()), Planner(rank=(LeastLoaded(alpha=1.0, threshold=1.3),), guard=False)
    seconds = []
    for one, planner, known in ((problem, static, "rollout"), (spread, spilled, "router")):
        parts = simulate(one, planner.plan(one)[0], known=known).parts
        seconds.append(parts.total_s - parts.window_s)
    return seconds[0] / seconds[1]


SYSTEMS = {"none": "static", "EPLB": "eplb-history", "UltraEP": "UltraEP-like", "force-balanced": "force-balanced"}
_DONE: dict[str, dict[str, float]] = {}


def skewed(model: Model, ep: int, tokens: int, wanted: float | None) -> Workload:
    """Synthetic counts of the regime *mid* with its spread changed until the mean skew is the wanted one."""
    low, high = 0.0, 4.0
    for _ in range(12):
        sigma = (low + high) / 2 if wanted else Regime.preset("mid").sigma
        regime = dataclasses.replace(Regime.preset("mid"), sigma=sigma, burst_chance=0.0, walk_std=0.1, kappa=16.0)
        work = synthetic_workload(model, num_ranks=ep, tokens_per_rank=tokens, micro_steps=2, regime=regime, num_layers=4)
        load_MLG = work.load_MLGE.sum(axis=2).reshape(2, 4, ep, -1).sum(axis=3)
        skew = float((load_MLG.max(axis=2) / load_MLG.mean(axis=2)).mean())
        if not wanted:
            break
        low, high = (sigma, high) if skew < wanted else (low, sigma)
    return work


def ratio(row: Row) -> float:
    """One system's throughput over another's."""
    s = row.setting
    if "hot_share" in s:
        return hot_ratio(row)
    key = row.id.removesuffix("-ideal-over-none").removesuffix("-share-of-ideal").removesuffix("-eplb-over-none")
    if key not in _DONE:
        model = _model(row)
        tokens = s["sequence_length"] * s["micro_batch_size"]
        work = skewed(model, s["ep"], tokens, s.get("skew_before"))
        work = dataclasses.replace(
            work, attention_MG=np.full((work.M, work.G), float(s["sequence_length"]) ** 2 * s["micro_batch_size"])
        )
        schedule = Schedule.accumulate(work.M, reforward="full" in s["recompute"])
        problem = Problem.of(work, cluster_of(row), model=model, redundant=s["slots_per_rank"], schedule=schedule)
        named: dict[str, System] = systems(problem.B)
        lines = simulate_systems([problem], {name: named[name] for name in SYSTEMS.values()})
        _DONE[key] = {line["solver"]: line["simulated_stage_s"] for line in lines}
    return _DONE[key][SYSTEMS[s["over"]]] / _DONE[key][SYSTEMS[s["system"]]]


def _model(row: Row) -> Model:
    """The row's preset, or the sizes that it names."""
    s: Any = row.setting
    if row.model in Model.preset_names():
        return Model.preset(row.model)
    return Model.of(
        name=row.model, num_layers=s["num_layers"], num_experts=s["num_experts"], num_topk=s["topk"],
        hidden_size=s["hidden_size"], ffn_size=s["ffn_size"],
    )  # fmt: skip
