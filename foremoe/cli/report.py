"""``foremoe report``: one HTML page of a plan."""

import datetime
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import click

from foremoe.base.errors import InputError
from foremoe.cli.helping import HelpedCommand
from foremoe.cli.jsonio import STDOUT, emit, require_writable
from foremoe.cli.memory import plan_line
from foremoe.cli.options import CaseOptions, case_options, option, solvers_option, threads_option, trainer_options
from foremoe.cli.progress import Progress
from foremoe.cli.reported import Shown, plan_case, read_plan
from foremoe.cli.tables import seconds
from foremoe.cli.texts import planners_of, split_list, whole_numbers
from foremoe.machine.trainer import Trainer
from foremoe.planner.comparison import compare, needs_first_left_out
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES
from foremoe.report import run_stage, write_report
from foremoe.report import what_if as plan_again
from foremoe.simulate.systems import BALANCED, System, simulate_systems

NOTHING = "none"


class RecordedCommand(HelpedCommand):
    """A command that knows the words it was called with: ``context.meta["command"]``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keeps the words before click takes them apart."""
        ctx.meta["command"] = shlex.join(["foremoe", str(ctx.info_name), *args])
        return super().parse_args(ctx, args)


@click.command(cls=RecordedCommand)
@case_options()
@option(
    "--planner", "planner_name", metavar="NAME",
    help="A strategy, an installed solver, or a text such as 'Quota(min_pairs=64)'.  [default: hierarchical, or the plan file's]",
)  # fmt: skip
@option(
    "--plan", "plan_file", metavar="FILE",
    help="Show this plan instead of planning. The machine, slots and dealing are the plan file's then; give the TRACE it was "
    "made from, or the same --synthetic options.  [default: plan now]",
)  # fmt: skip
@option("--simulate/--no-simulate", default=True, help="Simulate the stage, for timeline and links.")
@option(
    "--what-if", metavar="LIST", default="0,1,2,4",
    help=f"Numbers of redundant slots to plan again with, for comparison; {NOTHING} for none.",
)  # fmt: skip
@solvers_option(help="Strategies or solvers of the table, as for `foremoe compare`; none for no table.  [default: all but exact]")
@threads_option
@option("-o", "--output", metavar="FILE.html", required=True, help="Where to write the page.")
@trainer_options
def report(
    case_options: CaseOptions, planner_name: str | None, plan_file: str | None, simulate: bool,
    what_if: str, solvers: tuple[str, ...], threads: int | None, output: str,
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
    names = split_list(solvers, "--solvers")
    planners = {} if names == [NOTHING] else planners_of(names, [name for name in STRATEGIES if name != "exact"])
    trainer = case_options.trainer.of()
    num_tasks = int(plan_file is None) + len(redundant) + (len(planners) + 1 if planners else 0)
    with Progress(tasks=num_tasks) as progress:
        if plan_file is None:
            _, shown, _ = plan_case(case_options, planner_name or "hierarchical", threads, progress, redundant)
        else:
            shown = read_plan(case_options, planner_name, plan_file, redundant)
        strategies = _strategies(shown, planners, simulate, threads, case_options.seed, trainer, progress) if planners else None
        others = None
        if redundant and shown.planner is None:
            left_out = "the plan's planner is not one of foremoe's own, so what-if is left out"
            progress.note(f"warning: {left_out}; give --planner to choose one.")
        elif redundant and shown.planner is not None:
            others = plan_again(
                shown.problem, shown.planner, redundant, history_LE=shown.history_LE, simulated=simulate, trainer=trainer,
                num_threads=threads, progress=progress,
            )  # fmt: skip
        runs = None
        if simulate:
            runs = run_stage(shown.problem, shown.plan, posed=shown.posed, moves_s=shown.moves_s, trainer=trainer)
        seeded = shown.source if "seed" in shown.source else f"{shown.source}, seed {case_options.seed}"
        write_report(
            output, shown.problem, shown.plan, planner_report=shown.summary, runs=runs, strategies=strategies, what_if=others,
            source=seeded, date=datetime.date.today().isoformat(), command=click.get_current_context().meta["command"],
            posed=shown.posed, moves_s=shown.moves_s, trainer=trainer,
        )  # fmt: skip
    lines = [shown.plan.summary(), plan_line(shown.problem, shown.plan, trainer)]
    if shown.moves_s:
        lines.append(f"homes: moved before the stage in {seconds(shown.moves_s)}, exposed; skew starts from moved homes")
    emit(None, {}, [*lines, f"wrote {click.format_filename(output)} ({os.path.getsize(output) / 1e6:.1f} MB)"])


def _strategies(
    shown: Shown,
    planners: Mapping[str, Planner],
    simulated: bool,
    threads: int | None,
    seed: int,
    trainer: Trainer,
    progress: Progress,
) -> Sequence[Mapping[str, Any]]:
    """The lines of the table; with their simulated stage if that was asked for."""
    problem, history_LE = shown.posed, shown.history_LE
    sampled = {name for name, planner in planners.items() if any(solver.exact for solver in planner.rank)}
    if simulated and not sampled:
        systems = {name: System(planner=planner) for name, planner in planners.items()} | {BALANCED: System(even=True)}
        rows = simulate_systems(
            [problem], systems, history_LE=history_LE, trainer=trainer, num_threads=threads, progress=progress
        )
        return [_simulated_line(row, planners) for row in rows]
    rows = compare(problem, planners, history_LE=history_LE, seed=seed, trainer=trainer, progress=progress)
    notes = ["micro-step 0 has no history and is left out"] if needs_first_left_out(problem, planners, history_LE) else []
    lines = []
    for row in rows:
        name = row["solver"]
        line = {**row, "note": "; ".join(part for part in (row.get("note"), *notes) if part)}
        # These times do not compare with the others'.
        if name in sampled or not planners[name].keeps_homes:
            line["predicted_speedup_vs_static"] = None
        lines.append(line)
    return lines


def _simulated_line(row: Mapping[str, Any], planners: Mapping[str, Planner]) -> Mapping[str, Any]:
    name = row["solver"]
    if name not in planners:
        return {**row, "note": "the same tokens, routed evenly: what perfect balance alone would give"}
    if planners[name].keeps_homes:
        return row
    note = f"homes move: scored, never executed; moving their weights ({row['apart_s']:.3g} s) is in no time"
    blank = dict.fromkeys(("predicted_speedup_vs_static", "speedup_vs_static", "step_speedup", "share_of_balanced"))
    return {**row, **blank, "note": note}
