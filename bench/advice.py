"""Evaluates the number of slots that `choose_slots` chooses, and compares the figures of `advise` with simulated stages.

    python -m bench.advice [--micro-steps 16] [--layers 12] [--out bench/results/advice_HARDWARE_DATE.md]

All stages are simulated update stages on 8xh100, and include the time of every move of homes. Loads of DeepSeek-R1 are drawn from
recorded counts. They are left out if the recording is not stored next to the checkout.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator

import numpy as np

import foremoe
from bench.cases import ESFT, RECORDED
from bench.output import command_line, emit, hardware
from bench.systems import recorded_workload
from foremoe.advice.changes import Case, advise, experts_moved
from foremoe.base.parallel import row_runner
from foremoe.problem.memory import buffer_bytes
from foremoe.problem.problem import Problem
from foremoe.simulate import Judge
from foremoe.solvers import Anneal, Search
from foremoe.synthetic import Regime
from foremoe.workload.skew import mean_skew

FILES = ("prefill_in1024", "decode_in1000out1000", "prefill_in1800out100")
# A skew of 3.4 at EP8, as measured for Moonlight (64 experts, top-6), whose shape DeepSeek-V2-Lite has.
MOONLIGHT = Regime(sigma=0.6, groups=8, group_std=1.25, kappa=64.0, walk_std=0.15, domain_std=0.4, sequence_std=0.4)
EVEN = Regime(sigma=0.0, kappa=1e9, walk_std=0.0, domain_std=0.0, sequence_std=0.0, source_kappa=1e9)
NUMBERS = (1, 2, 4, 6, 8)
RIVALS = ("eplb-step", "eplb-exact", "quota", "echo", "moonep", "llep", "least_loaded", "lplb", "greedy")
DISPATCHES = ("pairs", "node")
GPT_OSS = ("gpt_oss_20b_decode.npz",)
SHORT, LONGEST = (256, 512, 1024, 2048), 12  # tokens a rank and micro-step; micro-steps
Name = tuple[str, int, str]


def recorded(name: str, num_ranks: int, micro_steps: int, num_layers: int) -> foremoe.Workload:
    """8192 tokens of every rank and micro-step, drawn from the counts of some layers."""
    counts_LE = np.load(RECORDED / "deepseek_r1_counts.npz")[name]
    counts_LE = counts_LE[:: len(counts_LE) // num_layers][:num_layers]
    rng = np.random.default_rng(0)
    share_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    load = [[rng.multinomial(8 * 8192, share_E, size=num_ranks) for share_E in share_LE] for _ in range(micro_steps)]
    return foremoe.Workload.from_counts(np.array(load, np.int32), num_topk=8, model="deepseek-v3")


def loads(micro_steps: int, num_layers: int) -> Iterator[tuple[Name, Problem]]:
    """Problems by load, ranks and dispatch, with one slot."""
    works = {}
    if (RECORDED / "deepseek_r1_counts.npz").exists():
        works = {(f"DeepSeek-R1, {name}", ep): recorded(name, ep, micro_steps, num_layers) for name in FILES for ep in (8, 16)}
    made = (
        ("r1-like", "deepseek-v3", "r1-like", (8, 16)), ("Moonlight-like", "deepseek-v2-lite", MOONLIGHT, (8, 16)),
        ("gpt-oss-math-like", "gpt-oss-20b", "gpt-oss-math-like", (8, 16)), ("mid", "qwen3-30b-a3b", "mid", (16, 32)),
        ("balanced", "qwen3-30b-a3b", EVEN, (16,)),
    )  # fmt: skip
    for name, model, regime, degrees in made:
        for ep in degrees:
            works[name, ep] = foremoe.synthetic_workload(
                model, num_ranks=ep, tokens_per_rank=8192, micro_steps=micro_steps, num_layers=num_layers, regime=regime, seed=1
            )
    for ((name, ep), work), dispatch in itertools.product(works.items(), DISPATCHES):
        cluster = foremoe.Cluster.preset("8xh100", ep, dispatch=dispatch)
        yield (name, ep, dispatch), foremoe.Problem.of(work, cluster, redundant=1)


def slots_line(name: Name, problem: Problem) -> str:
    """One row of the first table."""
    judge = Judge.of(problem)

    def stage(planner: foremoe.Planner, posed: Problem) -> float:
        return float(judge(posed, planner.plan(posed)[0])["simulated_stage_s"])

    chosen = foremoe.choose_slots(problem)
    auto, buffers = chosen.problem, next(o.buffer_bytes for o in chosen.options if o.redundant == chosen.redundant)
    one_s, auto_s = stage(foremoe.Planner(), problem), stage(foremoe.Planner(), auto)
    there = dataclasses.replace(auto, home_LE=Anneal().solve(auto))
    away, moved_s = experts_moved(auto, there.home_LE) or "0", stage(foremoe.Planner(), there)
    rivals = {rival: stage(planner, auto) for rival in RIVALS if not (planner := foremoe.STRATEGIES[rival]).refusal(auto)}
    best = min(rivals, key=lambda rival: rivals[rival])
    even_s, skew = judge.balanced_s, mean_skew(problem.static().load_NG())
    return (
        f"| {' EP'.join(map(str, name[:2]))} {name[2]} | {skew:.2f} | {even_s / judge.static_s:.3f} |"
        f" {even_s / one_s:.3f} | {chosen.redundant} | {buffers / 1e9:.2f} | {even_s / auto_s:.3f} | {even_s / moved_s:.3f} |"
        f" {away} | {best} {auto_s / rivals[best]:.3f} |"
    )


def whole_s(case: Case, of: Problem) -> float:
    """Returns the seconds of the whole simulated stage with a change; every row is planned."""
    judge = Judge.of(of if case.problem.load_MLE is of.load_MLE else case.problem, case.trainer)
    return float(judge(case.problem, foremoe.Planner().plan(case.problem)[0])["simulated_stage_s"])


def advice_lines(name: Name, problem: Problem) -> tuple[str, list[float], float]:
    """One row of the second table; how far the gain of every change is off what whole stages give, and that of the best one."""
    found = advise(problem)
    now_s = whole_s(Case(problem, foremoe.Trainer()), problem)
    ratios = {change.name: change.speedup / (now_s / whole_s(change.case, problem)) for change in found.changes}
    off = {change: abs(ratio - 1.0) for change, ratio in ratios.items()}
    worst = max(off, key=lambda change: off[change])
    best = 0.0 if found.best is None else off[found.best.name]
    case = f"{' EP'.join(map(str, name[:2]))} {name[2]}, R = 1"
    told = "-" if found.best is None else f"{best:.1%}"
    line = f"| {case} | {found} | {told} | {len(ratios)} | {off[worst]:.1%}, {worst} |"
    return line, list(off.values()), best


def reorder_line(model: str, ep: int, regime: str, micro_steps: int) -> str:
    """One row of the third table: homes moved once, no slots; the stage is half of a step of twice as many micro-steps."""
    work = foremoe.synthetic_workload(
        model, num_ranks=ep, tokens_per_rank=8192, micro_steps=micro_steps, num_layers=4, regime=regime, seed=1
    )
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", ep, dispatch="node"), redundant=0)
    judge = Judge.of(problem, foremoe.Trainer(micro_steps=2 * micro_steps))
    there = dataclasses.replace(problem, home_LE=Anneal().solve(problem))
    stage_s = judge(there, foremoe.resolve("static").plan(there)[0])["simulated_stage_s"]
    skew, away = mean_skew(problem.static().load_NG()), experts_moved(problem, there.home_LE) or "0"
    return f"| {model} EP{ep}, {regime} | {skew:.2f} | {judge.static_s / stage_s:.3f} | {away} |"


def short_lines() -> Iterator[str]:
    """Rows of the fourth table: what the chosen slots give on recorded routing as micro-steps get shorter."""
    recordings = (("gpt-oss-20b", GPT_OSS, "gpt-oss-20b"), ("ESFT", ESFT, "deepseek-v2-lite"))
    for (name, files, model), (ep, dispatch) in itertools.product(recordings, ((8, "pairs"), (16, "node"))):
        cells = []
        for tokens in SHORT:
            work = recorded_workload(files, model, ep, tokens)
            if work is None:
                return
            posed = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", ep, dispatch=dispatch))[:LONGEST]
            chosen = foremoe.choose_slots(posed).problem
            found = foremoe.gain(chosen, foremoe.Planner().plan(chosen)[0])
            cells.append(f"{found.speedup:.2f} (R = {chosen.R}, M = {posed.M})")
        yield f"| {name} EP{ep} {dispatch} | {' | '.join(cells)} |"


def node_lines() -> Iterator[str]:
    """Rows of the fifth table: the same load with more and more slots under node dispatch; EP groups of several sizes."""
    works = []
    if (RECORDED / "deepseek_r1_counts.npz").exists():
        works = [(f"DeepSeek-R1, {FILES[1]}, EP{ep}", recorded(FILES[1], ep, 16, 4)) for ep in (8, 16, 32, 64)]
    kinds: tuple[tuple[str, str | Regime, tuple[int, ...]], ...] = (
        ("qwen3-235b-a22b", "qwen3-like", (8, 16, 32, 64)), ("qwen3-235b-a22b", EVEN, (32, 64)),
        ("deepseek-v3", "r1-like", (32, 64)),
    )  # fmt: skip
    for model, regime, degrees in kinds:
        for ep in degrees:
            work = foremoe.synthetic_workload(
                model, num_ranks=ep, tokens_per_rank=8192, micro_steps=16, num_layers=4, regime=regime, seed=0
            )
            works.append((f"{model} {'balanced' if regime is EVEN else regime}, EP{ep}", work))
    for name, work in works:
        problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", work.G, dispatch="node"))
        judge, chosen = Judge.of(problem), foremoe.choose_slots(problem).problem
        stage_s = {}
        for redundant in sorted({*NUMBERS, chosen.R}):
            posed = dataclasses.replace(problem, redundant=redundant)
            stage_s[redundant] = float(judge(posed, foremoe.Planner().plan(posed)[0])["simulated_stage_s"])
        cells = [f"{judge.static_s / stage_s[redundant]:.2f}" for redundant in NUMBERS]
        plain = foremoe.Planner(rank=(Search(without=("groups",)),))
        alone = judge.static_s / judge(chosen, plain.plan(chosen)[0])["simulated_stage_s"]
        cells += [str(chosen.R), f"{buffer_bytes(problem, chosen.R) / 1e9:.2f}", f"{alone:.2f}"]
        cells += [f"{judge.static_s / judge.balanced_s:.2f}", f"{judge.static_s:.3f}", f"{stage_s[chosen.R]:.3f}"]
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    first, second, off, named = list[str](), list[str](), list[float](), 0.0
    with row_runner(1):
        for name, problem in loads(args.micro_steps, args.layers):
            print(*name, file=sys.stderr, flush=True)
            first.append(slots_line(name, problem))
            line, found, best = advice_lines(name, problem)
            second.append(line)
            off += found
            named = max(named, best)
        sizes = itertools.product(("qwen3-30b-a3b", "qwen3-235b-a22b"), (16, 32), ("mild", "mid", "qwen3-like"))
        third = [reorder_line(*size, args.micro_steps) for size in sizes]
        fourth, fifth = list(short_lines()), list(node_lines())
    text = [
        "# Slots and advice (simulated)", "",
        f"Planned and simulated on: {hardware()}. Command: `python -m bench.advice --micro-steps {args.micro_steps} --layers"
        f" {args.layers}`. Simulated, uncalibrated: update stages on 8xh100, 8192 tokens a rank and micro-step. Moves of homes"
        " (weights and optimizer state), made once, and of re-placed experts (weights and gradients) are in the stages. Shares:"
        " stage of even routing over this one.", "",
        "| load | skew at home | share: at home | R = 1 | auto: R | GB | share | homes moved: share | experts moved a layer |"
        " best other strategy with R slots: our stage over its |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", *first, "",
        f"Gains that `advise` gives from a sample of rows against whole stages: {len(off)} changes in {len(second)} cases, median"
        f" {np.median(off):.2%} off, 95 % within {np.quantile(off, 0.95):.2%}, worst {max(off):.2%}. Of changes that are advised"
        f" {named:.2%} at most.", "",
        "| case | advice | its gain is off by | changes tried | the most that one is off, which |",
        "| --- | --- | --- | --- | --- |", *second, "",
        "Moving homes alone, without slots, under node dispatch: the stage at home over the stage with moved homes, and"
        " the experts that move in a layer."
        f" {args.micro_steps} micro-steps of an update that bears half of the moves.", "",
        "| case | skew at home | speed-up | experts moved |", "| --- | --- | --- | --- |", *third, "",
        "Short micro-steps: the stage at home over the planned stage, on recorded routing with all layers and at most"
        f" {LONGEST} micro-steps (M), by tokens a rank and micro-step.", "",
        f"| case | {' | '.join(map(str, SHORT))} |", f"| --- {'| --- ' * len(SHORT)}|", *fourth, "",
        "Slots under node dispatch, 16 micro-steps of 4 layers: the stage at home over the planned stage, by R; what"
        " `choose_slots` takes, and its stage planned without groups of nodes. Seconds compare EP groups of several sizes, whose"
        " ranks have the same tokens; smaller groups need more memory for experts.", "",
        f"| case | {' | '.join(f'R = {number}' for number in NUMBERS)} | auto: R | GB | without groups | even routing |"
        " s at home | s, auto |",
        f"| --- {'| --- ' * (len(NUMBERS) + 6)}|", *fifth,
    ]  # fmt: skip
    emit("\n".join(text) + "\n", args.out)


if __name__ == "__main__":
    main()
