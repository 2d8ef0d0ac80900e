"""Compares resident slots with shared ones in simulated stages, each kind with its best number of slots.

    python -m bench.residency [--layers 8] [--out bench/results/residency_HARDWARE_DATE.md]

Rows and regime are those where copies show most: small micro-steps of many ranks. Both kinds are planned by the default planner.
A stage begins with empty slots; weights, gradients and the first load are simulated as the plans send them. Model, uncalibrated.
"""

from __future__ import annotations

import dataclasses
import sys

import foremoe
from bench.output import command_line, emit, hardware
from foremoe.problem.memory import buffer_bytes
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase
from foremoe.simulate import force_balanced, simulate
from foremoe.solvers.search.search import Search

# Model, EP, tokens per rank, micro-steps, dispatch.
ROWS = (
    ("deepseek-v3", 64, 1024, 16, "node"), ("qwen3-235b-a22b", 32, 1024, 16, "node"), ("qwen3-235b-a22b", 32, 1024, 32, "pairs"),
    ("qwen3-235b-a22b", 64, 4096, 16, "node"), ("qwen3-30b-a3b", 16, 4096, 16, "node"), ("qwen3-30b-a3b", 8, 1024, 4, "node"),
)  # fmt: skip
SHARED, RESIDENT = (1, 2, 4), (2, 4)


def seconds(problem: Problem, moves: int | None = None) -> tuple[float, float]:
    """The simulated stage: all of it, and without what the first micro-step's forward waits for copies."""
    found = simulate(problem, foremoe.Planner(rank=(Search(moves),)).plan(problem)[0])
    first_U = (found.micro_step_U == 0) & (found.phase_U == Phase.FORWARD)
    return found.total_s, found.total_s - float((found.ready_U - found.dispatched_U)[first_U].sum())


def line(model: str, ranks: int, tokens: int, micro_steps: int, dispatch: str, stage: str, layers: int, moves: int | None) -> str:  # fmt: skip
    """One line of the table."""
    work = foremoe.synthetic_workload(
        model, num_ranks=ranks, tokens_per_rank=tokens, micro_steps=micro_steps, num_layers=layers, regime="mid", seed=0
    )
    cluster = foremoe.Cluster.preset("8xh100", ranks, dispatch=dispatch)
    bare = Problem.of(dataclasses.replace(work, stage=stage), cluster, redundant=0)
    even_s, static_s = force_balanced(bare).total_s, seconds(bare)[0]
    best: list[tuple[tuple[float, float], Problem]] = []
    for slots, numbers in ((foremoe.SharedSlots(), SHARED), (foremoe.ResidentSlots(), RESIDENT)):
        posed = [dataclasses.replace(bare, slots=slots, redundant=R) for R in numbers if R <= bare.B]
        best.append(min(((seconds(problem, moves), problem) for problem in posed), key=lambda found: found[0]))
    ((shared_s, _), shared), ((resident_s, hidden_s), resident) = best
    gigabytes = [buffer_bytes(problem, problem.R) / problem.slots.num_buffers(1, problem.L) / 1e9 for _, problem in best]
    per_layer = gigabytes[1] * resident.slots.num_buffers(1, 1)
    cells = [
        f"{model}, EP{ranks}, {tokens} tokens, {dispatch}, {micro_steps} micro-steps", stage, f"{even_s / static_s:.3f}",
        f"{even_s / shared_s:.3f} (R = {shared.R})", f"{even_s / resident_s:.3f} (R = {resident.R})",
        f"{shared_s / resident_s - 1.0:+.1%}", f"{shared_s / hidden_s - 1.0:+.1%}", f"{gigabytes[0] * shared.slots.num_buffers(1, 1):.2f}", f"{per_layer:.2f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--moves", type=int, help="of the search of each row, for both kinds; default: the planner's own")
    parser.add_argument("--rows", type=int, default=len(ROWS))
    args = parser.parse_args()
    lines = ["| case | stage | static | shared slots | resident slots | gain | gain, first load hidden | GB, shared, in all | GB, resident, per layer |"]
    lines.append("| --- " * 9 + "|")
    for row in ROWS[: args.rows]:
        for stage in ("update", "recompute"):
            print(*row, stage, file=sys.stderr, flush=True)
            lines.append(line(*row, stage, args.layers, args.moves))
    head = (
        f"# Resident slots (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m bench.residency"
        f" --layers {args.layers}{f' --moves {args.moves}' if args.moves else ''} --rows {args.rows}`. Share of the throughput of even routing: static placement, and the best of R = "
        f"{', '.join(map(str, SHARED))} shared slots and of R = {', '.join(map(str, RESIDENT))} resident ones, regime mid,"
        f" 8xh100, {args.layers} layers. Bytes are those of a rank's buffers. Model, uncalibrated.\n\n"
    )
    emit(head + "\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
