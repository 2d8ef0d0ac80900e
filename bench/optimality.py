"""Compares replica strategies with proven optima on instances drawn at run time, and prints markdown.

    python -m bench.optimality [--instances N] [--out bench/results/optimality_HARDWARE_DATE.md]

Loads come from `synthetic_workload`. Optima come from `Exact`, started from `foremoe`; an instance that it does not close
in its time counts against the bound it has proven. Skews and seconds are recomputed here, from slots and quotas alone: neither
the planner's cost model nor its kernels judge the planner.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.evaluator import rank_loads
from bench.output import command_line, emit, hardware
from foremoe.base.parallel import row_runner
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.solvers import Exact
from foremoe.synthetic.counts import synthetic_workload

# Letters: N rows, G ranks, S slots per rank, E experts.

NAMES = ("static", "lplb", "quota", "least_loaded", "greedy", "foremoe")
SEEDS = range(1, 6)
MICRO_STEPS = 4
MODEL = "qwen3-30b-a3b"
WORST = 3


@dataclass
class Group:
    """The instances of one table: objective over optimum for every strategy, and where each instance comes from."""

    title: str
    over: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NAMES})
    origin: list[str] = field(default_factory=list)
    open: int = 0

    def table(self, share: bool) -> str:
        """Markdown; with `share` also the share of instances within 1 % of the optimum."""
        head = ["strategy", "mean", "p99", "max", *(["within 1 %"] if share else [])]
        lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
        for name in NAMES:
            over = np.array(self.over[name])
            cells = [f"{over.mean():.5f}", f"{np.quantile(over, 0.99):.4f}", f"{over.max():.4f}"]
            lines.append(f"| {' | '.join([name, *cells, *([f'{(over <= 1.01).mean():.1%}'] if share else [])])} |")
        ours = np.array(self.over["foremoe"])
        worst = [f"{ours[i]:.4f} ({self.origin[i]})" for i in np.argsort(-ours, kind="stable")[:WORST] if ours[i] > 1.0]
        said = f"{len(ours)} instances, {self.open} not closed." + (f" Worst of `foremoe`: {'; '.join(worst)}." * bool(worst))
        return f"### {self.title}\n\n" + "\n".join(lines) + f"\n\n{said}"


def seconds(problem: Problem, placement: Placement, n: int) -> float:
    """The closed form of docs/cost-model.md for row `n`, written out from the page."""
    model, cluster, load_GE = problem.model, problem.cluster, problem.load_NGE[n]  # type: ignore[index]
    G, B, node = problem.G, problem.B, cluster.node_of_rank_G.tolist()
    expert_GS, quota_GS = placement.expert_NGS[n].tolist(), placement.quotas_NGS[n].tolist()
    trains, again = problem.stage == "update", bool(problem.schedule.reforward)
    gemm_passes, exchanges = 1 + 2 * trains + again, 1 + trains + again
    speed = cluster.flops_per_s * cluster.compute_efficiency
    near, far = cluster.peer_bytes_per_s, cluster.rdma_bytes_per_s / cluster.nic_sharing
    micro_step = n // problem.L
    work = model.attention_flops(problem.tokens_MG[micro_step].astype(float), problem.attention_MG[micro_step])  # type: ignore[index]
    window_s = float(np.max(work)) / speed
    pair_s, slot_s = model.flops_per_pair / speed, cluster.slot_overhead_s
    total = sum(sum(row) for row in quota_GS)
    work_G: list[tuple[float, int]] = []
    served: dict[tuple[int, int], int] = {}  # (rank, expert)
    sent = {(link, g, way): 0 for link in ("near", "far") for g in range(G) for way in ("out", "in")}
    for g in range(G):
        busy = 0
        for s, (e, quota) in enumerate(zip(expert_GS[g], quota_GS[g], strict=True)):
            if e < 0:
                continue
            served[g, e] = quota
            busy += quota > 0 or (s < B and problem.load_NE[n, e] > 0)
            home = int(problem.home_LE[n % problem.L, e]) // B
            if s >= B and quota > 0:
                link = "near" if node[home] == node[g] else "far"
                sent[link, home, "out"] += 1
                sent[link, g, "in"] += 1
        work_G.append((gemm_passes * (pair_s * sum(quota_GS[g]) + slot_s * busy), sum(quota_GS[g])))
    own = sum(min(int(load_GE[g, e]), quota) for (g, e), quota in served.items())
    inside = 0
    for v in set(node):
        ranks = [g for g in range(G) if node[g] == v]
        for e in range(problem.E):
            inside += min(int(load_GE[ranks, e].sum()), sum(served.get((g, e), 0) for g in ranks))
    latency_s = 0.0 if G == 1 else cluster.rdma_latency_s if len(set(node)) > 1 else cluster.peer_latency_s
    dispatch_s = latency_s + model.token_bytes * ((inside - own) / (G * near) + (total - inside) / (G * far))
    # The rank with the most pairs holds exchanges up.
    size = [node.count(v) for v in set(node)]
    inside_share = sum(n * n for n in size) / G**2
    late_s = max((inside_share - 1 / G) / near, (1 - inside_share) / far) * 2 * exchanges * model.token_bytes
    slowest_s = max(work + late_s * load for work, load in work_G) - late_s * total / G
    ahead = min(2, problem.slot_depth - 1)
    hide_s = problem.cost.overlap * (ahead * (window_s + pair_s * total / G) if ahead else window_s)
    hide_back_s = (2 + again) * hide_s

    def seconds_of(num_bytes: float) -> dict[str, float]:
        each = {"near": num_bytes / near + cluster.peer_latency_s, "far": num_bytes / far + cluster.rdma_latency_s}
        if num_bytes == model.expert_bytes:  # weights may come from the host store, gradients have no such way
            each["far"] = min(each["far"], num_bytes / cluster.host_bytes_per_s + cluster.host_latency_s)
        return each

    def late(num_bytes: float, hidden_s: float) -> float:
        each = seconds_of(num_bytes)
        return max(0.0, max(count * each[link] for (link, _, _), count in sent.items()) - hidden_s)

    def slowed(num_bytes: float) -> float:
        each = seconds_of(num_bytes)
        return cluster.copy_contention / G * sum(count * each[link] for (link, _, way), count in sent.items() if way == "out")

    copies_s = late(model.expert_bytes, hide_s) + slowed(model.expert_bytes)
    if trains:
        copies_s += late(model.expert_bytes, hide_back_s) + slowed(model.expert_bytes)
        copies_s += late(model.gradient_bytes, hide_back_s) + slowed(model.gradient_bytes)
    return gemm_passes * window_s + 2 * exchanges * dispatch_s + slowest_s + copies_s


def largest_load(problem: Problem, placement: Placement, n: int) -> float:
    """What objective balance counts of row `n`."""
    return float(rank_loads(problem, placement, n).max())


def judge(group: Group, problem: Problem, origin: str, objective: Callable[[Placement, int], float], limit_s: float) -> None:
    """Adds every row of `problem` to `group`."""
    made: dict[str, Placement] = {}
    for name in NAMES:
        plan, _ = STRATEGIES[name].plan(problem)
        made[name] = Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS)
    with row_runner():
        found = Exact(node_limit=2**31 - 1, time_limit_s=limit_s).solve(problem, made["foremoe"])
    assert found.bound_N is not None and found.stop_N is not None
    for n in range(problem.N):
        closed = found.stop_N[n] == Stop.OPTIMAL
        best = objective(found, n) if closed else float(found.bound_N[n])
        group.open += not closed
        group.origin.append(f"{origin}, micro-step {n // problem.L}, layer {n % problem.L}")
        for name, placement in made.items():
            group.over[name].append(objective(placement, n) / best)


def balance(instances: int, limit_s: float) -> Iterator[Group]:
    """Objective balance, 128 experts: `instances` of regime mid with one slot, fewer of the others."""
    for redundant, regime, wanted in (
        (1, "mid", instances),
        (1, "mild", instances // 4),
        (1, "skew", instances // 4),
        (2, "mid", instances // 4),
        (2, "mild", instances // 8),
        (2, "skew", instances // 8),
    ):
        for num_ranks in (8, 16):
            group = Group(f"Balance, R = {redundant}, regime {regime}, 128 experts on {num_ranks} ranks")
            layers = max(1, round(wanted / 2 / len(SEEDS) / MICRO_STEPS + 0.49))
            for seed in SEEDS:
                work = synthetic_workload(
                    MODEL, num_ranks=num_ranks, tokens_per_rank=8192, micro_steps=MICRO_STEPS, num_layers=layers,
                    regime=regime, seed=seed,
                )  # fmt: skip
                cluster, cost = Cluster.preset("8xh100", num_ranks=num_ranks), CostModel(objective="balance")
                problem = Problem.of(work, cluster, redundant=redundant, cost=cost)
                judge(group, problem, f"seed {seed}", functools.partial(largest_load, problem), limit_s)
            yield group


def small_problem(experts: int, ranks: int, node: int, redundant: int, tokens: int, overlap: float, seed: int) -> Problem:
    """A few experts of the usual size on a few ranks: two layers of one micro-step, under the objective time."""
    model = dataclasses.replace(Model.preset(MODEL), num_experts=experts, num_topk=max(1, min(8, experts // 4)))
    work = synthetic_workload(
        model, num_ranks=ranks, tokens_per_rank=tokens, micro_steps=1, num_layers=2, regime="mid", seed=seed
    )
    cluster = Cluster.preset("8xh100", num_ranks=ranks, ranks_per_node=node)
    cost = CostModel(objective="time", overlap=overlap)
    return Problem.of(work, cluster, model=model, redundant=redundant, cost=cost)


def timed(instances: int, limit_s: float) -> Iterator[Group]:
    """Objective time with all prices of copies: tokens from few, where no copy pays, to many; hidden copies and exposed ones."""
    shapes = [(8, 2, 2, 1), (8, 4, 4, 1), (16, 4, 4, 1), (32, 4, 4, 1), (16, 4, 4, 2), (8, 4, 2, 1), (16, 4, 2, 1), (32, 4, 2, 1)]
    shapes += [(16, 4, 2, 2)]
    settings = [(tokens, overlap) for tokens in (128, 512, 2048, 8192, 32768) for overlap in (1.0, 0.0)]
    num_seeds = max(1, round(instances / (2 * len(shapes) * len(settings))))
    for one_node in (True, False):
        group = Group(f"Time, 8 to 32 experts on 2 to 4 ranks, {'one node' if one_node else 'two nodes'}")
        for experts, ranks, node, redundant in shapes:
            if (node == ranks) != one_node:
                continue
            for tokens, overlap in settings:
                for seed in range(1, num_seeds + 1):
                    problem = small_problem(experts, ranks, node, redundant, tokens, overlap, seed)
                    origin = f"small_problem({experts}, {ranks}, {node}, {redundant}, {tokens}, {overlap}, {seed})"

                    def cost(placement: Placement, n: int, problem: Problem = problem) -> float:
                        rank_loads(problem, placement, n)
                        return seconds(problem, placement, n)

                    judge(group, problem, origin, cost, limit_s)
        yield group


def report(groups: Iterable[Group], command: str) -> str:
    """All tables, each printed to stderr as it is done."""
    sections = []
    for group in groups:
        sections.append(group.table(share=group.title.startswith("Time")))
        print(sections[-1] + "\n", file=sys.stderr, flush=True)
    head = (
        f"# Strategies over proven optima\n\nMeasured on: {hardware()}. Command: `{command}`. Objective of a strategy divided by "
        "the optimum of its row, or by its proven bound where it was not closed; homes contiguous and kept. Seconds: model, "
        "uncalibrated."
    )
    return "\n\n".join([head, *sections]) + "\n"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--instances", type=int, default=320, help="of balance, R = 1, regime mid; the rest scales (default 320)")
    parser.add_argument("--only", choices=("balance", "time"), help="one objective only")
    parser.add_argument("--limit", type=float, default=30.0, metavar="S", help="seconds for an instance (default 30)")
    args = parser.parse_args()
    if args.instances < 1 or not args.limit > 0.0:
        parser.error(f"--instances and --limit must be above 0; got {args.instances} and {args.limit}")

    def groups() -> Iterator[Group]:
        if args.only != "time":
            yield from balance(args.instances, args.limit)
        if args.only != "balance":
            yield from timed(args.instances, args.limit)

    began = time.perf_counter()
    text = report(groups(), f"python -m bench.optimality --instances {args.instances} --limit {args.limit:g}")
    emit(text, args.out)
    print(f"{time.perf_counter() - began:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
