"""``foremoe inspect``: shows what a file is and what it contains."""

from typing import Any

import click

from foremoe.base.errors import InputError, printable
from foremoe.base.tensor_file import kind_of
from foremoe.cli.figures import dealing_text, plan_figures, trace_figures, trace_text, workload_figures, workload_text
from foremoe.cli.files import file_name, model_of, read_routing
from foremoe.cli.inputs import require_divides
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.options import COUNT, DEFAULT_RANKS, DEFAULT_TOKENS_PER_RANK, RANKS, option
from foremoe.cli.texts import is_count
from foremoe.plan.plan import Plan
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.workload import Workload

_HELP = """Shows whether FILE is a trace, a workload or a plan, and prints its figures.

\b
Examples:
  foremoe inspect rollout.npz --ranks 16
  foremoe inspect plan.safetensors --explain 0,3
"""


@click.command(cls=JsonCommand, help=_HELP)
@click.argument("file")
@option("--ranks", type=RANKS, help="For a trace: number of ranks for which to show the skew.  [default: skew is not shown]")
@option(
    "--tokens-per-rank", type=COUNT,
    help=f"For a trace with --ranks: token budget of one rank in a micro-step.  [default: {DEFAULT_TOKENS_PER_RANK}]",
)  # fmt: skip
@option(
    "--model", metavar="NAME|config.json|FILE.toml",
    help="For a trace: the recorded model. Required if the file lacks the number of experts.  [default: as the file says]",
)  # fmt: skip
@option(
    "--explain", metavar="M,L",
    help="For a plan: also explain the plan of micro-step M in layer L, both counted from 0.  [default: not explained]",
)  # fmt: skip
def inspect(
    file: str, ranks: int | None, tokens_per_rank: int | None, model: str | None, explain: str | None, json_file: str | None
) -> None:
    """Runs ``foremoe inspect``."""
    require_writable({"the JSON file": json_file}, [file])
    kind = kind_of(file)
    wrong: dict[str, object] = {} if kind == "plan" else {"--explain": explain}
    if kind in ("plan", "workload"):
        wrong |= {"--ranks": ranks, "--tokens-per-rank": tokens_per_rank, "--model": model}
    for name, value in wrong.items():
        if value is not None:
            raise InputError(f"{file_name(file)!r} is a {kind or 'trace'} file, for which {name} means nothing; leave it out.")
    if tokens_per_rank is not None and ranks is None:
        raise InputError("--tokens-per-rank needs --ranks; give both.")
    if kind == "plan":
        figures, lines = _plan(file, explain)
    else:
        told, budget = None if model is None else model_of(model), tokens_per_rank or DEFAULT_TOKENS_PER_RANK
        found = read_routing([file], told, ranks or DEFAULT_RANKS, budget)
        if isinstance(found, Workload):
            kind, figures = "workload", workload_figures(found)
            lines = workload_text(figures)
        else:
            kind = "trace"
            figures, lines = _trace(found, ranks, budget)
    emit(json_file, {"file": file_name(file), "kind": kind, **figures}, [f"{file_name(file)}: {lines[0]}", *lines[1:]])


def _trace(trace: RoutingTrace, ranks: int | None, tokens_per_rank: int) -> tuple[dict[str, Any], list[str]]:
    figures = trace_figures(trace)
    lines = trace_text(figures)
    if ranks is not None:
        require_divides(trace.num_experts, ranks)
        dealt = workload_figures(Workload.from_trace(trace, num_ranks=ranks, tokens_per_rank=tokens_per_rank))
        shown = {key: dealt[key] for key in ("micro_steps", "static_skew", "step_correlation")}
        figures["dealt"] = {"ranks": ranks, "tokens_per_rank": tokens_per_rank, **shown}
        skew = dealt["static_skew"]
        steps = f"on {ranks} ranks with {tokens_per_rank} tokens each: {dealt['micro_steps']} micro-steps"
        lines.append(f"{steps}; static skew (experts at home in order): mean {skew['mean']:.3f}, p99 {skew['p99']:.3f}")
    return figures, lines


def _plan(file: str, explain: str | None) -> tuple[dict[str, Any], list[str]]:
    plan = Plan.load(file)
    figures = plan_figures(plan)
    key, trace_id = plan.header.key, plan.header.trace_id
    lines = [
        *plan.summary().splitlines(),
        f"key: step {key.step}, stage {key.stage}, mini-batch {key.mini_batch}, EP group {key.ep_group}",
        f"planner: {printable(plan.header.planner)}",
        f"batch: {dealing_text(plan.header.dealt, 'not recorded, as the plan was made from counts')}"
        + (f", trace {printable(trace_id)}" if trace_id else ""),
    ]
    if explain is not None:
        parts = [part.strip() for part in explain.split(",")]
        if len(parts) != 2 or not all(map(is_count, parts)):
            raise InputError(f"--explain needs a micro-step and a layer such as 0,3; got {explain!r}.")
        text = plan.explain(int(parts[0]), int(parts[1]))
        figures["explain"] = text.splitlines()
        lines += ["", text]
    return figures, lines
