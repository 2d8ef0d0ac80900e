"""Compares simulated stages planned by `Search` with the shortest ones found with any effort.

    python -m bench.nearness [--long 300000] [--only TEXT] [--out bench/results/nearness_HARDWARE_DATE.md]

A stage is an update of 16 equal micro-steps with four layers, so that a long search of all rows is affordable. The best known
time of a stage is the shortest simulated time with any of the efforts, including the long search. Models, numbers of tokens,
kinds of node, regimes and numbers of slots vary from line to line. Recorded routing is used if it is available. All times are
those of the model, uncalibrated.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import foremoe
from bench.cases import CASES as RECORDED
from bench.output import command_line, emit, hardware
from foremoe.levels import RankSolver
from foremoe.machine.cluster import DISPATCHES
from foremoe.problem.placement import Placement
from foremoe.simulate import simulate
from foremoe.solvers import Search

LAYERS, MICRO_STEPS = 4, 16
MODELS = (
    ("qwen3-30b-a3b", 8), ("qwen3-30b-a3b", 16), ("deepseek-v2-lite", 16), ("gpt-oss-20b", 16), ("qwen3-235b-a22b", 32),
    ("qwen3-30b-a3b", 64), ("deepseek-v3", 64),
)  # fmt: skip
KINDS, REGIMES, TOKENS = ("8xh100", "8xa100", "8xpcie"), ("mild", "mid", "gpt-oss-like"), (1024, 2048, 4096, 8192)
EFFORTS = (0, 1_000, 5_000, 20_000)
GROUPS = ("one node", "pairs", "pairs, 8xpcie", "node", "node, 8xpcie")


@dataclass(frozen=True)
class Given(RankSolver):
    """Gives the rows that it holds."""

    placement: Placement

    def solve(self, problem: foremoe.Problem, start: Placement) -> Placement:
        """See `RankSolver`."""
        return self.placement


def stages() -> Iterator[tuple[str, str, foremoe.Problem]]:
    """Group, name and one micro-step of every stage."""
    settings = itertools.product(MODELS, KINDS, DISPATCHES, (1, 2))
    for i, ((model, num_ranks), kind, dispatch, redundant) in enumerate(settings):
        regime, tokens = REGIMES[i // 2 % 3], TOKENS[(i + i // 4) % 4]
        work = foremoe.synthetic_workload(
            model, num_ranks=num_ranks, tokens_per_rank=tokens, micro_steps=1, num_layers=LAYERS, regime=regime, seed=i
        )
        yield posed(f"{model}, {regime}, {tokens} tokens", work, num_ranks, kind, dispatch, redundant)
    for case, dispatch, redundant in itertools.product(("gpt-oss-ep16", "esft-ep16"), DISPATCHES, (1, 2)):
        if RECORDED[case].missing is None:
            recorded = RECORDED[case]
            yield posed(f"{case}, recorded", recorded.make(), recorded.num_ranks, "8xh100", dispatch, redundant)


def posed(
    name: str, work: foremoe.Workload, num_ranks: int, kind: str, dispatch: str, redundant: int
) -> tuple[str, str, foremoe.Problem]:
    """A stage's group, its whole name, and the first layers of its first micro-step."""
    cluster = foremoe.Cluster.preset(kind, num_ranks, dispatch=dispatch)
    group = "one node" if cluster.num_nodes == 1 else dispatch + (f", {kind}" if kind == "8xpcie" else "")
    name = f"{name}, EP{num_ranks}, {kind}, {dispatch}, R = {redundant}"
    return group, name, foremoe.Problem.of(work, cluster, redundant=redundant)[:1].layers(range(LAYERS))


def stage_seconds(problem: foremoe.Problem, effort: int | None) -> tuple[float, float]:
    """Simulated seconds of the stage, and CPU milliseconds a row of planning it."""
    plan, how = foremoe.Planner(rank=(Search(effort),), guard=False).plan(problem, num_threads=1)
    schedule = foremoe.Schedule.plain(problem.stage, MICRO_STEPS)
    longer = dataclasses.replace(problem, schedule=schedule, **foremoe.Problem.join_arrays([problem] * MICRO_STEPS, "M"))
    given = Given(plan.placement.cut(N=np.tile(np.arange(problem.N), MICRO_STEPS)))
    whole, _ = foremoe.Planner(rank=(given,), guard=False).plan(longer)
    return simulate(longer, whole).total_s, sum(level.cpu_s for level in how.levels) / problem.N * 1e3


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--long", type=int, default=300_000, help="moves of the long search")
    parser.add_argument("--only", default="", help="stages whose names have this text")
    args = parser.parse_args()
    efforts: dict[str, int | None] = {"start": 0, "default": None, **{f"{effort:,}": effort for effort in EFFORTS[1:]}}
    efforts[f"{args.long:,}"] = args.long
    lines, over_CF, spent_CF, groups = [], [], [], []
    for group, name, problem in stages():
        if args.only not in name:
            continue
        print(name, time.strftime("%H:%M:%S"), file=sys.stderr, flush=True)
        foremoe.Planner(rank=(Search(1),), guard=False).plan(problem[:1].layers([0]))  # compiles
        seconds, spent = zip(*(stage_seconds(problem, effort) for effort in efforts.values()), strict=True)
        over_CF.append(np.array(seconds) / min(seconds) - 1.0)
        spent_CF.append(spent)
        groups.append(group)
        lines.append(f"| {name} | {' | '.join(f'{over:.1%}' for over in over_CF[-1])} |")
    head = [
        "# How near to the best known stage", "",
        f"{hardware()}. Command: `python -m bench.nearness --long {args.long}`. {len(lines)} stages of {MICRO_STEPS} equal"
        f" micro-steps and {LAYERS} layers; simulated, uncalibrated. How much longer a stage is than the shortest by any of these"
        " efforts, moves a row.", "", f"| {len(lines)} stages: mean; worst; ms a row | {' | '.join(efforts)} |",
        "| --- " * (1 + len(efforts)) + "|",
    ]  # fmt: skip
    over_CF_, spent_CF_, group_C = np.array(over_CF), np.array(spent_CF), np.array(groups)
    for group in GROUPS:
        mine_C = group_C == group
        if mine_C.any():
            over, spent_F = over_CF_[mine_C], spent_CF_[mine_C].mean(axis=0)
            figures = zip(over.mean(axis=0), over.max(axis=0), spent_F, strict=True)
            cells = [f"{mean:.1%}; {worst:.1%}; {ms:.2f}" for mean, worst, ms in figures]
            head.append(f"| {group}, {mine_C.sum()} | {' | '.join(cells)} |")
    table = ["", f"| stage | {' | '.join(efforts)} |", "| --- " * (1 + len(efforts)) + "|", *lines, ""]
    emit("\n".join(head + table), args.out)


if __name__ == "__main__":
    main()
