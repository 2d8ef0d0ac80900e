"""Compares update stages of published systems and of foremoe in one simulator, on nodes of 8 GPUs and in one NVL72 domain.

    python -m bench.throughput [--out bench/results/throughput_HARDWARE_DATE.md]

Stages are simulated with the constants of the cluster presets (uncalibrated). Recorded loads are shown first. Recorded routing is
not part of this repository, and its columns are left out if it is not available.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import foremoe
from bench.cases import ESFT
from bench.output import command_line, emit, hardware
from bench.settings import BOTH, DISPATCHES, under
from bench.systems import (
    GRANTED,
    NOTES,
    OURS,
    buffers,
    group_problems,
    mb_per_rank,
    mean_skew,
    recorded_r1,
    recorded_workload,
    span,
    step_trainer,
    synthetic_groups,
    systems,
)
from foremoe.machine.cluster import Cluster
from foremoe.problem.problem import Problem
from foremoe.simulate import simulate_systems

NUM_RANKS, TOKENS, RACK = 64, 8192, "gb200-nvl72"
GPT_OSS = ("gpt_oss_20b_decode.npz",)
R1 = (("8xh100", 8), ("8xh100", 16), ("8xh100", 32), (RACK, 32))
RECORDED = (
    ("gpt-oss-20b", GPT_OSS, "gpt-oss-20b", 8, 4096), ("gpt-oss-20b", GPT_OSS, "gpt-oss-20b", 16, 2048),
    ("ESFT", ESFT, "deepseek-v2-lite", 8, 1024),
)  # fmt: skip
SYNTHETIC: tuple[tuple[str, str, str, tuple[int, ...]], ...] = (
    ("r1-like", "deepseek-v3", "8xh100", (8, 16, 64)), ("qwen3-like", "qwen3-235b-a22b", "8xh100", (8, 16, 64)),
    ("gpt-oss-math-like", "gpt-oss-120b", "8xh100", (8,)), ("mid", "qwen3-30b-a3b", "8xh100", (16, 64)),
    ("r1-like", "deepseek-v3", RACK, (64,)), ("qwen3-like", "qwen3-235b-a22b", RACK, (64,)),
)  # fmt: skip
DOMAIN = {RACK: " NVL72"}
# The tables in short, and that of README: speed-up over static on some loads.
SHORT = (
    "static", "eplb-step", "LLEP", "UltraEP-like, hidden", "MoonEP-like, hidden", "ECHO-like, with foresight", "TAOT-like",
    "quota anywhere, with foresight", "ReLibra-like", "foremoe", "foremoe, R = 1", "foremoe, R = 1, homes moved",
    "force-balanced",
)  # fmt: skip
README = {
    "R1 recorded, EP8/16/32": ("R1 recorded EP8", "R1 recorded EP16", "R1 recorded EP32"),
    "gpt-oss recorded, EP8/16": ("gpt-oss-20b recorded EP8", "gpt-oss-20b recorded EP16"),
    "qwen3-like, EP8/16/64": ("qwen3-like EP8", "qwen3-like EP16", "qwen3-like EP64"),
    "NVL72, EP64, r1-like/qwen3-like": ("r1-like EP64 NVL72", "qwen3-like EP64 NVL72"),
}  # fmt: skip
Row = dict[str, Any]


class Column(NamedTuple):
    """One load on one machine: its EP groups, of which the first micro-step is only history."""

    name: str
    problem: Problem


def columns(micro_steps: int, layers: int) -> Iterator[Column]:
    """Recorded loads, then synthetic ones across nodes of 8 and in one domain."""
    for cluster, sizes in (("8xh100", (8, 16, 32)), (RACK, (32,))):
        for ep in sizes:
            work = recorded_r1(ep, TOKENS, micro_steps + 1, layers)
            if work is not None:
                (problem,) = group_problems(work, "deepseek-v3", ep, 8, Cluster.preset(cluster, ep), 1)
                yield Column(f"R1 recorded EP{ep}{DOMAIN.get(cluster, '')}", problem)
    for name, files, model, ep, tokens in RECORDED:
        work = recorded_workload(files, model, ep, tokens)
        if work is not None:
            yield Column(f"{name} recorded EP{ep}", group_problems(work, model, ep, 8, None, 1)[0])
    for regime, model, cluster, several in SYNTHETIC:
        for ep in several:
            (problem,) = synthetic_groups(
                model, num_ranks=ep, ep=ep, tokens_per_rank=TOKENS, micro_steps=micro_steps + 1, regime=regime, num_layers=layers,
                cluster=Cluster.preset(cluster, ep),
            )  # fmt: skip
            yield Column(f"{regime} EP{ep}{DOMAIN.get(cluster, '')}", problem)


def rows_of(problem: Problem) -> dict[str, Row]:
    """Every system on one load, with the buffers that it holds."""
    counted = problem[1:]
    named = systems(problem.B, foremoe.choose_slots(counted).redundant)
    trainer = step_trainer([counted], max(1, NUM_RANKS // problem.G))
    rows = simulate_systems([counted], named, history_LE=[problem.load_MLE[0]], trainer=trainer)
    found = {row["solver"]: row for row in rows}
    for name, row in found.items():
        row["num_ranks"], row["buffers"] = problem.G, buffers(named[name], counted)
    return found


def rivals(rows: dict[str, Row], granted: bool) -> dict[str, Row]:
    """The rows of others that could run as they are; with `granted`, also what they could do with more than they publish."""
    out = ("static", "force-balanced", *OURS, *(() if granted else GRANTED))
    return {name: row for name, row in rows.items() if row["n_solved"] and name not in out}


def lead(rows: dict[str, Row], mine: str, granted: bool) -> str:
    """Says how much faster a row of ours is than the best of the others, and names that one."""
    others = rivals(rows, granted)
    best = min(others, key=lambda name: others[name]["simulated_stage_s"])
    gain = others[best]["simulated_stage_s"] / rows[mine]["simulated_stage_s"] - 1.0
    return f"{gain:+.1%} ({best})"


def table(found: dict[str, dict[str, Row]], names: Sequence[str] = ()) -> str:
    """Share of force-balanced throughput, and x static, of every system on every load; slots, buffers and bytes over all."""
    heads = list(found)
    lines = ["| share of force-balanced (x static) | slots | buffers | GB | MB | " + " | ".join(heads) + " |"]
    lines.append("|" + " --- |" * (len(heads) + 5))
    for name in names or list(found[heads[0]]):
        run = {head: rows[name] for head, rows in found.items() if rows[name]["n_solved"]}
        held = [row["buffers"] for row in run.values() if row["buffers"] is not None]
        costs = [
            span(str(row["slots_per_rank"]) for row in run.values()), span(str(count) for count, _ in held),
            span(f"{size / 1e9:.2f}" for _, size in held), span(mb_per_rank(row, row["num_ranks"]) for row in run.values()),
        ]  # fmt: skip
        cells = [f"{run[h]['share_of_balanced']:.1%} ({run[h]['speedup_vs_static']:.2f})" if h in run else "-" for h in heads]
        lines.append(f"| {name} | {' | '.join(costs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def short(found: dict[str, dict[str, Row]]) -> str:
    """README's table: speed-up over static, slots and buffers (fewest to most over these loads)."""
    heads = {head: [name for name in names if name in found] for head, names in README.items()}
    heads = {head: names for head, names in heads.items() if names}
    lines = ["| x static, dispatch node | slots | buffers | " + " | ".join(heads) + " |", "|" + " --- |" * (len(heads) + 3)]
    for name in SHORT:
        run = [found[head][name] for names in heads.values() for head in names]
        slots, held = (
            span(str(row["slots_per_rank"]) for row in run),
            span(str(row["buffers"][0]) for row in run if row["buffers"]),
        )
        cells = ["/".join(f"{found[head][name]['speedup_vs_static']:.2f}" for head in names) for names in heads.values()]
        lines.append(f"| {name} | {slots} | {held} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(found: dict[str, dict[str, Row]], skews: dict[str, float]) -> str:
    """Lists the gain of foremoe over the best of the others, load by load."""
    lines = [
        "| load | skew at home | foremoe over the best as published | over the best, all hidden and foreseen | foremoe, R = 1,"
        " homes moved, over it |",
        "|" + " --- |" * 5,
    ]
    for head, rows in found.items():
        told = [lead(rows, "foremoe", False), lead(rows, "foremoe", True), lead(rows, "foremoe, R = 1, homes moved", True)]
        lines.append(f"| {head} | {skews[head]:.2f} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4, help="of one pipeline rank")
    args = parser.parse_args()
    found: dict[str, dict[str, dict[str, Row]]] = {dispatch: {} for dispatch in DISPATCHES}
    skews = {}
    for column in columns(args.micro_steps, args.layers):
        skews[column.name] = mean_skew([column.problem[1:]])
        for dispatch in DISPATCHES:
            print(f"{column.name}, {dispatch}", file=sys.stderr, flush=True)
            found[dispatch][column.name] = rows_of(under(dispatch, [column.problem])[0])
    head = (
        f"# Update stages of published systems and of foremoe (simulated)\n\nPlanned and simulated on: {hardware()}. Command:"
        f" `python -m bench.throughput --micro-steps {args.micro_steps} --layers {args.layers}`. Simulated, constants of the"
        f" presets, uncalibrated. One EP group of {NUM_RANKS} GPUs of 8xh100 in nodes of 8, or ({RACK}, *NVL72*) in one NVLink"
        f" domain; R = 1 for others unless a row says otherwise, {TOKENS} tokens per GPU and micro-step,"
        f" {args.micro_steps} micro-steps x"
        f" {args.layers} layers. Recorded: DeepSeek-R1's counts (decoding; no drift from micro-step to micro-step), and routing"
        " of gpt-oss-20b (4096 tokens per GPU at EP8, 2048 at EP16) and ESFT (DeepSeek-V2-Lite, 1024) with all layers and as many"
        " micro-steps as there are. Synthetic: r1-like DeepSeek-V3, qwen3-like Qwen3-235B-A22B, gpt-oss-math-like gpt-oss-120b,"
        f" mid Qwen3-30B-A3B. {BOTH}\n\n"
    )
    notes = "\n".join(f"* {note}" for note in NOTES)
    parts = [f"## README\n\n{short(found['node'])}"]
    parts += [f"## Dispatch {dispatch}, in short\n\n{table(of, SHORT)}" for dispatch, of in found.items()]
    parts += [
        f"## Dispatch {dispatch}, foremoe against the best of the others\n\n{verdicts(of, skews)}"
        for dispatch, of in found.items()
    ]
    parts += [f"## Dispatch {dispatch}, all systems\n\n{table(of)}" for dispatch, of in found.items()]
    emit(head + f"{notes}\n\n" + "\n\n".join(parts) + "\n", args.out)


if __name__ == "__main__":
    main()
