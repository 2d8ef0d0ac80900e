"""What foresight is worth at equal slots: exact load on line with its exposed cost, history, noisy and full foresight.

    python -m bench.foresight [--out bench/results/foresight_HARDWARE_DATE.md]

Simulated, constants of the cluster preset (uncalibrated). One planner in all rows; what differs is what it sees, and when.
"""

from __future__ import annotations

import dataclasses
import sys

from bench.cases import ESFT
from bench.output import command_line, emit, hardware
from bench.settings import BOTH, DISPATCHES, under
from bench.systems import ULTRAEP_S, group_problems, mean_skew, recorded_workload, synthetic_groups
from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.foresight import Noisy
from foremoe.problem.problem import Problem
from foremoe.simulate import System, simulate_systems

# A planner that takes no copy as hidden: a replica must pay for all of its weights' way.
EXPOSED = CostModel(overlap=0.0)
HEAD = (
    "| what is known | stage ms | x static | share of force-balanced | skew | replicas per rank | waits for weights ms |"
    " planning ms |"
)


def rows() -> dict[str, System]:
    """Row name -> system."""
    views = {f"noisy foresight, {drift:g}": Noisy(drift) for drift in (0.5, 0.3, 0.1, 0.03)}
    views["full foresight, sources unknown"] = Noisy(0.0)
    return {
        "static": System(planner=Planner(rank=())),
        "history: the micro-step before": System(planner=Planner(foresight="previous")),
        "history: the step's sum": System(planner=Planner(foresight="step")),
        "on line, exact": System(known="router", plan_s=ULTRAEP_S),
        "on line, exact, copies priced as exposed": System(known="router", plan_s=ULTRAEP_S, changes={"cost": EXPOSED}),
        **{name: System(planner=Planner(foresight=view)) for name, view in views.items()},
        "full foresight": System(),
        "full foresight, R = 2": System(changes={"redundant": 2}),
        "force-balanced": System(even=True),
    }


def table(problems: list[Problem]) -> str:
    """Markdown of one load."""
    lines = [HEAD, "|" + " --- |" * 8]
    history = [problem.load_MLE[0] for problem in problems]
    for row in simulate_systems([problem[1:] for problem in problems], rows(), history_LE=history):
        lines.append(
            f"| {row['solver']} | {row['simulated_stage_s'] * 1e3:.1f} | {row['speedup_vs_static']:.3f} |"
            f" {row['share_of_balanced']:.1%} | {row['skew_mean']:.3f} | {row['replicas_per_layer'] / problems[0].G:.2f} |"
            f" {row['transfer_s'] * 1e3:.1f} | {row['planning_s'] * 1e3:.1f} |"
        )
    return "\n".join(lines)


def loads(micro_steps: int) -> dict[str, list[Problem] | None]:
    """Title -> EP groups; None where recordings are not at hand."""
    out: dict[str, list[Problem] | None] = {}
    for kind in ("8xh100", "8xpcie"):
        for tokens in (1024, 8192):
            problems = synthetic_groups("qwen3-30b-a3b", num_ranks=64, ep=64, tokens_per_rank=tokens, micro_steps=micro_steps + 1)
            if kind != "8xh100":
                box = Cluster.preset(kind, num_ranks=64)
                problems = [dataclasses.replace(problem, cluster=box) for problem in problems]
            out[f"Qwen3-30B-A3B, EP 64 of {kind}, {tokens} tokens per rank (synthetic, mid)"] = problems
    for name, files, model, ranks, tokens in (
        ("gpt-oss-20b, EP 16 of 8xh100, 1024 tokens per rank (recorded)", ("gpt_oss_20b_decode.npz",), "gpt-oss-20b", 16, 1024),
        ("ESFT tasks, EP 8 of 8xh100, 256 tokens per rank (recorded)", ESFT, "deepseek-v2-lite", 8, 256),
    ):
        work = recorded_workload(files, model, ranks, tokens)
        out[name] = None if work is None else group_problems(work, model, ranks, 8, None, 1)
    return out


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=8)
    args = parser.parse_args()
    sections = []
    for title, problems in loads(args.micro_steps).items():
        print(title, file=sys.stderr, flush=True)
        if problems is None:
            sections.append(f"## {title}\n\nSkipped: the recordings are not at hand.")
            continue
        about = f"{problems[0].M - 1} micro-steps x {problems[0].L} layers, skew at home {mean_skew(problems):.3f}."
        tables = [f"Dispatch {dispatch}:\n\n{table(under(dispatch, problems))}" for dispatch in DISPATCHES]
        sections.append(f"## {title}\n\n{about}\n\n" + "\n\n".join(tables))
    head = (
        f"# The value of foresight (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m bench.foresight"
        f" --micro-steps {args.micro_steps}`. Simulated, uncalibrated. Update stage, R = 1 unless the row says otherwise,"
        f" default planner in all rows. On line: the load is known after each layer's router;"
        f" {ULTRAEP_S * 1e6:.0f} us of planning and the copies for forward are exposed; two planners, one that prices copies as"
        " ever and one that takes none as hidden (too careful: those of backward are). History and noise: replicas placed for a"
        " predicted load whose sources are not known, quotas split on the real one; the first micro-step has the one before the"
        f" stage for history. {BOTH}\n\n"
    )
    emit(head + "\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
