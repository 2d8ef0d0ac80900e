"""``foremoe report``: one HTML page of a plan."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from foremoe.base.errors import InputError
from foremoe.cli.jsonio import STDOUT, require_writable
from foremoe.cli.options import CaseOptions, case_options
from foremoe.cli.progress import Progress
from foremoe.cli.texts import Whole, packer_of, planner_of, split_list, whole_numbers

if TYPE_CHECKING:
    from foremoe.base.arrays import Array
    from foremoe.cli.inputs import Case
    from foremoe.plan.plan import Plan
    from foremoe.planner.planner import Planner
    from foremoe.planner.summary import PlanSummary
    from foremoe.problem.problem import Problem
    from foremoe.workload.workload import Workload

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
    if output == STDOUT:
        raise InputError("the report goes to a file, not to stdout; give -o a name such as report.html.")
    require_writable({"the report": output}, [*case_options.files, plan_file])
    redundant = [] if what_if.strip() == NOTHING else whole_numbers((what_if,), "--what-if")
    planners = _chosen(split_list(solvers, "--solvers"))

    from foremoe.report import what_if as with_redundant
    from foremoe.report import write_report

    with Progress() as progress:
        if plan_file is None:
            shown = _planned(case_options, planner_name or "hierarchical", redundant, threads, progress)
        else:
            shown = _from_file(case_options, planner_name, plan_file, redundant)
        problem, plan, planner, history_LE = shown.problem, shown.plan, shown.planner, shown.history_LE
        if redundant and planner is None:
            progress.note(
                "warning: the plan's planner is none that foremoe brings, so what-if is left out; give --planner to choose one."
            )
            redundant = []
        simulation = None
        if simulate:
            from foremoe.simulate import simulate as run

            simulation = run(problem, plan)
        strategies = None
        if planners is not None:
            strategies = _strategies(shown.posed, planners, history_LE, simulate, threads, case_options.seed, progress)
        others = (
            with_redundant(
                problem, planner, redundant, history_LE=history_LE, simulated=simulate, num_threads=threads, progress=progress
            )
            if redundant and planner is not None
            else None
        )
        moves_s = shown.moves_s
        write_report(
            output, problem, plan, planner_report=shown.report, simulation=simulation, strategies=strategies, what_if=others,
            source=shown.source, posed=shown.posed, moves_s=moves_s,
        )  # fmt: skip
    click.echo(plan.summary())
    if moves_s:
        click.echo(f"homes: moved before the stage in {moves_s * 1e3:.1f} ms, hidden under nothing; skew starts from moved homes")
    click.echo(f"wrote {click.format_filename(output)} ({os.path.getsize(output) / 1e6:.1f} MB)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What the page is of.

    Attributes:
        posed: the problem with its own homes.   problem: the same with the homes that the plan has.
        report: how planning went; None for a plan of a file.   planner: for other numbers of slots, if it is known.
        source: where the load comes from, in a few words.
    """

    posed: Problem
    problem: Problem
    plan: Plan
    report: PlanSummary | None
    planner: Planner | None
    history_LE: Array | None
    source: str

    @property
    def moves_s(self) -> float:
        """Seconds from the posed homes to the plan's."""
        from foremoe.solvers import Anneal
        from foremoe.solvers.home.price import price_L

        home = None if self.planner is None else self.planner.home
        state_bytes = getattr(home, "state_bytes", Anneal().state_bytes)
        return float(price_L(self.posed, self.problem.home_LE, state_bytes).sum())


def _planned(options: CaseOptions, name: str, redundant: Sequence[int], threads: int | None, progress: Progress) -> _Shown:
    """The case, planned now."""
    from foremoe.cli.inputs import build_case

    planner = planner_of(name)
    planner = planner.using(packer_of(planner.pack, options.shuffle))
    case = build_case(options, planner.pack, threads)
    _require_possible(case.problem, redundant)
    for warning in case.warnings:
        progress.note(f"warning: {warning}")
    problem = dataclasses.replace(case.problem, home_LE=planner.homes(case.problem, num_threads=threads))
    plan, planned = planner.plan(
        problem, history_LE=case.history_LE, num_threads=threads, progress=lambda done, total: progress(name, done, total)
    )
    return _Shown(
        posed=case.problem, problem=problem, plan=plan, report=planned, planner=planner, history_LE=case.history_LE,
        source=_source_of(case),
    )  # fmt: skip


def _from_file(options: CaseOptions, planner_name: str | None, plan_file: str, redundant: Sequence[int]) -> _Shown:
    """The plan of a file, and the problem it was made for."""
    from foremoe.cli.files import file_name, history_load
    from foremoe.cli.inputs import build_case, require_one_source
    from foremoe.plan.plan import Plan
    from foremoe.problem.problem import Problem
    from foremoe.report.rows import executable_problem, require_belongs

    require_one_source(options)
    plan = Plan.load(plan_file)
    broken = plan.violations()
    if broken:
        raise InputError(f"the plan {file_name(plan_file)!r} breaks its laws ({broken[0]}); `foremoe check` says more.")
    # A file's own text never imports anything: only who calls the command may name code that runs.
    planner = planner_of(planner_name) if planner_name is not None else _told_planner(plan.header.planner) if redundant else None
    if options.traces:
        head, work = plan.header, _work_of(options.traces, plan)
        posed = Problem.of(work, head.cluster, model=head.model, redundant=head.redundant, schedule=head.schedule)
        history_LE = None if options.history is None else history_load(options.history, work, head.model)
        source = " + ".join(file_name(path) for path in options.traces)
    else:
        case = build_case(options)
        posed, history_LE, source = case.problem, case.history_LE, _source_of(case)
        if (posed.M, posed.L, posed.G, posed.E) != (plan.M, plan.L, plan.G, plan.E):
            raise InputError(
                f"the case has [M, L, G, E] = {[posed.M, posed.L, posed.G, posed.E]} and the plan "
                f"{[plan.M, plan.L, plan.G, plan.E]}; give the options that it was planned with."
            )
    problem = executable_problem(posed, plan)
    require_belongs(problem, plan)
    _require_possible(problem, redundant)
    if (posed.home_LE == plan.home_LE).all():
        posed = problem
    else:
        # What slots hold belongs to the moved homes.
        posed = dataclasses.replace(problem, home_LE=posed.home_LE, resident_LGS=None)
    return _Shown(
        posed=posed, problem=problem, plan=plan, report=None, planner=planner, history_LE=history_LE, source=source
    )  # fmt: skip


def _work_of(paths: tuple[str, ...], plan: Plan) -> Workload:
    """What was planned: traces dealt again, or counts cut to the plan's micro-steps and layers."""
    from foremoe.cli.check import counts_of, dealt_again
    from foremoe.cli.files import kind_of

    if len(paths) > 1 or kind_of(paths[0]) != "workload":
        work = dealt_again(plan, paths)
    else:
        work = counts_of(paths[0])[: plan.M]
        position = {int(number): at for at, number in enumerate(work.moe_layer_L)}
        wanted = [int(number) for number in plan.header.moe_layer_L]
        if work.L != plan.L and all(number in position for number in wanted):
            work = work.layers([position[number] for number in wanted])
    if (work.L, work.E, work.G) != (plan.L, plan.E, plan.G):
        raise InputError(
            f"the workload has {work.L} layers, {work.E} experts and {work.G} ranks; the plan has {plan.L}, {plan.E} and "
            f"{plan.G}; give what was planned."
        )
    if work.M != plan.M:
        raise InputError(f"the workload has {work.M} micro-steps and the plan {plan.M}; give what was planned.")
    return work


def _told_planner(text: str) -> Planner | None:
    """The planner of a plan file's text if foremoe itself brings all of it; never code from elsewhere."""
    from foremoe.planner.parsing import parse
    from foremoe.planner.strategies import STRATEGIES, resolve

    if text in STRATEGIES:
        return STRATEGIES[text]
    try:
        found = parse(text, builtin=True)
        # A text in quotes is text again, and could name a module.
        return None if isinstance(found, str) else resolve(found)
    except Exception:  # the text is anybody's, and may fail in any way
        return None


def _require_possible(problem: Problem, redundant: Sequence[int]) -> None:
    """Raises InputError for numbers of redundant slots that the problem cannot have."""
    for slots in redundant:
        dataclasses.replace(problem, redundant=slots, resident_LGS=None)


def _chosen(names: Sequence[str]) -> dict[str, Planner] | None:
    """The planners of the table, in the order of STRATEGIES; None for no table."""
    from foremoe.planner.strategies import STRATEGIES

    if list(names) == [NOTHING]:
        return None
    chosen = names or [name for name in STRATEGIES if name != "exact"]
    ordered = [*(name for name in STRATEGIES if name in chosen), *(name for name in chosen if name not in STRATEGIES)]
    return {name: planner_of(name) for name in ordered}


def _strategies(
    problem: Problem, planners: Mapping[str, Planner], history_LE: Array | None, simulated: bool, threads: int | None, seed: int,
    progress: Progress,
) -> list[Mapping[str, Any]]:  # fmt: skip
    """The rows of the table; with their simulated stage if that was asked for."""
    sampled = {name for name, planner in planners.items() if any(solver.exact for solver in planner.rank)}
    if simulated and not sampled:
        return _simulated(problem, planners, history_LE, threads, progress)
    from foremoe.planner.comparison import compare, needs_first_left_out

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


def _source_of(case: Case) -> str:
    return case.line.removeprefix("case: ").partition(": ")[0]
