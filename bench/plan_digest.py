"""Computes digests of plans for many settings, to show that a change of the code leaves every plan the same, byte for byte.

    python -m bench.plan_digest --write bench/results/plan_digests.json
    python -m bench.plan_digest --check bench/results/plan_digests.json

A digest covers every array of a plan, including floats, but not the header, which contains the expressions of solvers. Compare
digests on one machine, because rounding may differ with another processor or version of numpy.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.output import hardware
from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.routing.trace import RoutingTrace
from foremoe.solvers import (
    Anneal,
    BalancedTokens,
    Eplb,
    Even,
    Exact,
    ExpertAware,
    Greedy,
    LeastLoaded,
    Lplb,
    Quota,
    Search,
)
from foremoe.synthetic.counts import synthetic_workload
from foremoe.synthetic.tokens import synthetic_trace
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, V nodes.

BALANCE, TIME = CostModel(objective="balance"), CostModel()

# Enough moves to show a change of the search, in a moment.
PLAIN = Search(effort=100)


@functools.cache
def load(model: str, num_ranks: int, regime: str, stage: str, tokens: int, seed: int) -> Workload:
    """Four micro-steps of four layers."""
    return synthetic_workload(
        model, num_ranks=num_ranks, tokens_per_rank=tokens, micro_steps=4, regime=regime, seed=seed, num_layers=4, stage=stage
    )


def problem(
    model: str, num_ranks: int, *, regime: str = "mid", stage: str = "update", cluster: str = "8xh100", tokens: int = 4096,
    seed: int = 0, **options: Any,
) -> Problem:  # fmt: skip
    """A synthetic problem; `options` as `Problem.of`."""
    work = load(model, num_ranks, regime, stage, tokens, seed)
    return Problem.of(work, Cluster.preset(cluster, num_ranks=num_ranks), **options)


@functools.cache
def trace() -> RoutingTrace:
    """96 sequences of a small model's layers."""
    return synthetic_trace("qwen3-30b-a3b", num_sequences=96, num_layers=2, seed=3, regime="mid")


def packed(packer: Any) -> Callable[[], Any]:
    """A plan of sequences that `packer` dealt to 16 ranks."""

    def make() -> Any:
        planner = Planner(pack=packer, rank=(PLAIN,))
        work = planner.workload(trace(), num_ranks=16, tokens_per_rank=512)
        return Planner(rank=(PLAIN,)).plan(Problem.of(work, Cluster.preset("8xh100", num_ranks=16)))[0]

    return make


def homed(home: Any, model: str, num_ranks: int) -> Callable[[], Any]:
    """A plan over the homes that `home` chose."""

    def make() -> Any:
        first = problem(model, num_ranks)
        home_LE = Planner(home=home).homes(first)
        return Planner(rank=(PLAIN,)).plan(dataclasses.replace(first, home_LE=home_LE))[0]

    return make


def settings() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every setting's name and what makes its plan."""

    def plan(of: Callable[[], Problem], **levels: Any) -> Callable[[], Any]:
        levels = {"rank": (PLAIN,), **levels}
        return lambda: Planner(**levels).plan(of())[0]

    shapes = [
        ("mixtral-8x7b", 4), ("mixtral-8x7b", 8), ("gpt-oss-20b", 8), ("gpt-oss-20b", 16), ("deepseek-v2-lite", 16),
        ("qwen3-30b-a3b", 16), ("qwen3-30b-a3b", 32), ("qwen3-235b-a22b", 64), ("gpt-oss-120b", 64), ("deepseek-v3", 64),
        ("deepseek-v3", 128), ("deepseek-v3", 256),
    ]  # fmt: skip
    for model, ranks in shapes:
        for redundant in (1, 2):
            for cost in (BALANCE, TIME):
                name = f"{model} EP{ranks} R{redundant} {cost.objective}"
                yield name, plan(functools.partial(problem, model, ranks, redundant=redundant, cost=cost))
    yield "R0", plan(lambda: problem("qwen3-30b-a3b", 16, redundant=0))
    of = functools.partial(functools.partial, problem, "qwen3-30b-a3b", 16)
    yield "recompute", plan(of(stage="recompute"))
    yield "recompute, two slots", plan(of(stage="recompute", redundant=2, slot_depth=1))
    yield "recompute EP64, 512 tokens", plan(lambda: problem("qwen3-235b-a22b", 64, stage="recompute", tokens=512))
    yield "512 tokens", plan(of(tokens=512))
    yield "skew", plan(of(regime="skew"))
    yield "mild", plan(of(regime="mild"))
    yield "pcie", plan(of(cluster="8xpcie"))
    yield "h20", plan(of(cluster="8xh20"))
    yield "one buffer", plan(of(slot_depth=1))
    yield "inside nodes", plan(of(replicas="node"))
    yield "inside nodes, balance", plan(of(replicas="node", cost=BALANCE))
    yield "no overlap", plan(of(cost=CostModel(overlap=0.0)))
    yield "reforward", plan(of(schedule=Schedule.accumulate(4, reforward=True)))
    yield "1f1b", plan(of(schedule=Schedule.one_f_one_b(4, 2, 0)))
    yield "sources unknown", plan(lambda: dataclasses.replace(problem("qwen3-30b-a3b", 16), load_MLGE=None))
    yield "start", plan(of(), rank=(Search(effort=0),))
    yield "default effort", plan(of(), rank=(Search(),))
    yield "foresight previous", plan(of(), foresight="previous")
    yield "foresight step", plan(of(), foresight="step")
    yield "without guard", plan(of(), guard=False)
    yield "even split", plan(of(), split=Even())
    for solver in (Greedy(), Quota(), LeastLoaded(min_pairs=0, threshold=1.0), Lplb()):
        yield f"{solver!r}", plan(of(), rank=(solver,))
    yield "eplb", plan(of(), rank=(Eplb(),), guard=False)
    yield "eplb, even", plan(of(redundant=2), rank=(Eplb(),), split=Even(), guard=False)
    yield "exact, balance", plan(lambda: problem("mixtral-8x7b", 4, tokens=512, cost=BALANCE), rank=(Search(effort=0), Exact()))
    for packer in (BalancedTokens(), ExpertAware()):
        yield f"pack {type(packer).__name__}", packed(packer)
    yield "homes Anneal", homed(Anneal(sweeps=200), "qwen3-30b-a3b", 16)
    yield "homes Anneal EP64", homed(Anneal(sweeps=100), "qwen3-235b-a22b", 64)


def digest(plan: Any) -> str:
    """SHA-256 over dtypes, shapes and bytes of a plan's arrays, costs and transfers included; names do not count."""
    parts: list[str] = []

    def take(value: Any) -> None:
        if isinstance(value, np.ndarray):
            parts.append(hashlib.sha256(f"{value.dtype.str} {value.shape}".encode() + value.tobytes()).hexdigest())
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                if field.name != "header":
                    take(getattr(value, field.name))

    take(plan)
    return hashlib.sha256(" ".join(sorted(parts)).encode()).hexdigest()[:24]


def main() -> None:
    """Writes digests, or compares them with written ones; rc 1 if any differs."""
    mode, path = sys.argv[1], Path(sys.argv[2])
    found = {}
    for name, make in settings():
        plan = make()
        cost = float(plan.cost_ML.total_s.sum())
        found[name] = {"digest": digest(plan), "cost_s": cost, "most_pairs": int(plan.quota_MLGS.sum(axis=3).max(axis=2).sum())}
        print(f"{found[name]['digest']}  {name}", flush=True)
    if mode == "--write":
        path.write_text(json.dumps({"made on": hardware(), "plans": found}, indent=1) + "\n")
        return
    want = json.loads(path.read_text())["plans"]
    differ = [name for name in want if found.get(name, {}).get("digest") != want[name]["digest"]]
    for name in differ:
        print(f"differs: {name}: {want[name]} before, {found.get(name)} now")
    print(f"{len(want) - len(differ)} of {len(want)} plans are the same")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
