"""How near the planner comes to perfect balance, at how many copies, and how fast: R = 1 and 2, several loads and seeds.

    python -m bench.frontier [--seeds 3] [--out bench/results/frontier_HARDWARE_DATE.md]

Loads are synthetic (`foremoe.synthetic`) or recorded (skipped where the traces are missing); homes are contiguous. Skews and
replicas are counted here, from the placement alone; seconds of a stage are simulated, uncalibrated. Planning times are CPU
times of one thread.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable

import numpy as np

from bench.cases import RECORDED
from bench.evaluator import copies_N3, skew_N
from bench.output import command_line, emit, hardware
from bench.settings import under
from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.plan.split import split_over_sources
from foremoe.planner.planner import Planner
from foremoe.problem.bounds import load_bound
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.simulate import simulate
from foremoe.solvers import Anneal, Greedy, LeastLoaded, Lplb, Quota, RankSolver, Search
from foremoe.synthetic.counts import synthetic_workload
from foremoe.workload.workload import Workload

# Letters: N rows, G ranks, S slots per rank, B base slots, R rounds, A arms.

SHAPES = (
    ("qwen3-30b-a3b", (8, 16, 32, 64)),
    ("deepseek-v3", (32, 64, 128, 256)),
)
NUM_LAYERS = 24
SECONDS = 90.0
BALANCE = CostModel(objective="balance")
PEERS: tuple[RankSolver, ...] = (Quota(), LeastLoaded(min_pairs=0, threshold=1.0), Greedy(), Lplb())


def problem(model: str, num_ranks: int, *, regime: str, micro_steps: int, seed: int, redundant: int, cost: CostModel) -> Problem:
    """8192 tokens per rank, 24 layers."""
    work = synthetic_workload(
        model, num_ranks=num_ranks, tokens_per_rank=8192, micro_steps=micro_steps, num_layers=NUM_LAYERS, regime=regime, seed=seed
    )
    return Problem.of(work, Cluster.preset("8xh100", num_ranks=num_ranks), redundant=redundant, cost=cost)


def balance_tables(seeds: int) -> Iterable[str]:
    """Mean, p99 and largest skew under objective balance."""
    for redundant, regime, micro_steps in (
        (1, "mid", 4), (1, "mid", 32), (2, "mid", 4), (2, "mid", 32), (1, "mild", 4), (1, "skew", 4)
    ):  # fmt: skip
        yield f"### R = {redundant}, regime {regime}, M = {micro_steps}\n"
        yield "| load | static | quota | least_loaded | greedy | foremoe: mean | p99 | max | replicas per rank | rows |"
        yield "|" + " --- |" * 10
        for model, sizes in SHAPES:
            for num_ranks in sizes:
                found: dict[str, list[Array]] = {}
                replicas = []
                for seed in range(seeds if micro_steps == 4 else 1):
                    p = problem(
                        model, num_ranks, regime=regime, micro_steps=micro_steps, seed=seed, redundant=redundant, cost=BALANCE
                    )
                    found.setdefault("static", []).append(skew_N(p, p.static()))
                    for solver in (*PEERS[:3], Search()):
                        placement = solver.solve(p, p.static())
                        found.setdefault(type(solver).__name__, []).append(skew_N(p, placement))
                    replicas.append((np.asarray(placement.expert_NGS)[:, :, p.B :] >= 0).sum(axis=(1, 2)) / p.G)
                all_N = {name: np.concatenate(parts) for name, parts in found.items()}
                mine_N = all_N.pop("Search")
                means = " | ".join(f"{values.mean():.4f}" for values in all_N.values())
                yield (
                    f"| {model} EP{num_ranks} | {means} | {mine_N.mean():.5f} | {np.quantile(mine_N, 0.99):.4f} |"
                    f" {mine_N.max():.4f} | {np.concatenate(replicas).mean():.2f} | {len(mine_N)} |"
                )
        yield ""


def recorded_table() -> Iterable[str]:
    """Recorded traces at 8, 16 and 32 ranks, R = 1."""
    yield "| trace | ranks | static | foremoe: mean | p99 | mean above the bound | p99 above | rows |"
    yield "|" + " --- |" * 8
    for path in sorted(RECORDED.glob("*.npz")):
        trace = RoutingTrace.load(path, model="gpt-oss-20b" if path.stem.startswith("gpt_oss") else "deepseek-v2-lite")
        for num_ranks in (8, 16, 32):
            if trace.num_experts % num_ranks:
                continue
            work = Workload.from_trace(trace, num_ranks=num_ranks, tokens_per_rank=max(64, min(1024, trace.T // num_ranks // 4)))
            p = Problem.of(work, Cluster.preset("8xh100", num_ranks=num_ranks), redundant=1, cost=BALANCE)
            mine_N, static_N = skew_N(p, Search().solve(p, p.static())), skew_N(p, p.static())
            mean_N = p.load_NE.sum(axis=1) / p.G
            above_N = mine_N * mean_N / load_bound(p) - 1.0
            yield (
                f"| {path.stem} | {num_ranks} | {static_N.mean():.4f} | {mine_N.mean():.5f} | {np.quantile(mine_N, 0.99):.4f} |"
                f" {above_N.mean():.3%} | {np.quantile(above_N, 0.99):.2%} | {p.N} |"
            )


def trade_off_tables(seeds: int) -> Iterable[str]:
    """Skew and simulated time against replicas, bytes and fan-out, R = 1, under either dispatch."""
    for model, num_ranks, dispatch in (("qwen3-30b-a3b", 64, "pairs"), ("qwen3-30b-a3b", 64, "node"),
                                       ("deepseek-v3", 64, "pairs"), ("deepseek-v3", 64, "node")):  # fmt: skip
        yield f"### {model} EP{num_ranks}, dispatch {dispatch}\n"
        yield (
            "| planner | skew mean | p99 | replicas per rank | across nodes | GB per row in nodes | across | fan-out mean | max |"
            " stage ms |"
        )
        yield "|" + " --- |" * 10
        arms: list[tuple[str, RankSolver | None, CostModel]] = [("static", None, BALANCE)]
        arms += [(type(solver).__name__, solver, BALANCE) for solver in PEERS]
        arms += [("Search, balance", Search(), BALANCE)]
        arms += [(f"Search(effort={e}), time", Search(e), CostModel()) for e in (0, 200, 2000, None)]
        for name, solver, cost in arms:
            parts: list[Array] = []
            for seed in range(seeds):
                p = problem(model, num_ranks, regime="mid", micro_steps=4, seed=seed, redundant=1, cost=cost)
                [p] = under(dispatch, [p])
                plan, _ = Planner(rank=() if solver is None else (solver,), guard=False).plan(p)
                placement = Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS)
                stage_N = np.full(p.N, simulate(p, plan).total_s / p.N)
                parts.append(np.column_stack([skew_N(p, placement), copies_N3(p, placement), stage_N]))
            skew, num, far, fan, stage_s = np.concatenate(parts).T
            size = p.model.expert_bytes / 1e9
            yield (
                f"| {name} | {skew.mean():.4f} | {np.quantile(skew, 0.99):.3f} | {num.mean() / num_ranks:.3f} |"
                f" {far.mean() / num_ranks:.3f} | {(num - far).mean() * size:.2f} | {far.mean() * size:.2f} | {fan.mean():.1f} |"
                f" {fan.max():.0f} | {stage_s.sum() / seeds * 1e3:.0f} |"
            )
        yield ""


def speed_table() -> Iterable[str]:
    """CPU microseconds per row of one thread, objective time: the best of 5 after a warm-up, and the slowest hundredth of rows.

    A shared machine is slow for minutes at a time: so solvers, loads and single rows take turns for `SECONDS`, solvers with five
    calls each. Shown are the best of all rounds, the median over rounds, and the median of the ratios.
    """
    yield "| load | foremoe: mean us, best | median | p99, best | quota: mean us, best | median | median ratio |"
    yield "|" + " --- |" * 7
    shapes = (("qwen3-30b-a3b", 16), ("qwen3-30b-a3b", 64), ("deepseek-v3", 64), ("deepseek-v3", 256))
    loads = [problem(*shape, regime="mid", micro_steps=4, seed=0, redundant=1, cost=CostModel()) for shape in shapes]
    arms = [(p, solver) for p in loads for solver in (Search(), Quota())]
    for p, solver in arms:
        _with_split(solver, p)
    best = lambda p, solver: min(_seconds(solver, p) for _ in range(5)) / p.N * 1e6  # noqa: E731
    rows = [[p[m : m + 1].layers([layer]) for m in range(p.M) for layer in range(p.L)] for p in loads]
    rounds: list[list[float]] = []
    singles: list[list[list[float]]] = []
    end_s = time.perf_counter() + SECONDS
    while not rounds or time.perf_counter() < end_s:
        rounds.append([best(p, solver) for p, solver in arms])
        singles.append([[_seconds(Search(), row) * 1e6 for row in of_load] for of_load in rows])
    us_RA, single_us = np.array(rounds), [np.min(of_load, axis=0) for of_load in zip(*singles, strict=True)]
    for i, (model, num_ranks) in enumerate(shapes):
        ours_R, theirs_R = us_RA[:, 2 * i], us_RA[:, 2 * i + 1]
        # A row by itself pays for a call as well; what that costs is the difference of the means.
        p99 = ours_R.min() + np.quantile(single_us[i], 0.99) - np.mean(single_us[i])
        yield (
            f"| {model} EP{num_ranks} | {ours_R.min():.1f} | {np.median(ours_R):.1f} | {p99:.1f} | {theirs_R.min():.1f} |"
            f" {np.median(theirs_R):.1f} | {np.median(ours_R / theirs_R):.2f} |"
        )


def _seconds(solver: RankSolver, where: Problem) -> float:
    begin_s = time.process_time()
    _with_split(solver, where)
    return time.process_time() - begin_s


def _with_split(solver: RankSolver, where: Problem) -> None:
    """The solver and the split of one source's pairs over the slots, with the sums over nodes that both read."""
    if hasattr(where, "_counts"):
        object.__delattr__(where, "_counts")  # kept from an earlier call, they would cost nothing
    placement = solver.solve(where, where.static())
    assert where.load_NGE is not None
    split_over_sources(
        where.load_NGE,
        placement.expert_NGS,
        placement.quotas_NGS,
        where.cluster.node_of_rank_G,
        0,
        demand_NVE=where.counts().demand_NVE,
    )


def stage_table() -> Iterable[str]:
    """A whole update stage of Qwen3-235B: 94 layers, 32 micro-steps, 64 ranks, two threads; best and median of what
    `SECONDS` / 2 hold."""
    work = synthetic_workload("qwen3-235b-a22b", num_ranks=64, tokens_per_rank=8192, micro_steps=32, regime="mid", seed=0)
    p = Problem.of(work, Cluster.preset("8xh100", num_ranks=64), redundant=1)
    yield "| what | wall s, best | median | CPU s, best | median |"
    yield "|" + " --- |" * 5

    def timed(what: str, run: object) -> str:
        assert callable(run)
        run()
        runs: list[tuple[float, float]] = []
        end_s = time.perf_counter() + SECONDS / 2
        while not runs or time.perf_counter() < end_s:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            run()
            runs.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
        cells = [f"{seconds:.2f}" for column in zip(*runs, strict=True) for seconds in (min(column), np.median(column))]
        return f"| {what} | {' | '.join(cells)} |"

    yield timed("plan with every row checked and transfers derived", lambda: Planner().plan(p, num_threads=2))

    def with_homes() -> None:
        homes = Planner(home=Anneal()).homes(p, num_threads=2)
        Planner().plan(dataclasses.replace(p, home_LE=homes), num_threads=2)

    yield timed("the same after the home level", with_homes)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    lines = [f"# The planner at the frontier\n\nMeasured on: {hardware()}. Command: `python -m bench.frontier`.\n"]
    sections = (
        ("Speed, objective time, R = 1, one thread, with the split of one source", speed_table()),
        ("A stage of Qwen3-235B: 94 layers x 32 micro-steps x 64 ranks, two threads", stage_table()),
        ("Objective balance, synthetic loads", balance_tables(args.seeds)),
        ("Objective balance, recorded loads, R = 1", recorded_table()),
        ("Copies against balance and simulated stage (uncalibrated), R = 1, regime mid, M = 4", trade_off_tables(args.seeds)),
    )
    for title, rows in sections:
        print(title, file=sys.stderr, flush=True)
        lines += [f"## {title}\n", *rows, ""]
    text = "\n".join(lines)
    emit(text, args.out)


if __name__ == "__main__":
    main()
