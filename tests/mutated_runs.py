"""Runs mutated plans, placements and answers of plug-in solvers through planner, simulator and engine.

Every case must be refused (`InputError`, `PlanError`) or give what the dense computation gives. Cases run in child processes, so
that one that kills the interpreter is counted and named::

    PYTHONPATH=.:tests:tests/transfer .venv/bin/python -m mutated_runs --cases 2000
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engine_util import ToyBuffers, check_grads, run_uses
from field_mutations import FREE, changed, leaves, replaced
from reference import dense_reference, run_reference

from bench.output import emit, hardware
from foremoe.base.errors import InputError, PlanError
from foremoe.levels import HomeSolver, PathSolver, RankSolver, SplitSolver
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.simulate import simulate
from foremoe.solvers import Deadline, Even, ExactSplit, Greedy, Keep, LeastLoaded, Quota, Search
from foremoe.testing.ranks import run_threads
from foremoe.transfer.engine import Engine
from foremoe.transfer.local import Local
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts.

REFUSED, EQUAL, WRONG = "refused", "equal", "wrong"
INTERFACES = {"rank": RankSolver, "split": SplitSolver, "path": PathSolver, "home": HomeSolver}
# Fields that say what the plan was made from or come to: whatever else they say is refused.
DETERMINED = ("home_LE", "load_MLE", "cost_ML", "load_bound_ML", "header")


def some_problem(rng: np.random.Generator) -> Problem:
    """A small problem of either stage, objective and slot depth, with counts by source rank."""
    M, L, G, base = (int(rng.integers(low, high)) for low, high in ((2, 5), (1, 4), (2, 5), (1, 4)))
    E, train = G * base, bool(rng.integers(2))
    load_MLGE = (rng.random((M, L, G, E)) ** 4 * 12).astype(np.int32)
    load_MLGE[..., int(rng.integers(E))] += 9
    model = Model(
        name="toy", num_layers=L, first_moe_layer=0, num_experts=E, num_topk=1, hidden_size=4, ffn_size=8, attention_params=64,
        num_heads=1, qk_head_dim=4, v_head_dim=4, source="made up for tests",
    )  # fmt: skip
    cluster = Cluster.preset("8xh100", num_ranks=G, ranks_per_node=1 + G % 2, host_store=bool(rng.integers(2)))
    return Problem(
        model=model, cluster=dataclasses.replace(cluster, pair_overhead_s=1e-6),  # so dear that replicas pay for small loads
        load_MLE=load_MLGE.sum(axis=2), load_MLGE=load_MLGE, home_LE=np.stack([rng.permutation(E) for _ in range(L)]),
        schedule=Schedule.accumulate(M, bool(rng.integers(2))) if train else Schedule.forward_only(M),
        stage="update" if train else "recompute", redundant=int(rng.integers(1, 3)), moe_layer_L=np.arange(L),
        slot_depth=int(rng.integers(1, 4)),
        cost=CostModel(objective="time" if rng.integers(2) else "balance"), tokens_MG=load_MLGE.sum(axis=(1, 3)) // L,
    )  # fmt: skip


def a_planner(rng: np.random.Generator) -> Planner:
    rank = (Greedy(), Search()) if rng.integers(2) else (Quota(),)
    return Planner(rank=rank, guard=bool(rng.integers(2)))


def verdict(problem: Problem, plan: Plan, *, engine: bool) -> str:
    """Whether everything that runs a plan refuses it, or gives what dense gives."""
    outcomes = []
    dense = dense_reference(problem.load_MLGE, backward=problem.schedule.trains)
    work = Workload.from_counts(problem.load_MLGE, num_topk=1, stage=problem.stage)

    def referred() -> bool:
        return max(run_reference(plan, work, land=land).difference(dense) for land in ("early", "late")) < 1e-10

    def simulated() -> bool:
        return bool(np.isfinite(simulate(problem, plan).total_s))

    for run in (referred, simulated, *([lambda: executed(plan)] if engine else [])):
        try:
            outcomes.append(EQUAL if run() else WRONG)
        except (InputError, PlanError):
            outcomes.append(REFUSED)
    return WRONG if WRONG in outcomes else REFUSED if REFUSED in outcomes else EQUAL


def executed(plan: Plan) -> bool:
    """Whether engines, one thread a rank, give every use its weights and bring every gradient home."""

    def rank(group: Any) -> str:
        buffers, end = ToyBuffers(plan, group.rank), ""
        engine = Engine(buffers, group=group, backends=(Local(),))
        try:
            engine.begin(plan)
        except InputError as error:
            return str(error)
        try:
            run_uses(engine, plan, group)
            engine.end()
            if plan.header.schedule.trains:
                check_grads(plan, buffers)
        except AssertionError as error:
            end = f"wrong: {error}"
        finally:
            engine.close()
        return end

    texts = run_threads(rank, plan.G)
    if any(text.startswith("wrong") for text in texts):
        return False
    if any(texts):
        raise InputError(texts[0])
    return True


def mutated_plan(problem: Problem, rng: np.random.Generator) -> tuple[str, str]:
    plan, _ = a_planner(rng).plan(problem, num_threads=1)
    paths = list(leaves(plan))
    path, content = paths[int(rng.integers(len(paths)))]
    what = ".".join(path)
    try:
        broken = replaced(plan, path, changed(content, rng))
    except (InputError, PlanError):
        return what, REFUSED
    if broken.same_as(plan):
        return what, EQUAL
    outcome = verdict(problem, broken, engine=path[0] in ("transfers", "expert_MLGS", "quota_MLGS"))
    try:
        broken.check(problem)
    except PlanError:
        return what, REFUSED if outcome != WRONG else WRONG
    if path[0] in DETERMINED and path not in FREE and not close(plan, broken, path):
        return what, WRONG
    return what, outcome


def close(plan: Plan, broken: Plan, path: tuple[str, ...]) -> bool:
    """Whether a field says the same but for rounding, or for the form in which it says it."""
    for name in path:
        plan, broken = getattr(plan, name), getattr(broken, name)
    same: bool = np.allclose(plan, broken, rtol=1e-6, atol=1e-9) if isinstance(plan, np.ndarray) else plan == broken  # type: ignore[arg-type]
    return same


def mutated_placement(problem: Problem, rng: np.random.Generator) -> tuple[str, str]:
    """As a user gives it: the start of a plan, of one solver, or what is split and priced."""
    start = Search().solve(problem, problem.static())
    fields = {name: getattr(start, name) for name in ("expert_NGS", "quota_NGS")}
    name = str(rng.choice(list(fields)))
    fields[name] = changed(fields[name], rng)
    if rng.integers(2) and name == "expert_NGS":
        fields["quota_NGS"] = None
    uses: dict[str, Callable[[Placement], Any]] = {
        "start": lambda p: Planner().plan(problem, p, num_threads=1)[0],
        "price": lambda p: row_objective(problem, p),
        **{repr(s): lambda p, s=s: s.solve(problem, fields["expert_NGS"]) for s in (ExactSplit(), Even())},
        **{repr(s): lambda p, s=s: s.solve(problem, p) for s in (Search(), Greedy(), Quota(), LeastLoaded())},
    }
    use = str(rng.choice(list(uses)))
    try:
        found = uses[use](Placement(**fields))
    except (InputError, PlanError):
        return f"{name} by {use}", REFUSED
    return f"{name} by {use}", verdict(problem, found, engine=False) if isinstance(found, Plan) else EQUAL


def mutated_answer(problem: Problem, rng: np.random.Generator) -> tuple[str, str]:
    """A plug-in of one level that answers as a built-in one does, but for one change."""
    levels = {"rank": Search(), "split": ExactSplit(), "path": Deadline(), "home": Keep()}
    level = str(rng.choice([*levels, "rank", "path"]))

    def solve(self: Any, *args: Any) -> Any:
        answer = levels[level].solve(*args)
        one = answer[int(rng.integers(len(answer)))] if isinstance(answer, tuple) else answer
        if rng.random() < 0.05:
            other = None
        elif dataclasses.is_dataclass(one):
            paths = list(leaves(one))
            path, content = paths[int(rng.integers(len(paths)))]
            other = replaced(one, path, changed(content, rng))
        else:
            other = changed(one, rng)
        return tuple(other if part is one else part for part in answer) if isinstance(answer, tuple) else other

    plug_in = type("PlugIn", (INTERFACES[level],), {"solve": solve, "__repr__": lambda self: "PlugIn()"})()
    options = {"rank": (plug_in,)} if level == "rank" else {level: plug_in}
    try:
        if level == "home":
            problem = dataclasses.replace(problem, home_LE=Planner(home=plug_in).homes(problem, num_threads=1))
            plan, _ = Planner().plan(problem, num_threads=1)
        else:
            plan, _ = Planner(**options, guard=bool(rng.integers(2))).plan(problem, num_threads=1)
    except (InputError, PlanError):
        return f"answer of {level}", REFUSED
    return f"answer of {level}", verdict(problem, plan, engine=False)


KINDS = (mutated_plan, mutated_placement, mutated_answer)


def run(first: int, end: int) -> None:
    """Runs cases here; a line before each, and one with what came of it."""
    for case in range(first, end):
        print(f"case {case}", flush=True)
        rng = np.random.default_rng(case)
        what, outcome = "", ""
        try:
            what, outcome = KINDS[case % len(KINDS)](some_problem(rng), rng)
        except Exception as error:
            what, outcome = KINDS[case % len(KINDS)].__name__, f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"done {case}\t{what}\t{outcome}", flush=True)


ENDS = (REFUSED, EQUAL, WRONG, "foreign exception", "crash")
Counts = collections.Counter[tuple[str, str]]  # by kind and end


def run_in_children(first: int, end: int) -> tuple[Counts, list[str]]:
    """How cases ended, and a line for each that ended neither refused nor equal."""
    counts, bad = Counts(), []
    while first < end:
        command = [sys.executable, "-W", "ignore", __file__, "--child", str(first), str(end)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        for line in lines:
            if line.startswith("done"):
                case, what, outcome = line[5:].split("\t")
                counts[kind_of(int(case)), outcome if outcome in (REFUSED, EQUAL, WRONG) else "foreign exception"] += 1
                if outcome not in (REFUSED, EQUAL):
                    bad.append(f"case {case}: {what}: {outcome}")
        if done.returncode == 0:
            break
        last = [line for line in lines if line.startswith("case")]
        if not last:
            raise RuntimeError(done.stderr)
        crashed = int(last[-1][5:])
        counts[kind_of(crashed), "crash"] += 1
        bad.append(f"case {crashed}: the interpreter ended with {done.returncode}")
        first = crashed + 1
    return counts, bad


def kind_of(case: int) -> str:
    return KINDS[case % len(KINDS)].__name__.replace("mutated_", "")


def report(counts: Counts, bad: list[str]) -> str:
    """A table by kind, and what went wrong, in markdown."""
    lines = [f"| what was changed | {' | '.join(ENDS)} |", "| --- |" + " ---: |" * len(ENDS)]
    lines += [f"| {kind} | {' | '.join(str(counts[kind, end]) for end in ENDS)} |" for kind in map(kind_of, range(len(KINDS)))]
    return "\n".join([*lines, "", *(f"* {line}" for line in bad), f"{counts.total()} cases, {len(bad)} faults."])


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs mutated plans, placements and answers of solvers.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--child", type=int, nargs=2)
    parser.add_argument("--out", type=Path, help="write the figures to this markdown file")
    options = parser.parse_args()
    if options.child:
        run(*options.child)
        return 0
    command = f"PYTHONPATH=.:tests:tests/transfer python -m mutated_runs --cases {options.cases} --first {options.first}"
    about = (
        f"Measured on: {hardware()}. Command: `{command}`. Planner, simulator, dense reference and engine run what was changed."
    )
    counts, bad = run_in_children(options.first, options.first + options.cases)
    emit(f"# Changed plans, placements and answers of solvers\n\n{about}\n\n{report(counts, bad)}\n", options.out)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
