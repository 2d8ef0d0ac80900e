"""How the gain depends on the size of a micro-step, on skew, on nodes and on links.

    python -m bench.sensitivity [--out bench/results/sensitivity_HARDWARE_DATE.md]

One thing changes in every table. Simulated, constants of the cluster presets (uncalibrated), synthetic loads.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from bench.output import command_line, emit, hardware
from bench.settings import BOTH, DISPATCHES, peak, under
from bench.systems import mb_per_rank, mean_skew, step_trainer, synthetic_groups, systems
from foremoe.machine.cluster import Cluster
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.problem import Problem
from foremoe.simulate import System, simulate_systems

MODEL, NUM_RANKS = "qwen3-30b-a3b", 64
ROWS = ("static", "eplb-step", "UltraEP-like", "MoonEP-like", "ReLibra-like", "quota anywhere", "foremoe", "force-balanced")
OTHERS = ROWS[:6]
# The best published on-line rule with foresight and replicas on any rank: a rival where nodes are small.
ANYWHERE = System(planner=STRATEGIES["quota"])


def posed(micro_steps: int, **changes: Any) -> list[Problem]:
    """The case, with something changed."""
    return synthetic_groups(MODEL, num_ranks=NUM_RANKS, ep=NUM_RANKS, micro_steps=micro_steps, **changes)


def faster(cluster: Cluster, factor: float, *links: str) -> Cluster:
    """The cluster with some of its links faster (slower)."""
    return dataclasses.replace(cluster, **{f"{x}_bytes_per_s": factor * getattr(cluster, f"{x}_bytes_per_s") for x in links})


def tables(micro_steps: int) -> Iterator[tuple[str, dict[str, list[Problem]]]]:
    """(title, value -> groups)."""
    sizes = (512, 1024, 2048, 4096, 8192, 16384)
    yield "Tokens per rank and micro-step", {str(n): posed(micro_steps, tokens_per_rank=n) for n in sizes}
    yield "Skew (regime of the synthetic load)", {name: posed(micro_steps, regime=name) for name in ("mild", "mid", "skew")}
    yield "Ranks per node", {str(n): posed(micro_steps, ranks_per_node=n) for n in (1, 2, 4, 8, 72)}
    kinds = ("8xh100", "8xh200", "8xh20", "8xa100", "8xpcie")
    yield "Kind of node", {name: posed(micro_steps, cluster=Cluster.preset(name, num_ranks=NUM_RANKS)) for name in kinds}
    base = Cluster.preset("8xh100", num_ranks=NUM_RANKS)
    links = {"as they are": base}
    for name, of in (("peer", ("peer",)), ("rdma", ("rdma",)), ("host", ("host",)), ("all", ("peer", "rdma", "host"))):
        links |= {f"{name} halved": faster(base, 0.5, *of), f"{name} doubled": faster(base, 2.0, *of)}
    yield "Links", {name: posed(micro_steps, cluster=cluster) for name, cluster in links.items()}


def cell(row: Mapping[str, Any], num_ranks: int) -> str:
    """Share of force-balanced, x static, redundant slots and megabytes per rank of one system."""
    gains = f"{row['share_of_balanced']:.1%} ({row['speedup_vs_static']:.2f})"
    return f"{gains}, {row['slots_per_rank']}, {mb_per_rank(row, num_ranks)}"


def line(name: str, problems: list[Problem]) -> tuple[str, float]:
    """One row of a table, and foremoe's gain over the best of the others."""
    named = systems(problems[0].B) | {"quota anywhere": ANYWHERE}
    rows = simulate_systems(problems, {key: named[key] for key in ROWS}, trainer=step_trainer(problems))
    found = {row["solver"]: row for row in rows}
    cells = [cell(found[key], problems[0].G) for key in ROWS[:-1]]
    mine = found["foremoe"]
    waits_s, stage_s = mine["transfer_s"] + mine["gradient_s"], mine["simulated_stage_s"]
    gain = min(found[key]["simulated_stage_s"] for key in OTHERS) / stage_s
    return (
        f"| {name} | {mean_skew(problems):.3f} | " + " | ".join(cells) + f" | {gain:.3f} | {mine['skew_mean']:.3f} |"
        f" {mine['replicas_per_layer'] / problems[0].G:.2f} | {waits_s / stage_s:.2%} | {stage_s * 1e3:.0f} | {peak(mine)} |"
    ), gain


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=4)
    args = parser.parse_args()
    sections, worst = [], []
    for dispatch, (title, cases) in itertools.product(DISPATCHES, list(tables(args.micro_steps))):
        head = (
            f"| {title.lower()} | skew at home | "
            + " | ".join(ROWS[:-1])
            + " | foremoe over best other | its skew | replicas per rank | waits | stage ms | peak GB |"
        )
        lines = [head, "|" + " --- |" * (len(ROWS) + 7)]
        for name, problems in cases.items():
            print(f"{dispatch}: {title}: {name}", file=sys.stderr, flush=True)
            text, gain = line(name, under(dispatch, problems))
            lines.append(text)
            worst.append((gain, f"{title.lower()} {name}, {dispatch}"))
        sections.append(f"## {title}, dispatch {dispatch}\n\n" + "\n".join(lines))
    lost = [f"{name} ({gain:.3f})" for gain, name in sorted(worst) if gain < 0.998]
    verdict = f"foremoe does not win at: {', '.join(lost)}." if lost else "foremoe is nowhere behind the best of the others here."
    text = (
        f"# Sensitivity (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m bench.sensitivity"
        f" --micro-steps {args.micro_steps}`. Simulated, uncalibrated, synthetic load. {MODEL}, EP {NUM_RANKS}, update stage of"
        f" {args.micro_steps} micro-steps, 8192 tokens per rank, regime mid, 8xh100, R = 1 unless the table says otherwise."
        " Cells: share of force-balanced throughput (x static), redundant slots per rank, MB of weights and gradients"
        " per rank, layer and micro-step. Waits: of foremoe's stage, for weights and gradients. The systems:"
        " `python -m bench.throughput` (MoonEP-like has more slots than the others); moves of homes are paid once per step, a"
        f" recompute and an update stage of these micro-steps. {BOTH} {verdict}\n\n"
    )
    emit(text + "\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
