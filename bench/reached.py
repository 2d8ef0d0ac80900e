"""Measures the error of estimating tokens per rank or node from counts, on recorded routing (skipped if there is none).

    python -m bench.reached [--data ../shared/data] [--out bench/results/reached_HARDWARE_DATE.md]

A chunk of 1024 tokens represents the tokens that one rank sends. Experts are in 2 to 32 places of equal size, in order. The first
table shows the ratio of estimated to counted messages for a chunk and layer. One estimate is that of `reached`. The other assumes
that experts are drawn with repetition.

Further tables show whole stages, with experts at home and with a plan. They show the ratio of two simulated times. One time uses
the estimate, and the other counts every token. The last stages have eight nodes, where plans let groups of nodes serve their own
tokens. Their table shows how much these groups shorten a stage, both with the estimate and with counted tokens.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np

import foremoe
from bench.cases import RECORDED
from bench.output import command_line, emit, hardware
from foremoe.base.arrays import Array
from foremoe.problem.kernels.reached import reached
from foremoe.simulate import simulate

CHUNK, CHUNKS, PLACES = 1024, 16, (2, 4, 8, 16, 32)
LAYERS, GROUP_TOKENS = 8, 4096
FILES = {"gpt-oss-20b": "gpt_oss_20b_decode", "DeepSeek-V2-Lite, law": "esft_law", "DeepSeek-V2-Lite, intent": "esft_intent"}


def ratios(topk_TLK: Array, num_experts: int, places: int) -> tuple[Array, Array]:
    """Estimated over counted messages of every chunk and layer, without and with repetition."""
    K, out = topk_TLK.shape[2], []
    for first in range(0, min(len(topk_TLK) - CHUNK + 1, CHUNKS * CHUNK), CHUNK):
        for layer in range(topk_TLK.shape[1]):
            place_TK = topk_TLK[first : first + CHUNK, layer].astype(np.int64) // (num_experts // places)
            counted = sum(len(np.unique(row)) for row in place_TK)
            pairs_X = np.bincount(place_TK.ravel(), minlength=places)
            apart = sum(reached(float(CHUNK), float(pairs), K, num_experts) for pairs in pairs_X)
            again = CHUNK * (1.0 - (1.0 - pairs_X / (CHUNK * K)) ** K).sum()
            out.append((apart / counted, again / counted))
    apart_X, again_X = np.array(out).T
    return apart_X, again_X


def stages(file: Path, model: str, num_ranks: int) -> list[str]:
    """Table rows of one recording: exchange seconds and stage seconds, estimated over counted, by planner."""
    trace = foremoe.RoutingTrace.load(file, model=model)
    tokens = min(4096, trace.T // num_ranks)
    work = foremoe.Workload.from_trace(trace, num_ranks=num_ranks, tokens_per_rank=tokens)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks, dispatch="node")
    counted = foremoe.Problem.of(work, cluster, routed=foremoe.RoutedTokens.of(trace, work))
    lines = []
    for name in ("static", "foremoe"):
        plan, _ = foremoe.resolve(name).plan(counted)
        both = [simulate(problem, plan) for problem in (counted, dataclasses.replace(counted, routed=None))]
        exchange, stage = (
            both[1].parts.dispatch_s / both[0].parts.dispatch_s, both[1].total_s / both[0].total_s,
        )  # fmt: skip
        size = f"EP{num_ranks}, {cluster.num_nodes} nodes, {tokens} tokens per rank"
        lines.append(f"| {file.stem} ({trace.model}) | {size} | {name} | {exchange:.3f} | {stage:.3f} |")
    return lines


def groups(file: Path, model: str, num_ranks: int, redundant: int) -> str:
    """A table row of one recording on eight nodes, its tokens repeated: what groups of nodes shorten."""
    trace = foremoe.RoutingTrace.load(file, model=model)
    times = -(-num_ranks * GROUP_TOKENS // trace.T)
    again = foremoe.RoutingTrace(
        topk_TLK=np.repeat(trace.topk_TLK[:, :LAYERS], times, axis=0), num_experts=trace.num_experts,
        seq_len_Q=trace.seq_len_Q * times,
    )  # fmt: skip
    work = foremoe.Workload.from_trace(again, num_ranks=num_ranks, tokens_per_rank=GROUP_TOKENS)
    node_G = np.arange(num_ranks, dtype=np.int32) * 8 // num_ranks
    cluster = dataclasses.replace(foremoe.Cluster.preset("8xh100", num_ranks, dispatch="node"), node_of_rank_G=node_G)
    shape = foremoe.Model.preset(model)
    problem = foremoe.Problem.of(work, cluster, redundant=redundant, model=shape)
    counted = dataclasses.replace(problem, routed=foremoe.RoutedTokens.of(again, work))
    cells = []
    for part in ((), ("groups",)):
        plan, _ = foremoe.Planner(rank=(foremoe.solvers.Search(without=part),)).plan(problem)
        runs = [simulate(posed, plan) for posed in (problem, counted)]
        cells.append([(run.parts.dispatch_s, run.total_s) for run in runs])
    ratios_RP = np.array(cells[1]) / np.array(cells[0])
    shorter = " | ".join(f"{x:.3f}" for x in ratios_RP.T.ravel())
    return f"| {file.stem} ({model}) | EP{num_ranks}, R = {redundant} | {shorter} |"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, default=RECORDED)
    args = parser.parse_args()
    if not (args.data / f"{FILES['gpt-oss-20b']}.npz").exists():
        sys.exit(f"skipped: no recorded routing in {args.data}")
    lines = [
        "# Tokens per place, estimated from counts", "", f"{hardware()}. Command: `python -m bench.reached`.", "",
        "| routing | places | estimate / count, mean | single chunk and layer | with repetition, mean |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, file in FILES.items():
        stored = np.load(args.data / f"{file}.npz", allow_pickle=False)
        for places in PLACES:
            apart_X, again_X = ratios(stored["topk_ids"], int(stored["num_experts"]), places)
            span = f"{apart_X.min():.3f} to {apart_X.max():.3f}"
            lines.append(f"| {name} | {places} | {apart_X.mean():.3f} | {span} | {again_X.mean():.3f} |")
    lines += [
        "", "Simulated stages, by the estimate over by counted tokens:", "",
        "| routing | case | plan | dispatch | stage |", "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, file in FILES.items():
        model = "gpt-oss-20b" if name == "gpt-oss-20b" else "deepseek-v2-lite"
        for num_ranks in (16, 32):
            lines += stages(args.data / f"{file}.npz", model, num_ranks)
    lines += [
        "", f"Eight nodes, {GROUP_TOKENS} tokens per rank, tokens repeated: without groups of nodes over with them, from the"
        " estimate and counted:", "", "| routing | case | dispatch | dispatch, counted | stage | stage, counted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, num_ranks in (("gpt-oss-20b", 32), ("DeepSeek-V2-Lite, law", 64), ("DeepSeek-V2-Lite, intent", 64)):
        model = "gpt-oss-20b" if name == "gpt-oss-20b" else "deepseek-v2-lite"
        lines += [groups(args.data / f"{FILES[name]}.npz", model, num_ranks, redundant) for redundant in (1, 2, 4)]
    emit("\n".join([*lines, ""]), args.out)


if __name__ == "__main__":
    main()
