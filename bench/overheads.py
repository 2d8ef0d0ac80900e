"""Overheads of the presets, fitted to published runs of one model and checked on runs that the fit has not seen.

    python -m bench.overheads [--out bench/results/overheads_HARDWARE_DATE.md]

Published: tokens per second and GPU of force-balanced, dropless pre-training on H100, sequences of 4096 tokens (NVIDIA Megatron
Bridge, docs/performance-summary-archive.md, settings beside them). Simulated: one micro-step of the slowest pipeline rank with
even routing, plus the bubble of the schedule, tensor-parallel exchanges, reduction and optimizer.

Two constants are fitted, on Qwen3-30B-A3B alone. `layer_overhead_s` is what two runs with one and two sequences per micro-step
differ in: time that a micro-step of twice the tokens does not take twice. `pair_overhead_s` makes the simulator meet the fastest
published run inside one node. What throughputs alone cannot separate is shown beside it: the same gap as `compute_efficiency`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from bench.output import command_line, emit, hardware
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.machine.trainer import Trainer
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.simulate import head_seconds, optimizer_seconds, reduction_seconds, simulate
from foremoe.workload.workload import Workload

SEQUENCE, GPU = 4096, "8xh100"


class Run(NamedTuple):
    """One published run."""

    model: str
    release: str
    precision: str
    gpus: int
    ep: int
    tp: int
    pp: int
    vpp: int
    sequences: int  # per micro-step and data-parallel rank
    batch: int  # sequences of a step
    dispatch: str
    layers: int  # of the slowest pipeline rank
    has_head: bool  # whether that one has the head
    tokens_per_s: float  # per GPU

    @property
    def micro_steps(self) -> int:
        """Micro-steps of a step."""
        return self.batch * self.tp * self.pp // (self.gpus * self.sequences)


ONE = Run("qwen3-30b-a3b", "26.02", "FP8", 16, 8, 1, 2, 12, 1, 1024, "pairs", 24, True, 5113)
TWO = Run("qwen3-30b-a3b", "25.11", "FP8", 16, 8, 1, 2, 24, 2, 512, "pairs", 24, True, 5275)
INSIDE = Run("qwen3-30b-a3b", "26.02.01", "FP8", 16, 8, 1, 2, 12, 1, 1024, "node", 24, True, 9058)
CHECKED = (
    Run("qwen3-30b-a3b", "26.04.01", "FP8", 16, 16, 1, 1, 1, 1, 1024, "node", 48, True, 8960),
    Run("qwen3-235b-a22b", "26.04.01", "FP8", 256, 32, 2, 8, 4, 1, 8192, "node", 12, False, 1712),
    Run("qwen3-235b-a22b", "26.04.01", "FP8", 256, 32, 2, 8, 4, 1, 8192, "pairs", 12, False, 1712),
    Run("gpt-oss-120b", "26.04.01", "BF16", 64, 8, 1, 4, 1, 1, 1280, "pairs", 9, True, 5824),
)

REMARKS = (
    "* `difference fitted`: releases whose other costs are twice those of 26.02.01 from the same settings; they "
    "differ in more than the sequences of a micro-step, so `layer_overhead_s` is the weaker of the two constants.",
    "* Qwen3-235B-A22B ran a plain all-to-all and overlapped it with compute of another micro-step, which is not "
    "simulated: `pairs` shows all of that exchange, `node` a shorter one, all exposed. That `node` meets the run "
    "speaks for the sum, not for each term.",
    "* The Qwen3 runs have FP8 GEMMs, priced as bf16. gpt-oss-120b is bf16 throughout, re-forwards norms and "
    "activations, and has sliding windows in half of its layers, priced as full attention: the simulator lacks more "
    "there than these overheads.",
)


def posed(run: Run, cluster: Cluster) -> Problem:
    """One micro-step of the slowest pipeline rank, every source's pairs spread evenly over the experts."""
    model = Model.preset(run.model)
    tokens = run.sequences * SEQUENCE // run.tp
    load_MLGE = np.full((1, run.layers, run.ep, model.num_experts), tokens * model.num_topk // model.num_experts)
    first = model.first_moe_layer + (model.num_layers - run.layers if run.has_head else 1)
    work = Workload.from_counts(
        load_MLGE, num_topk=model.num_topk, tokens_MG=np.full((1, run.ep), tokens), model=run.model,
        attention_MG=np.full((1, run.ep), run.sequences * SEQUENCE**2 / run.tp), moe_layer_L=np.arange(first, first + run.layers),
    )  # fmt: skip
    return Problem.of(work, cluster, model=model, redundant=0)


def step_seconds(run: Run, cluster: Cluster) -> tuple[float, float]:
    """Seconds per micro-step, and of them those of tensor parallelism, bubble, reduction and optimizer."""
    problem = posed(run, cluster)
    stage_s = simulate(problem, Planner(rank=()).plan(problem)[0], outside_s_MG=head_seconds(problem)).total_s
    # Attention gathers its tokens and scatters its sums: two exchanges forward, three backward, of what the other ranks have.
    tokens = run.sequences * SEQUENCE
    exchanged = 5 * tokens * problem.model.token_bytes * (run.tp - 1) / run.tp
    tensor_s = run.layers * exchanged / cluster.peer_bytes_per_s
    bubble_s = (stage_s + tensor_s) * (run.pp - 1) / (run.vpp * run.micro_steps)
    trainer = Trainer(data_parallel=max(1, run.gpus // (run.ep * run.pp)))
    end_s = (reduction_seconds(problem, trainer) + optimizer_seconds(problem, trainer)) / run.micro_steps
    besides_s = tensor_s + bubble_s + end_s
    return stage_s + besides_s, besides_s


def published_seconds(run: Run) -> float:
    """Seconds per micro-step of the published run."""
    return run.sequences * SEQUENCE / (run.tp * run.pp * run.tokens_per_s)


def cluster_of(run: Run, **figures: Any) -> Cluster:
    """The preset with other overheads, and the dispatcher that the run used."""
    return dataclasses.replace(Cluster.preset(GPU, run.ep, dispatch=run.dispatch), **figures)


def fitted() -> dict[str, float]:
    """The two overheads, from Qwen3-30B-A3B alone; every term is linear in them."""
    zero = {"layer_overhead_s": 0.0, "pair_overhead_s": 0.0}

    def fixed_s(layer_overhead_s: float) -> float:
        """Seconds of a micro-step that do not grow with its tokens; the quadratic part of attention is the same per sequence."""
        found = {
            run: step_seconds(run, cluster_of(run, **zero | {"layer_overhead_s": layer_overhead_s}))[0] for run in (ONE, TWO)
        }
        return 2.0 * found[ONE] - found[TWO]

    wanted_s = 2.0 * published_seconds(ONE) - published_seconds(TWO)
    layer_s = (wanted_s - fixed_s(0.0)) / (fixed_s(1.0) - fixed_s(0.0))

    def inside_s(pair_overhead_s: float) -> float:
        figures = {"layer_overhead_s": layer_s, "pair_overhead_s": pair_overhead_s}
        return step_seconds(INSIDE, cluster_of(INSIDE, **figures))[0]

    pair_s = (published_seconds(INSIDE) - inside_s(0.0)) / (inside_s(1.0) - inside_s(0.0))
    return {"layer_overhead_s": max(layer_s, 0.0), "pair_overhead_s": max(pair_s, 0.0)}


def fitted_efficiency(layer_overhead_s: float) -> float:
    """The efficiency of GEMMs and attention that explains the same run without seconds per pair, by bisection."""
    low, high = 0.05, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        figures = {"layer_overhead_s": layer_overhead_s, "pair_overhead_s": 0.0, "compute_efficiency": middle}
        too_fast = step_seconds(INSIDE, cluster_of(INSIDE, **figures))[0] < published_seconds(INSIDE)
        low, high = (low, middle) if too_fast else (middle, high)
    return (low + high) / 2


def line(run: Run, role: str, variants: dict[str, dict[str, float]]) -> str:
    """One run: published beside simulated, with each set of constants."""
    where = f"EP{run.ep}" + (f" TP{run.tp}" if run.tp > 1 else "") + (f" PP{run.pp}" if run.pp > 1 else "")
    cells = []
    for figures in variants.values():
        tokens_per_s = run.tokens_per_s * published_seconds(run) / step_seconds(run, cluster_of(run, **figures))[0]
        cells.append(f"{tokens_per_s:.0f} ({tokens_per_s / run.tokens_per_s - 1:+.0%})")
    setting = f"{where}, {run.gpus} GPUs, {run.precision}, {run.sequences} x {SEQUENCE}, {run.dispatch}"
    return f"| {run.model} {run.release} | {setting} | {role} | {run.tokens_per_s:.0f} | " + " | ".join(cells) + " |"


def report() -> str:
    """Markdown of the fit and of its checks."""
    constants = fitted()
    efficiency = fitted_efficiency(constants["layer_overhead_s"])
    none = {"layer_overhead_s": 0.0, "pair_overhead_s": 0.0}
    variants = {
        "no overheads": none, "overheads fitted": constants,
        "as efficiency": none | {"layer_overhead_s": constants["layer_overhead_s"], "compute_efficiency": efficiency},
    }  # fmt: skip
    lines = [
        f"layer_overhead_s = {constants['layer_overhead_s']:.3g}, pair_overhead_s = {constants['pair_overhead_s']:.3g}"
        f" (or, without seconds per pair, compute_efficiency = {efficiency:.3f}).", "",
        "| run | setting | | published tokens/s/GPU | " + " | ".join(variants) + " |", "|" + " --- |" * (4 + len(variants)),
        *(line(run, "difference fitted", variants) for run in (ONE, TWO)), line(INSIDE, "fitted", variants),
        *(line(run, "checked", variants) for run in CHECKED), "", *REMARKS,
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    options = command_line(__doc__).parse_args()
    text = f"# Overheads of the presets\n\n{hardware()}\n\n{report()}\n"
    emit(text, options.out)


if __name__ == "__main__":
    main()
