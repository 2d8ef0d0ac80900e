"""``foremoe report``: writes an HTML page about a plan."""

import datetime
import shlex

import click

from foremoe.advice.changes import advise
from foremoe.base.errors import InputError
from foremoe.cli.gpus import gpus_option, on_gpus, pp_option, vpp_option
from foremoe.cli.helping import HelpedCommand
from foremoe.cli.jsonio import STDOUT, emit, require_ending, require_writable
from foremoe.cli.memory import plan_line
from foremoe.cli.options import CaseOptions, case_options, option, planners_option, threads_option, trainer_options
from foremoe.cli.progress import Progress
from foremoe.cli.reported import plan_case, read_plan
from foremoe.cli.reported_job import report_job, seeded, strategy_lines, wrote
from foremoe.cli.tables import seconds
from foremoe.cli.texts import planners_of, split_list
from foremoe.report import write_report
from foremoe.simulate.runs import run_stage

NOTHING = "none"


class RecordedCommand(HelpedCommand):
    """A command that records its arguments in ``context.meta["command"]``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Records the arguments before click parses them."""
        ctx.meta["command"] = shlex.join(["foremoe", str(ctx.info_name), *args])
        return super().parse_args(ctx, args)


_HELP = """Writes one self-contained HTML page about a plan. Any browser can open the page from disk, without a network.

The page shows the skew before and after planning, and the loads and copies of a chosen layer. It also shows links, memory,
strategies, and the gain of each possible change of the case. Times are simulated. `foremoe simulate --trace` writes a timeline.

With --gpus or --pp, the page has a plan for every EP group and pipeline rank of the job, and shows the slowest plan first.

\b
Example:
  foremoe report rollout.npz --ranks 16 --redundant 1 -o report.html
  foremoe report rollout.npz --gpus 64 --ranks 16 --pp 2 -o report.html
"""


@click.command(cls=RecordedCommand, help=_HELP)
@case_options()
@option(
    "--planner", "planner_name", metavar="NAME",
    help="Strategy, installed solver, or expression such as 'Quota(min_pairs=64)'.  [default: foremoe]",
)  # fmt: skip
@option(
    "--plan", "plan_file", metavar="FILE",
    help="Plan to show instead of planning. The machine, slots and packing come from this file. Give the TRACE from which it was "
    "made, or the same --synthetic options.  [default: plan now]",
)  # fmt: skip
@gpus_option
@pp_option
@vpp_option
@planners_option(
    help="Strategies or solvers to compare, as for `foremoe compare`. With none, there is no table.  [default: all except exact]"
)
@threads_option
@option("-o", "--output", metavar="FILE.html", required=True, help="Path of the page to write.")
@trainer_options
def report(
    case_options: CaseOptions, planner_name: str | None, plan_file: str | None,
    planners: tuple[str, ...], threads: int | None, output: str, *, pp: int = 1,
    vpp: int = 1, gpus: int | None = None,
) -> None:  # fmt: skip
    """Runs ``foremoe report``."""
    if output == STDOUT:
        raise InputError("the report goes to a file, not to stdout; give -o a name such as report.html.")
    require_writable({"the report": output}, [*case_options.files, plan_file])
    require_ending("the report", output, ".html", ".htm")
    case_options, num_groups = on_gpus(case_options, gpus, pp, vpp)
    names = split_list(planners, "--planners")
    compared = {} if names == [NOTHING] else planners_of(names)
    command = click.get_current_context().meta["command"]
    if num_groups * pp * vpp > 1:
        if plan_file is not None:
            raise InputError("--gpus and --pp plan and simulate a whole job; leave out --plan.")
        sizes = num_groups, pp, vpp
        emit(None, {}, report_job(case_options, planner_name or "foremoe", sizes, compared, threads, output, command))
        return
    trainer = case_options.trainer.of()
    num_tasks = 1 + (len(compared) + 1 if compared else 0)  # advice is one
    if plan_file is None:
        num_tasks += 1 + (case_options.redundant is None)
    with Progress(tasks=num_tasks) as progress:
        if plan_file is None:
            case, shown, _ = plan_case(case_options, planner_name or "foremoe", threads, progress)
            slots = case.slots
        else:
            slots, shown = None, read_plan(case_options, planner_name, plan_file)
        strategies = strategy_lines(shown, compared, threads, case_options.seed, trainer, progress) if compared else None
        runs = run_stage(shown.problem, shown.plan, posed=shown.posed, moves_s=shown.moves_s, trainer=trainer)
        gained = runs.gain(shown.problem.cluster.standing)
        # Advice is given only about the default planner.
        ours = plan_file is None and planner_name in (None, "foremoe")
        known = (gained.speedup, gained.share_of_balanced) if ours else (None, None)
        advice = advise(
            shown.posed, trainer=trainer, slots=slots, num_threads=threads, progress=progress.within("advice")
        ).of_stage(*known)
        write_report(
            output, shown.problem, shown.plan, planner_report=shown.summary, runs=runs, strategies=strategies, advice=advice,
            source=seeded(shown.source, case_options.seed), date=datetime.date.today().isoformat(), command=command,
            posed=shown.posed, moves_s=shown.moves_s, trainer=trainer,
        )  # fmt: skip
    lines = [shown.plan.summary(), str(gained), f"advice: {advice}", plan_line(shown.problem, shown.plan, trainer)]
    if plan_file is not None and case_options.trainer == type(case_options.trainer)():
        lines.append("note: a plan file holds no options of the trainer; give those of its plan, such as --optimizer-bytes")
    if shown.moves_s:
        lines.append(f"homes: moved before the stage in {seconds(shown.moves_s)}, exposed; skew starts from moved homes")
    emit(None, {}, [*lines, wrote(output)])
