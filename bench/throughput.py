"""Throughput of the update stage on 64 GPUs: published systems and foremoe on one simulator, and against force-balanced.

    python -m bench.throughput [--out bench/results/throughput_HARDWARE_DATE.md]

Simulated with the constants of the cluster preset (uncalibrated). Loads are synthetic (`foremoe.synthetic`); where recorded
routing is at hand it has a table of its own.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from bench.cases import ESFT
from bench.output import command_line, emit, hardware
from bench.packed_systems import section as packed_section
from bench.settings import BOTH, DISPATCHES, peak, under
from bench.systems import (
    MORE_SLOTS,
    NOTES,
    group_problems,
    mb_per_rank,
    mean_skew,
    recorded_workload,
    span,
    step_trainer,
    synthetic_groups,
    systems,
)
from foremoe.problem.problem import Problem
from foremoe.simulate import simulate_systems

MODELS = ("qwen3-30b-a3b", "glm-4.5-air", "qwen3-235b-a22b")
NUM_RANKS = 64
RECORDINGS = (
    ("gpt-oss-20b", ("gpt_oss_20b_decode.npz",), "gpt-oss-20b", (8, 16)),
    ("ESFT tasks, DeepSeek-V2-Lite variant", ESFT, "deepseek-v2-lite", (8, 16)),
)
# Ours and bounds: not among the rivals that foremoe is held against.
OURS = ("foremoe", "ReLibra-like, our solver", "force-balanced", "eplb-exact")
# The order that was published, each with the rows that stand for it.
ORDER = (("static", ("static",)), ("EPLB", ("eplb-history", "eplb-step")), ("ReLibra", ("ReLibra-like",)))
HEAD = (
    "| system | slots | MB | stage ms | x static | share of force-balanced | tokens/s/GPU | skew | experts ms | exchange ms |"
    " weights ms | planning ms | moves ms | peak GB |"
)


def rows_of(name: str, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Every system on the same groups; their first micro-step is only history."""
    print(name, file=sys.stderr, flush=True)
    history = [problem.load_MLE[0] for problem in problems]
    counted = [problem[1:] for problem in problems]
    rows = simulate_systems(counted, systems(counted[0].B), history_LE=history, trainer=step_trainer(counted))
    return {row["solver"]: row for row in rows}


def table(rows: dict[str, dict[str, Any]], num_ranks: int) -> str:
    """Markdown of one configuration in EP groups of `num_ranks`."""
    lines = [HEAD, "|" + " --- |" * 14]
    for name, row in rows.items():
        if not row["n_solved"]:
            lines.append(f"| {name} | {row['note']} |" + " |" * 12)
            continue
        exchange_s, waits_s = row["dispatch_s"] + row["combine_s"], row["transfer_s"] + row["gradient_s"]
        parts = (row["compute_s"], exchange_s, waits_s, row["planning_s"], row["moves_s"])
        lines.append(
            f"| {name} | {row['slots_per_rank']} | {mb_per_rank(row, num_ranks)} | {row['simulated_stage_s'] * 1e3:.1f} |"
            f" {row['speedup_vs_static']:.3f} | {row['share_of_balanced']:.1%} |"
            f" {row['tokens_per_s_per_rank']:.0f} | {row['skew_mean']:.3f} | "
            + " | ".join(f"{part * 1e3:.1f}" for part in parts)
            + f" | {peak(row)} |"
        )
    return "\n".join(lines)


def ordering(rows: dict[str, dict[str, Any]]) -> str:
    """Says if static < EPLB < ReLibra < force-balanced holds, and what foremoe adds."""
    best = {name: min(rows[system]["simulated_stage_s"] for system in stand_for) for name, stand_for in ORDER}
    best["force-balanced"] = rows["force-balanced"]["simulated_stage_s"]
    names = list(best)
    broken = [f"{names[i]} < {names[i + 1]}" for i in range(len(names) - 1) if best[names[i]] <= best[names[i + 1]]]
    text = "Published order static < EPLB (history or step) < ReLibra-like < force-balanced: " + (
        "holds." if not broken else f"does not hold at {', '.join(broken)}{_why(rows, broken)}."
    )
    stage_s = {name: row["simulated_stage_s"] for name, row in rows.items() if row["n_solved"] and name not in OURS}
    others = {name: seconds for name, seconds in stage_s.items() if name not in MORE_SLOTS}
    other = min(others, key=lambda name: others[name])
    richest = min(set(stage_s) - set(others), key=lambda name: stage_s[name])
    beside = stage_s[richest] / rows["foremoe"]["simulated_stage_s"]
    ratio = others[other] / rows["foremoe"]["simulated_stage_s"]
    says = "wins" if ratio > 1.002 else "does not win" if ratio < 0.998 else "ties"
    inside = rows["ReLibra-like, our solver"]["simulated_stage_s"] / rows["foremoe"]["simulated_stage_s"]
    return (
        f"{text} foremoe {says}: {ratio:.3f} x the throughput of {other}, the best of the others at equal slots (eplb-exact,"
        f" which moves weights for nothing, left out), {beside:.3f} x that of {richest} with {rows[richest]['slots_per_rank']}"
        f" slots per rank, and {inside:.3f} x its own with replicas kept inside nodes."
    )


def _why(rows: dict[str, dict[str, Any]], broken: list[str]) -> str:
    """What the rows themselves say of a broken order."""
    reasons = []
    if "EPLB < ReLibra" in broken:
        floor = rows["ReLibra-like"]["skew_mean"]
        reasons.append(f"replicas inside nodes leave a skew of {floor:.2f}, and EPLB's weights travel for nothing here")
    if "ReLibra < force-balanced" in broken:
        mine = rows["ReLibra-like"]["dispatch_s"] / rows["force-balanced"]["dispatch_s"]
        reasons.append(f"its exchanges take {mine:.2f} of those of even routing, which knows no near expert")
    if "static < EPLB" in broken:
        reasons.append("history misleads more than it helps")
    return f" ({'; '.join(reasons)})" if reasons else ""


def overview(found: dict[tuple[str, int], dict[str, dict[str, Any]]]) -> str:
    """Share of force-balanced throughput, and x static, of every configuration; slots and MB per rank over all of them."""
    keys = list(found)
    heads = [f"{model} EP{ep}" for model, ep in keys]
    lines = ["| share of force-balanced (x static) | slots | MB | " + " | ".join(heads) + " |"]
    lines.append("|" + " --- |" * (len(keys) + 3))
    for name in next(iter(found.values())):
        run = {key: found[key][name] for key in keys if found[key][name]["n_solved"]}
        slots = span(str(row["slots_per_rank"]) for row in run.values())
        megabytes = span(mb_per_rank(row, ep) for (_, ep), row in run.items())
        cells = [f"{run[k]['share_of_balanced']:.1%} ({run[k]['speedup_vs_static']:.2f})" if k in run else "-" for k in keys]
        lines.append(f"| {name} | {slots} | {megabytes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12, help="of one pipeline rank")
    parser.add_argument("--regime", default="mid")
    parser.add_argument("--ep", type=int, nargs="+", default=[8, 16, 32, 64])
    args = parser.parse_args()
    found: dict[str, dict[tuple[str, int], dict[str, dict[str, Any]]]] = {dispatch: {} for dispatch in DISPATCHES}
    sections = []
    for model, ep, dispatch in itertools.product(MODELS, args.ep, DISPATCHES):
        groups = synthetic_groups(
            model, num_ranks=NUM_RANKS, ep=ep, micro_steps=args.micro_steps + 1, regime=args.regime, num_layers=args.layers
        )  # fmt: skip
        problems = under(dispatch, groups)
        rows = found[dispatch][model, ep] = rows_of(f"{model} EP{ep}, {dispatch}", problems)
        sections.append(
            f"## {model}, EP {ep}, dispatch {dispatch}\n\n{len(problems)} EP groups of {ep}, {problems[0].M - 1} micro-steps x"
            f" {problems[0].L} layers,"
            f" skew at home {mean_skew(problems):.3f}.\n\n{table(rows, ep)}\n\n{ordering(rows)}"
        )
    for name, files, model, sizes in RECORDINGS:
        for ep in sizes:
            work = recorded_workload(files, model, ep, 1024)
            if work is None:
                sections.append(f"## {name} (recorded), EP {ep}\n\nSkipped: the recordings are not at hand.")
                continue
            for dispatch in DISPATCHES:
                problems = under(dispatch, group_problems(work, model, ep, 8, None, 1))
                rows = rows_of(f"{name} EP{ep}, {dispatch}", problems)
                sections.append(
                    f"## {name} (recorded), EP {ep}, dispatch {dispatch}\n\nOne EP group, 1024 tokens per rank, {work.M - 1}"
                    f" micro-steps x {work.L} layers, skew at home {mean_skew(problems):.3f}.\n\n"
                    f"{table(rows, ep)}\n\n{ordering(rows)}"
                )
    sections += [packed_section(size, dispatch) for size in (8, 72) for dispatch in DISPATCHES]
    views = [f"## Overview, dispatch {dispatch}\n\n{overview(of)}" for dispatch, of in found.items()]
    options = f"--micro-steps {args.micro_steps} --regime {args.regime} --layers {args.layers}"
    head = (
        f"# Training-stage throughput on {NUM_RANKS} GPUs (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python"
        f" -m bench.throughput {options}`. Simulated, constants of preset 8xh100, uncalibrated. Update stage, {NUM_RANKS} GPUs in"
        " nodes of 8, R = 1, 8192 tokens per GPU and micro-step, the layers of one pipeline rank, synthetic load (regime"
        f" {args.regime}) unless a section says otherwise. {BOTH}\n\n"
    )
    notes = "\n".join(f"* {note}" for note in NOTES)
    emit(head + f"{notes}\n\n" + "\n\n".join([*views, *sections]) + "\n", args.out)


if __name__ == "__main__":
    main()
