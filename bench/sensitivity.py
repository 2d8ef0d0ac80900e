"""Varies every constant of the cluster (x 0.7, x 1.3) and the assumptions about load, machine and systems.

    python -m bench.sensitivity [--out bench/results/sensitivity_HARDWARE_DATE.md]

Every line changes one value. Stages of synthetic loads are simulated with the constants of the cluster presets (uncalibrated).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from bench.output import command_line, emit, hardware
from bench.systems import ULTRAEP_S, mean_skew, step_trainer, synthetic_groups, systems
from bench.throughput import NUM_RANKS, RACK, Row, rivals
from foremoe.advice import choose_slots
from foremoe.machine.cluster import Cluster
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.problem import Problem
from foremoe.simulate import System, simulate_systems
from foremoe.solvers import Anneal
from foremoe.synthetic.counts import REGIMES

MODEL, REGIME = "qwen3-235b-a22b", "qwen3-like"
ROWS = (
    "static", "LLEP", "UltraEP-like", "UltraEP-like, hidden", "MoonEP-like", "MoonEP-like, hidden", "ECHO-like, with foresight",
    "TAOT-like", "quota anywhere, with foresight", "ReLibra-like", "foremoe", "foremoe, R = 1, homes moved", "force-balanced",
)  # fmt: skip
FACTORS = (0.7, 1.3)
# Of the cluster; those that a preset leaves at zero or None do not matter to it.
CONSTANTS = (
    "flops_per_s", "compute_efficiency", "attention_efficiency", "score_flops_per_s", "slot_overhead_s", "tile_pairs",
    "peer_bytes_per_s", "rdma_bytes_per_s", "exchange_bytes_per_s", "return_bytes_per_s", "peer_latency_s", "rdma_latency_s",
    "copy_contention", "memory_bytes_per_s", "backward_ratio", "attention_backward_ratio", "layer_overhead_s", "pair_overhead_s",
    "element_overhead_s",
)  # fmt: skip
Line = tuple[str, Problem, dict[str, System]]


def posed(ep: int, micro_steps: int = 16, num_layers: int = 4, **changes: Any) -> Problem:
    """The case, with something changed."""
    options: dict[str, Any] = {"regime": REGIME, "num_ranks": ep, "ep": ep, "micro_steps": micro_steps, "num_layers": num_layers}
    changes.setdefault("cluster", Cluster.preset("8xh100", ep, dispatch="node"))
    return synthetic_groups(MODEL, **{**options, **changes})[0]


def chosen(problem: Problem) -> dict[str, System]:
    """The systems of a line."""
    return {name: system for name, system in systems(problem.B, choose_slots(problem).redundant).items() if name in ROWS}


def scaled(problem: Problem, constant: str, factor: float) -> Problem | None:
    """The problem with one constant of its cluster changed; None where the preset has none."""
    value = getattr(problem.cluster, constant)
    if not value:
        return None
    changes: dict[str, Any] = {constant: round(value * factor) if isinstance(value, int) else value * factor}
    return dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, **changes))


def constants(ep: int) -> Iterator[Line]:
    """Every constant x 0.7 and x 1.3, planning that is exposed and the state that moves with a home too."""
    base = posed(ep)
    yield "as they are", base, chosen(base)
    for constant in CONSTANTS:
        for factor in FACTORS:
            problem = scaled(base, constant, factor)
            if problem is not None:
                yield f"{constant} x {factor:g}", problem, chosen(problem)
    for factor in FACTORS:
        named = chosen(base)
        late = {name: dataclasses.replace(s, plan_s=s.plan_s * factor) for name, s in named.items()}
        yield f"planning on line ({1e6 * ULTRAEP_S:.0f} us) x {factor:g}", base, late
        moved = {name: dataclasses.replace(s, planner=_dearer(s, factor)) for name, s in named.items()}
        yield f"optimizer state that a home moves with x {factor:g}", base, moved


def _dearer(system: System, factor: float) -> Any:
    home = system.planner.home
    if not isinstance(home, Anneal):
        return system.planner
    return dataclasses.replace(system.planner, home=dataclasses.replace(home, state_bytes=home.state_bytes * factor))


def assumptions(ep: int) -> Iterator[Line]:
    """Load, size of the domain, micro-steps that a home serves, tokens, dispatch, buffers."""
    for name in REGIMES:
        problem = posed(ep, regime=name)
        yield f"regime {name}", problem, chosen(problem)
    for size in (1, 4, 8, 16, 72):
        problem = posed(ep, cluster=Cluster.preset("8xh100", ep, ranks_per_node=size, dispatch="node"))
        yield f"domain of {size}", problem, chosen(problem)
    problem = posed(ep, cluster=Cluster.preset(RACK, ep, dispatch="node"))
    yield RACK, problem, chosen(problem)
    problem = posed(ep, cluster=Cluster.preset("8xh100", ep))
    yield "dispatch pairs", problem, chosen(problem)
    for micro_steps in (4, 8, 16, 32):
        problem = posed(ep, micro_steps=micro_steps)
        yield f"{micro_steps} micro-steps", problem, chosen(problem)
    for tokens in (1024, 2048, 4096, 16384):
        problem = posed(ep, tokens_per_rank=tokens)
        yield f"{tokens} tokens per rank", problem, chosen(problem)


def depths(ep: int) -> str:
    """Share of force-balanced throughput by depth of the ring of buffers, foremoe with one and two slots."""
    lines = ["| load | " + " | ".join(f"R = {r}, depth {d}" for r in (1, 2) for d in (1, 2, 3, 4)) + " |", "|" + " --- |" * 9]
    for name, problem in (
        (f"{REGIME}, 8192 tokens", posed(ep)), (f"{REGIME}, 2048 tokens", posed(ep, tokens_per_rank=2048)),
        ("mid, 8192 tokens", posed(ep, regime="mid")), ("r1-like, 8192 tokens", posed(ep, regime="r1-like")),
    ):  # fmt: skip
        print(f"EP{ep}, depths: {name}", file=sys.stderr, flush=True)
        named = {"force-balanced": System(even=True), "static": systems(problem.B)["static"]}
        for redundant in (1, 2):
            for depth in (1, 2, 3, 4):
                changes = {"redundant": redundant, "slot_depth": depth}
                named[f"{redundant}:{depth}"] = System(planner=STRATEGIES["foremoe"], changes=changes)
        rows = simulate_systems([problem], named, trainer=step_trainer([problem], max(1, NUM_RANKS // ep)))
        lines.append(f"| {name} | " + " | ".join(f"{row['share_of_balanced']:.2%}" for row in rows[2:]) + " |")
    return "\n".join(lines)


def line(name: str, problem: Problem, named: dict[str, System]) -> tuple[str, float, float]:
    """One row of a table, and foremoe's gain over the best of the others, as published and with all granted."""
    found: dict[str, Row] = {
        row["solver"]: row
        for row in simulate_systems([problem], named, trainer=step_trainer([problem], max(1, NUM_RANKS // problem.G)))
    }
    cells = [f"{found[key]['share_of_balanced']:.1%}" for key in ROWS[:-1]]
    gains, told = [], []
    for granted in (False, True):
        others = rivals(found, granted)
        best = min(others, key=lambda key: others[key]["simulated_stage_s"])
        gains.append(others[best]["simulated_stage_s"] / found["foremoe"]["simulated_stage_s"] - 1.0)
        told.append(f"{gains[-1]:+.1%} ({best})")
    return f"| {name} | {mean_skew([problem]):.2f} | " + " | ".join([*cells, *told]) + " |", gains[0], gains[1]


def section(title: str, lines: Iterator[Line]) -> str:
    """A table, and the span of foremoe's lead in it."""
    head = f"| {title} | skew at home | " + " | ".join(ROWS[:-1]) + " | foremoe over the best as published | over all |"
    texts = [head, "|" + " --- |" * (len(ROWS) + 3)]
    leads: list[list[tuple[float, str]]] = [[], []]
    for name, problem, named in lines:
        print(f"{title}: {name}", file=sys.stderr, flush=True)
        text, *gains = line(name, problem, named)
        texts.append(text)
        for of, gain in zip(leads, gains, strict=True):
            of.append((gain, name))
    words = []
    for of, what in zip(leads, ("the best as published", "the best with everything granted"), strict=True):
        (least, low), (most, high) = min(of), max(of)
        words.append(f"over {what} {least:+.1%} ({low}) to {most:+.1%} ({high})")
    return f"## {title}\n\nforemoe's lead: {'; '.join(words)}.\n\n" + "\n".join(texts)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--ep", type=int, nargs="+", default=[16])
    args = parser.parse_args()
    parts = []
    for ep in args.ep:
        parts.append(section(f"EP{ep}, constants", constants(ep)))
        parts.append(section(f"EP{ep}, assumptions", assumptions(ep)))
        parts.append(f"## EP{ep}, depth of the ring\n\n{depths(ep)}")
    text = (
        f"# Sensitivity (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m bench.sensitivity --ep"
        f" {' '.join(map(str, args.ep))}`. Simulated, uncalibrated, synthetic load. {MODEL}, regime {REGIME}, nodes of 8 of"
        " 8xh100, dispatch node, update stage of 16 micro-steps x 4 layers, 8192 tokens per rank, unless the line says otherwise;"
        " foremoe: homes in place, as many slots as `choose_slots` takes. Cells: share of force-balanced throughput."
        " Systems, and what is granted to which: `python -m bench.throughput`.\n\n"
    )
    emit(text + "\n\n".join(parts) + "\n", args.out)


if __name__ == "__main__":
    main()
