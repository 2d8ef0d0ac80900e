"""``foremoe report``: one HTML page of a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from foremoe.cli.jsonio import require_writable
from foremoe.cli.options import CaseOptions, case_options
from foremoe.cli.progress import Progress
from foremoe.cli.texts import Whole, planner_of, split_list, whole_numbers
from foremoe.errors import InputError

if TYPE_CHECKING:
    from foremoe.arrays import Array
    from foremoe.cli.inputs import Case
    from foremoe.plan import Plan
    from foremoe.planner import Planner
    from foremoe.planner_report import Report
    from foremoe.problem import Problem

NOTHING = "none"


@click.command(short_help="Write one HTML page of a plan: skew, copies, timeline, links, memory, strategies.")
@case_options()
@click.option(
    "--planner",
    "planner_name",
    metavar="NAME",
    help="A strategy, an installed solver, or a text such as 'Quota(min_pairs=64)'.  [default: hierarchical, or the plan file's]",
)
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    help="Show this plan instead of planning. The machine, slots and dealing are the plan file's then; give the TRACE it was "
    "made from, or the same --synthetic options.  [default: plan now]",
)
@click.option("--simulate/--no-simulate", default=True, show_default=True, help="Simulate the stage, for timeline and links.")
@click.option(
    "--what-if",
    metavar="LIST",
    default="0,1,2,4",
    show_default=True,
    help=f"Numbers of redundant slots to plan again with, for comparison; {NOTHING} for none.",
)
@click.option(
    "--solvers",
    metavar="LIST",
    multiple=True,
    help="Strategies or solvers of the table, as for `foremoe compare`; none for no table.  [default: all but exact]",
)
@click.option("--threads", type=Whole(high=4096), help="Threads that plan.  [default: every core]")
@click.option("-o", "--output", metavar="FILE.html", required=True, help="Where to write the page.")
def report(
    case_options: CaseOptions, planner_name: str | None, plan_file: str | None, simulate: bool, what_if: str,
    solvers: tuple[str, ...], threads: int | None, output: str,
) -> None:  # fmt: skip
    """Writes one self-contained HTML page of a plan; it opens from disk in any browser and asks nothing of any network.

    Skew before and after, the chosen layer's loads and copies, a simulated timeline, links, memory, strategies, and what other
    numbers of redundant slots would give. Times are simulated, or by the cost model, and say so.

    \b
    Example:
      foremoe report rollout.npz --ranks 16 --redundant 1 -o report.html
    """
    require_writable({"the report": output}, [*case_options.files, plan_file])
    redundant = [] if what_if.strip() == NOTHING else whole_numbers((what_if,), "--what-if")
    names = split_list(solvers, "--solvers")

    from foremoe.report import what_if as with_redundant
    from foremoe.report import write_report

    with Progress() as progress:
        case, problem, plan, planned, planner = _planned(case_options, planner_name, plan_file, threads, progress)
        if redundant and planner is None:
            progress.note(
                "warning: the plan's planner is not installed here, so what-if is left out; give --planner to choose one."
            )
            redundant = []
        simulation = None
        if simulate:
            from foremoe.simulate import simulate as run

            simulation = run(problem, plan)
        history_LE = None if case is None else case.history_LE
        strategies = _strategies(problem, names, history_LE, simulate, threads, case_options.seed, progress)
        others = (
            with_redundant(
                problem, planner, redundant, history_LE=history_LE, simulated=simulate, num_threads=threads, progress=progress
            )
            if redundant and planner is not None
            else None
        )
        source = _source(case_options) if case is None else case.line.removeprefix("case: ").partition(": ")[0]
        write_report(
            output, problem, plan, planner_report=planned, simulation=simulation, strategies=strategies, what_if=others,
            source=source,
        )  # fmt: skip
    click.echo(plan.summary())
    click.echo(f"wrote {click.format_filename(output)} ({os.path.getsize(output) / 1e6:.1f} MB)")


def _planned(
    options: CaseOptions, planner_name: str | None, plan_file: str | None, threads: int | None, progress: Progress
) -> tuple[Case | None, Problem, Plan, Report | None, Planner | None]:
    """The case where one was built, its problem and plan, how planning went, and the planner for other numbers of slots."""
    import dataclasses

    from foremoe.cli.inputs import build_case

    if plan_file is not None:
        return _from_file(options, planner_name, plan_file)
    name = planner_name or "hierarchical"
    planner = planner_of(name)
    case = build_case(options, planner.pack)
    for warning in case.warnings:
        progress.note(f"warning: {warning}")
    problem = dataclasses.replace(case.problem, home_LE=planner.homes(case.problem))
    plan, planned = planner.plan(
        problem, history_LE=case.history_LE, num_threads=threads, progress=lambda done, total: progress(name, done, total)
    )
    return case, problem, plan, planned, planner


def _from_file(
    options: CaseOptions, planner_name: str | None, plan_file: str
) -> tuple[Case | None, Problem, Plan, None, Planner | None]:
    """The plan of a file, and the problem it was made for."""
    from foremoe.cli.check import counts_of, dealt_again
    from foremoe.cli.files import kind_of
    from foremoe.cli.inputs import build_case
    from foremoe.plan import Plan
    from foremoe.problem import Problem
    from foremoe.report.rows import executable_problem, require_belongs

    plan = Plan.load(plan_file)
    try:
        planner = planner_of(planner_name or plan.header.planner)
    except InputError:
        if planner_name is not None:
            raise
        planner = None
    case = None
    if options.traces:
        counts = len(options.traces) == 1 and kind_of(options.traces[0]) == "workload"
        work = counts_of(options.traces[0]) if counts else dealt_again(plan, options.traces)
        if (work.L, work.E, work.G) != (plan.L, plan.E, plan.G):
            raise InputError(
                f"the workload has {work.L} layers, {work.E} experts and {work.G} ranks; the plan has {plan.L}, {plan.E} and "
                f"{plan.G}; give what was planned."
            )
        head = plan.header
        if work.M != plan.M:
            raise InputError(f"the workload has {work.M} micro-steps and the plan {plan.M}; give what was planned.")
        problem = Problem.of(work, head.cluster, model=head.model, redundant=head.redundant, schedule=head.schedule)
    else:
        case = build_case(options)
        problem = case.problem
        if (problem.M, problem.L, problem.G, problem.E) != (plan.M, plan.L, plan.G, plan.E):
            raise InputError(
                f"the case has [M, L, G, E] = {[problem.M, problem.L, problem.G, problem.E]} and the plan "
                f"{[plan.M, plan.L, plan.G, plan.E]}; give the options that it was planned with."
            )
    problem = executable_problem(problem, plan)
    require_belongs(problem, plan)
    return case, problem, plan, None, planner


def _strategies(
    problem: Problem, names: Sequence[str], history_LE: Array | None, simulated: bool, threads: int | None, seed: int,
    progress: Progress,
) -> list[Mapping[str, Any]] | None:  # fmt: skip
    """The rows of the table, in the order of STRATEGIES; with their simulated stage if that was asked for."""
    from foremoe.strategies import STRATEGIES

    if list(names) == [NOTHING]:
        return None
    chosen = names or [name for name in STRATEGIES if name != "exact"]
    ordered = [*(name for name in STRATEGIES if name in chosen), *(name for name in chosen if name not in STRATEGIES)]
    planners = {name: planner_of(name) for name in ordered}
    sampled = {name for name, planner in planners.items() if any(solver.exact for solver in planner.rank)}
    if simulated and not sampled:
        return _simulated(problem, planners, history_LE, threads, progress)
    from foremoe.comparison import compare, needs_first_left_out

    rows = compare(problem, planners, history_LE=history_LE, seed=seed, progress=progress)
    left_out = "micro-step 0 is left out, it has no history" * needs_first_left_out(problem, planners, history_LE)
    return [_told(row, planners[row["solver"]].keeps_homes and row["solver"] not in sampled, left_out) for row in rows]


def _simulated(
    problem: Problem, planners: Mapping[str, Planner], history_LE: Array | None, threads: int | None, progress: Progress
) -> list[Mapping[str, Any]]:
    from foremoe.simulate.systems import BALANCED, System, simulate_systems

    systems = {name: System(planner=planner) for name, planner in planners.items()} | {BALANCED: System(even=True)}
    rows = simulate_systems([problem], systems, history_LE=history_LE, num_threads=threads, progress=progress)
    told: list[Mapping[str, Any]] = []
    for row in rows:
        name = row["solver"]
        if name in planners and not planners[name].keeps_homes:
            way = f"homes move: scored, never executed; their weights' way ({row['apart_s']:.3g} s) is in no time"
            told.append(
                {**row, "speedup_vs_static": None, "stage_speedup_vs_static": None, "share_of_balanced": None, "note": way}
            )
        elif name not in planners:
            told.append({**row, "note": "the same tokens, routed evenly: what perfect balance alone would give"})
        else:
            told.append(row)
    return told


def _told(row: Mapping[str, Any], compares: bool, left_out: str) -> Mapping[str, Any]:
    """A row of `compare`, without the speed-up where its time does not compare with the others', and with what it leaves out."""
    note = "; ".join(part for part in (row.get("note"), left_out) if part)
    return {**row, "note": note} if compares else {**row, "speedup_vs_static": None, "note": note}


def _source(options: CaseOptions) -> str:
    from foremoe.cli.files import file_name

    return " + ".join(file_name(path) for path in options.traces)
