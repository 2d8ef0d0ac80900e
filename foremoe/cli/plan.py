"""``foremoe plan``: plans the routing of a case and writes a plan file."""

from dataclasses import asdict

import click

from foremoe.advice.changes import advise
from foremoe.cli.figures import plan_figures, summary_figures
from foremoe.cli.jsonio import JsonCommand, emit, require_ending, require_writable
from foremoe.cli.memory import plan_line
from foremoe.cli.options import CaseOptions, case_options, option, threads_option, trainer_options
from foremoe.cli.progress import Progress
from foremoe.cli.reported import plan_case
from foremoe.plan.figures import host_bytes, memory_figures, slots_per_rank
from foremoe.problem.memory import fit, rank_memory
from foremoe.simulate import gain

_HELP = """Plans replicas and token quotas for every layer of every micro-step.

Several TRACEs form one workload. A TRACE may also be a workload file of counts. The command prints a summary of the plan. The
same input gives the same file, byte for byte.

\b
Example:
  foremoe plan rollout.npz --ranks 16 --redundant 1 -o plan.safetensors
"""


@click.command(cls=JsonCommand, help=_HELP)
@case_options()
@option(
    "--planner", "planner_name", metavar="NAME", default="foremoe",
    help="Strategy, installed solver, or expression such as 'Quota(min_pairs=64)'. `foremoe solvers` lists the names.",
)  # fmt: skip
@option("-o", "--output", metavar="FILE", help="Path of the plan file to write (.safetensors).  [default: print only]")
@option(
    "--save-workload", metavar="FILE",
    help="Also write the counts that were planned (.safetensors), for `foremoe check --workload`.  [default: not written]",
)  # fmt: skip
@threads_option
@trainer_options
def plan(
    case_options: CaseOptions, planner_name: str, output: str | None,
    save_workload: str | None, threads: int | None, json_file: str | None,
) -> None:  # fmt: skip
    """Runs ``foremoe plan``."""
    outputs = {"the plan file": output, "the workload file": save_workload, "the JSON file": json_file}
    require_writable(outputs, case_options.files)
    require_ending("the plan file", output, ".safetensors")
    require_ending("the workload file", save_workload, ".safetensors")
    with Progress() as progress:
        case, planned, summary = plan_case(case_options, planner_name, threads, progress)
        for warning in summary.warnings:
            progress.note(f"warning: {warning}")
        made, trainer = planned.plan, case_options.trainer.of()
        found = gain(planned.problem, made, posed=planned.posed, trainer=trainer)
        # Advice is given only about the default planner.
        known = (found.speedup, found.share_of_balanced) if planner_name == "foremoe" else (None, None)
        told = advise(
            planned.posed, trainer=trainer, slots=case.slots, num_threads=threads, progress=progress.within("advice")
        ).of_stage(*known)
    memory = memory_figures(fit(planned.problem, made.placement, trainer=trainer)) | {
        "memory_parts": rank_memory(planned.problem, made.placement, trainer=trainer).parts(),
        "host_bytes": host_bytes(planned.problem, made), "slots_per_rank": slots_per_rank(made),
    }  # fmt: skip
    lines = [
        case.line,
        made.summary(),
        str(found),
        f"advice: {told}",
        plan_line(planned.problem, made, trainer),
        f"planned in {summary.plan_s:.2f} s (a first run also compiles)",
    ]
    for path, value in ((output, made), (save_workload, case.workload)):
        if path is not None:
            value.save(path)
            lines.append(f"wrote {click.format_filename(path)}")
    written = None if output is None else click.format_filename(output)
    payload = {
        "plan": plan_figures(made) | memory,
        "gain": asdict(found) | {"speedup": found.speedup},
        "advice": str(told),
        "report": summary_figures(summary),
        "case": case.record,
        "output": written,
    }
    emit(json_file, payload, lines)
