"""Published figures from before `published_rows.toml`, beside what the simulator gives for their setting.

Throughputs and bandwidths are compared one by one. The routing behind published ratios is not public: they are compared over the
span of settings that each system was published for, on synthetic routing of the regimes mild and mid, centre against centre.
The simulator was run on all of them before; throughputs in FP8 are fitted (`bench.overheads`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

import foremoe
from bench.overheads import OLDER
from bench.published_runs import throughput
from bench.systems import mean_skew, synthetic_groups, systems
from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.simulate import simulate_systems
from foremoe.simulate.traffic import exchange

# Letters: T tokens, G ranks, K top-k, E experts, V nodes.

BRIDGE, DEEPEP = "Megatron Bridge, performance-summary-archive.md", "DeepEP, README and page on V1"
REGIMES, DISPATCHES = ("mild", "mid"), ("pairs", "node")


class Figure(NamedTuple):
    """One published figure; a span of ratios has its ends, all else twice the same."""

    what: str
    setting: str
    source: str
    published: tuple[float, float]
    simulated: tuple[float, float]
    note: str = ""

    @property
    def error(self) -> float:
        """Centre over centre, less 1; centres are geometric means of the ends."""
        return float(np.sqrt(np.prod(self.simulated) / np.prod(self.published)) - 1.0)


# Throughput.


def throughputs() -> Iterable[Figure]:
    """Force-balanced pre-training, tokens per second and GPU; FP8 runs are fit rows."""
    for row in OLDER:
        s, note = row.setting, "fitted, with the others in FP8" if row.constant == "fp8_hopper" else ""
        where = f"EP{s['ep']} TP{s['tp']} PP{s['pp']}, {row.num_gpus} H100, {row.precision}, {s['micro_batch_size']} x 4096"
        yield Figure(row.id, f"{where}, {s['dispatcher']}", BRIDGE, (row.figure,) * 2, (throughput(row),) * 2, note)


# Bandwidth.


def grouped_topk(rng: np.random.Generator, num_tokens: int, num_nodes: int, model: Model) -> Array:
    """int64 [T, K]: experts of random tokens, of at most four nodes each, as DeepEP's tests choose them."""
    E, K = model.num_experts, model.num_topk
    score_TE = rng.random((num_tokens, E), np.float32)
    best_TV = score_TE.reshape(num_tokens, num_nodes, -1).max(axis=2)
    far_TV = np.argsort(-best_TV, axis=1)[:, 4:]
    score_TVX = score_TE.reshape(num_tokens, num_nodes, -1)
    np.put_along_axis(score_TVX, far_TV[:, :, None], -1.0, axis=1)
    return np.argpartition(-score_TVX.reshape(num_tokens, E), K, axis=1)[:, :K]


def bandwidth(num_nodes: int, tokens_per_rank: int, kind: str) -> float:
    """GB/s as DeepEP counts them: bytes of a rank's tokens, once for every node (or rank, in one node) that serves them."""
    G, model = 8 * num_nodes, Model.preset("deepseek-v3")
    topk_TK = grouped_topk(np.random.default_rng(0), G * tokens_per_rank, num_nodes, model)
    trace = foremoe.RoutingTrace(
        topk_TLK=topk_TK[:, None], num_experts=model.num_experts, seq_len_Q=np.full(G, tokens_per_rank), moe_layer_L=np.array([3])
    )  # fmt: skip
    work = foremoe.Workload.from_trace(trace, num_ranks=G, tokens_per_rank=tokens_per_rank)
    cluster = Cluster.preset(kind, G, dispatch="node")
    problem = foremoe.Problem.of(work, cluster, model=model, redundant=0, routed=foremoe.RoutedTokens.of(trace, work))
    plan, _ = foremoe.resolve("static").plan(problem)
    sent = exchange(problem, plan, np.ones(1, np.int64))
    seconds = max(float(sent.peer_N[0]), float(sent.rdma_N[0])) + cluster.exchange_latency_s
    per_place = model.num_experts // (G if num_nodes == 1 else num_nodes)
    place_TK = np.sort(topk_TK // per_place, axis=1)
    copies = place_TK.shape[0] + int((np.diff(place_TK, axis=1) > 0).sum())
    return copies / G * model.token_bytes / seconds / 1e9


def bandwidths() -> Iterable[Figure]:
    """Combine in bf16, 7168 hidden, top-8."""
    rows = (
        (1, 4096, 158.0, "V1, NVLink", ""), (2, 8192, 81.0, "V2, RDMA", ""),
        (4, 8192, 61.0, "V2, RDMA", ""), (4, 4096, 57.0, "V1, RDMA", ""), (8, 4096, 50.0, "V1, RDMA", ""),
        (2, 4096, 43.0, "V1, RDMA", "limited inside its nodes; V2 reaches twice that on H100"),
    )  # fmt: skip
    for num_nodes, tokens, published, what, note in rows:
        kind = "8xh800" if what.startswith("V1") else "8xh100"  # where each was measured
        setting = f"EP{8 * num_nodes}, {tokens} tokens per GPU, {kind}"
        yield Figure(f"DeepEP {what}, GB/s", setting, DEEPEP, (published,) * 2, (bandwidth(num_nodes, tokens, kind),) * 2, note)


# Ratios.


class Span(NamedTuple):
    """Settings that one published span of ratios is compared over."""

    what: str
    source: str
    published: tuple[float, float]
    models: tuple[str, ...]
    sizes: tuple[int, ...]
    system: str
    figure: Callable[[dict[str, dict[str, Any]], str], float]
    regimes: tuple[str, ...] = REGIMES
    dispatches: tuple[str, ...] = DISPATCHES
    gpu: str = "8xh100"
    one_domain: bool = False  # all ranks in one NVLink domain
    note: str = ""


def _over(name: str) -> Callable[[dict[str, dict[str, Any]], str], float]:
    return lambda rows, system: float(rows[name]["simulated_stage_s"] / rows[system]["simulated_stage_s"])


def _share(rows: dict[str, dict[str, Any]], system: str) -> float:
    return float(rows[system]["share_of_balanced"])


def _excess_left(rows: dict[str, dict[str, Any]], system: str) -> float:
    return float((rows[system]["skew_mean"] - 1.0) / (rows["static"]["skew_mean"] - 1.0))


RELIBRA, ULTRAEP = "ReLibra, arXiv 2605.08639", "UltraEP, arXiv 2606.04101"
QWEN, LARGE = ("qwen3-30b-a3b", "qwen3-235b-a22b"), ("qwen3-235b-a22b", "deepseek-v3")
SPANS = (
    Span("ReLibra over Megatron-LM", RELIBRA, (1.21, 1.58), QWEN, (16, 32), "ReLibra-like", _over("static")),
    Span("ReLibra over EPLB with oracle loads", RELIBRA, (1.06, 1.21), QWEN, (16, 32), "ReLibra-like", _over("eplb-step")),
    Span("ReLibra, share of balanced", RELIBRA, (0.90, 0.94), QWEN, (16, 32), "ReLibra-like", _share),
    Span(
        "UltraEP over none", ULTRAEP, (1.49, 1.49), LARGE, (32, 64), "UltraEP-like", _over("static"), one_domain=True,
        note="published mean over training and serving; the mean of its skews (1.30 to 4.01) is not given",
    ),
    Span("UltraEP, share of balanced", ULTRAEP, (0.943, 0.943), LARGE, (32, 64), "UltraEP-like", _share, one_domain=True),
    Span(
        "FEPLB, busiest rank's excess, left", "FEPLB, arXiv 2604.19654", (0.30, 0.49), QWEN, (8, 16), "FEPLB-like",
        _excess_left, dispatches=("node",), note="the published scheduler is not described; this one levels more",
    ),
    Span(
        "ForeMoE over others, at most", "ForeMoE, arXiv 2606.11867", (1.45, 1.45), QWEN, (16,), "foremoe",
        _over("static"), regimes=("mid",), note="at most; settings are not known here",
    ),
)  # fmt: skip


def spans(layers: int, micro_steps: int) -> Iterable[Figure]:
    """Published ratios beside the least and the most that the settings give."""
    for span in SPANS:
        for dispatch in span.dispatches[1:] if span.one_domain else span.dispatches:
            found, skews = [], []
            for model in span.models:
                for ep in span.sizes:
                    for regime in span.regimes:
                        rows, skew = _simulated(span, model, ep, regime, dispatch, layers, micro_steps)
                        found.append(span.figure(rows, span.system))
                        skews.append(skew)
            sizes = f"EP{min(span.sizes)} to {max(span.sizes)}" if len(span.sizes) > 1 else f"EP{span.sizes[0]}"
            domain = "one NVLink domain" if span.one_domain else f"nodes of 8, {dispatch}"
            setting = f"{' and '.join(span.models)}, {sizes}, {domain}, skew {min(skews):.2f} to {max(skews):.2f}"
            ends = (min(found), max(found)) if span.published[0] < span.published[1] else (_centre(found),) * 2
            yield Figure(span.what, setting, span.source, span.published, ends, span.note)


def _centre(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


_DONE: dict[tuple[Any, ...], tuple[dict[str, dict[str, Any]], float]] = {}


def _simulated(
    span: Span, model: str, ep: int, regime: str, dispatch: str, layers: int, micro_steps: int
) -> tuple[dict[str, dict[str, Any]], float]:
    """Rows by system of one setting, and the skew at home; each setting is simulated once."""
    of_ours = [one for one in SPANS if (one.gpu, one.one_domain) == (span.gpu, span.one_domain)]
    names = ["static", "eplb-step", *dict.fromkeys(one.system for one in of_ours), "force-balanced"]
    key = (model, ep, regime, dispatch, span.gpu, span.one_domain)
    if key not in _DONE:
        print(*key, file=sys.stderr, flush=True)
        cluster = Cluster.preset(span.gpu, ep, ranks_per_node=ep if span.one_domain else None, dispatch=dispatch)
        groups = synthetic_groups(
            model, num_ranks=ep, ep=ep, micro_steps=micro_steps, regime=regime, num_layers=layers, cluster=cluster
        )
        named = systems(groups[0].B)
        rows = simulate_systems(groups, {name: named[name] for name in names})
        _DONE[key] = {row["solver"]: row for row in rows}, mean_skew(groups)
    return _DONE[key]


# Report.


def cell(ends: tuple[float, float]) -> str:
    """One figure, or both ends of a span."""
    text = [f"{end:.0f}" if end >= 20 else f"{end:.3f}" if end < 1 else f"{end:.2f}" for end in ends]
    return text[0] if ends[0] == ends[1] else f"{text[0]} to {text[1]}"


def table(figures: Iterable[Figure]) -> tuple[list[str], list[float]]:
    """Lines of one kind of figure, and their errors."""
    lines = ["| figure | setting | source | published | simulated | error | |", "|" + " --- |" * 7]
    errors = []
    for of in figures:
        errors.append(abs(of.error))
        cells = (of.what, of.setting, of.source, cell(of.published), cell(of.simulated), f"{of.error:+.0%}", of.note)
        lines.append("| " + " | ".join(cells) + " |")
    return lines, errors


def report(layers: int, micro_steps: int) -> list[str]:
    """Markdown lines of all these figures."""
    sections, all_errors = [], []
    kinds = {"Throughput": throughputs(), "Bandwidth": bandwidths(), "Ratios": spans(layers, micro_steps)}
    for title, figures in kinds.items():
        lines, errors = table(figures)
        all_errors += errors
        sections += ["", f"### {title}", "", f"Median error {np.median(errors):.0%}, worst {max(errors):.0%}.", "", *lines]
    return [
        f"## Rows of before that file: {len(all_errors)}", "",
        f"Median error {np.median(all_errors):.0%}, {sum(error <= 0.15 for error in all_errors)} within 15 %. Spans: least and"
        " most over the settings; error: geometric centre over geometric centre.", *sections,
    ]  # fmt: skip
