"""Compares the price of rows (`foremoe.price`) with the simulator, for random stages and several planners.

    python -m bench.closed_form [--cases 300] [--out bench/results/closed-form_HARDWARE_DATE.md]

Every case draws a model, a kind of node, EP 4 to 64, a regime, micro-steps of 256 to 8192 tokens, and a stage of two micro-steps
and 16 layers. The error of a price is shown as its ratio to the simulated time. The bias is the relative error of the gain over
static placement that the prices predict. All times are those of the model, uncalibrated.

The second table leaves out plans that wait for copies during more than a tenth of the stage. In such plans, a row also waits for
the copies of other rows, which its price only estimates. The next tables count the cases in which another planner is faster in
the simulator than the default planner, or than the start of the default planner's search alone. The last table counts the rows
for which another planner's price is lower than that of the default planner.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

import foremoe
from bench.output import command_line, emit, hardware
from foremoe import Cluster, CostModel, Planner, Problem
from foremoe.base.arrays import Array
from foremoe.machine.cluster import DISPATCHES
from foremoe.planner.strategies import STRATEGIES
from foremoe.simulate import simulate
from foremoe.solvers import Search

CASES = 300
MODELS = ("gpt-oss-20b", "qwen3-30b-a3b", "qwen3-235b-a22b", "glm-4.5-air", "deepseek-v3", "mixtral-8x7b")
REGIMES = ("mild", "mid", "skew", "gpt-oss-like")
PLANNERS: dict[str, tuple[Planner, str]] = {
    "static": (STRATEGIES["static"], "time"),
    "foremoe": (Planner(), "time"),
    "foremoe, balance": (Planner(), "balance"),
    "quota": (STRATEGIES["quota"], "time"),
    "least_loaded": (STRATEGIES["least_loaded"], "time"),
    "greedy": (STRATEGIES["greedy"], "time"),
    "start": (Planner(rank=(Search(effort=0),)), "time"),
}
OURS = ("foremoe", "start")
HIDDEN = 0.1


def problem_of(seed: int, dispatch: str) -> tuple[str, Problem]:
    """A random stage and its name."""
    rng = np.random.default_rng(seed)
    model = foremoe.Model.preset(str(rng.choice(MODELS)))
    sizes = [size for size in (4, 8, 16, 32, 64) if model.num_experts % size == 0]
    num_ranks, tokens = int(rng.choice(sizes)), int(rng.choice([256, 512, 1024, 2048, 4096, 8192]))
    kind, regime = str(rng.choice(Cluster.preset_names())), str(rng.choice(REGIMES))
    stage = str(rng.choice(["update", "recompute"]))
    work = foremoe.synthetic_workload(
        model.name, num_ranks=num_ranks, tokens_per_rank=tokens, micro_steps=2, num_layers=16, regime=regime, seed=seed,
        stage=stage,
    )  # fmt: skip
    cluster = Cluster.preset(kind, num_ranks, dispatch=dispatch)
    problem = Problem.of(work, cluster, redundant=int(rng.choice([1, 2, 4])))
    return f"{model.name} EP{num_ranks} {kind} {regime} {tokens} tokens {stage} R={problem.R}", problem


class Timed(NamedTuple):
    """One planner's seconds in one case."""

    row_N: Array  # float64, predicted
    simulated: float
    exposed: float  # share of the stage that waits for copies or gradients

    @property
    def predicted(self) -> float:
        """Seconds of all rows."""
        return float(self.row_N.sum())


def seconds(problem: Problem) -> dict[str, Timed]:
    """Predicted and simulated seconds by planner; the figures leave out nothing, and all planners keep homes."""
    out = {}
    for name, (planner, objective) in PLANNERS.items():
        posed = dataclasses.replace(problem, cost=CostModel(objective=objective))
        out[name] = timed(posed, planner.plan(posed)[0])
    return out


def timed(problem: Problem, plan: foremoe.Plan) -> Timed:
    """A plan's price and simulated seconds."""
    run = simulate(problem, plan)
    exposed_s = run.parts.transfer_s + run.parts.gradient_s
    return Timed(foremoe.price(problem, plan.placement).total_s, run.total_s, exposed_s / run.total_s)


def error_table(cases: list[dict[str, Timed]], most: float) -> list[str]:
    """Returns a table of errors and biases by planner, over the cases in which at most this share of its stage is exposed."""
    out = [
        "| planner | cases | price / simulated | 90 % of cases | within 2 % | within 6 % | gain by price | simulated | bias |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in PLANNERS:
        mine = [case for case in cases if case[name].exposed <= most]
        if not mine:
            continue
        error = np.array([case[name].predicted / case[name].simulated for case in mine])
        low, high = np.quantile(error, [0.05, 0.95])
        within = [np.mean(np.abs(error - 1) <= off) for off in (0.02, 0.06)]
        predicted = gain([(case["static"].predicted, case[name].predicted) for case in mine])
        simulated = gain([(case["static"].simulated, case[name].simulated) for case in mine])
        out.append(
            f"| {name} | {len(mine)} | {np.median(error):.3f} | {low:.2f} to {high:.2f} | {within[0]:.0%} | {within[1]:.0%} "
            f"| {predicted:.2f} | {simulated:.2f} | {predicted / simulated - 1:+.1%} |"
        )
    return out


def tables(num_cases: int, dispatch: str) -> list[str]:
    """Errors and biases by planner, and where the default planner loses."""
    names, rows = zip(*(problem_of(seed, dispatch) for seed in range(num_cases)), strict=True)
    timed = [seconds(problem) for problem in rows]
    out = [
        *error_table(timed, 1.0),
        "",
        f"Plans with at most {HIDDEN:.0%} of the stage exposed:",
        "",
        *error_table(timed, HIDDEN),
    ]
    for ours in OURS:
        out += ["", f"| `{ours}` against | longer by over 1 % | over 3 % | worst | where |", "| --- | --- | --- | --- | --- |"]
        for name in PLANNERS:
            if name not in OURS:
                ratio = np.array([case[ours].simulated / case[name].simulated for case in timed])
                worst = int(ratio.argmax())
                where = names[worst] if ratio[worst] > 1.01 else ""
                out.append(
                    f"| {name} | {np.mean(ratio > 1.01):.1%} | {np.mean(ratio > 1.03):.1%} | {ratio.max():.3f} | {where} |"
                )
    shorter = gain([(case["foremoe"].simulated, case["start"].simulated) for case in timed])
    out += ["", f"`foremoe` takes {shorter:.4f} times as long as `start` (geometric mean)."]
    count = sum(case["static"].row_N.size for case in timed)
    out += ["", f"| rows of `foremoe`, {count}, against | dearer by over 1 % | worst |", "| --- | --- | --- |"]
    for name in PLANNERS:
        if name not in OURS:
            row_ratio = np.concatenate([case["foremoe"].row_N / case[name].row_N for case in timed])
            out.append(f"| {name} | {np.mean(row_ratio > 1.01):.2%} | {row_ratio.max():.3f} |")
    return out


def gain(pairs: list[tuple[float, float]]) -> float:
    """Geometric mean of first over second."""
    return float(np.exp(np.mean([np.log(first / second) for first, second in pairs])))


def main() -> None:
    """Writes the tables of both dispatches."""
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=CASES)
    args = parser.parse_args()
    lines = [
        "# The price of rows against the simulator",
        "",
        f"{hardware()}. {args.cases} random stages; simulated, uncalibrated.",
    ]
    for dispatch in DISPATCHES:
        lines += ["", f"## Dispatch: {dispatch}", "", *tables(args.cases, dispatch)]
    emit("\n".join([*lines, ""]), args.out)


if __name__ == "__main__":
    main()
