"""``foremoe simulate``: simulates every strategy on a cluster as an event timeline."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click

from foremoe.base.errors import InputError
from foremoe.cli import knowledge
from foremoe.cli.gpus import gpus_option, layout_words, on_gpus, pp_option, vpp_option
from foremoe.cli.inputs import build_groups
from foremoe.cli.jsonio import JsonCommand, emit, require_ending, require_writable
from foremoe.cli.memory import table_lines
from foremoe.cli.options import CaseOptions, case_options, option, planners_option, table_options, trainer_options
from foremoe.cli.progress import Progress
from foremoe.cli.tables import GIGABYTES, SECONDS, Column, Look, Table, flat, number, percent
from foremoe.cli.texts import DEFAULT, in_options, planner_of, split_list
from foremoe.cli.tones import tones
from foremoe.cli.trace import runs_to_show, write_trace
from foremoe.machine.trainer import Trainer
from foremoe.simulate.knowledge import simulate_foresight
from foremoe.simulate.systems import BALANCED, System, simulate_systems
from foremoe.workload.packing import AsGiven

OF_BALANCED = Column(
    "of balanced", percent, rank=2, meaning="share of the throughput with even routing (locality can make it more than 100 %)"
)
FITS = Column("fits", lambda fits: "yes" if fits else "no")
COLUMNS = {
    "solver": Column("solver", left=True, rank=0),
    "skew_mean": Column("skew mean", number(3), rank=4, meaning="largest over mean rank load of a layer and micro-step"),
    "replicas_per_layer": Column("replicas", number(1), rank=6), "slots_per_rank": Column("slots"),
    "simulated_stage_s": Column("stage", SECONDS, rank=3),
    "speedup_vs_static": Column("speed-up", number(3), rank=1, meaning="of the stage, over static"),
    "step_speedup": Column("step", number(3), rank=5), "share_of_balanced": OF_BALANCED,
    "tokens_per_s_per_rank": Column("tokens/s/rank", number(0), rank=8), "window_s": Column("attention", SECONDS),
    "dispatch_s": Column("dispatch", SECONDS), "compute_s": Column("experts", SECONDS), "combine_s": Column("combine", SECONDS),
    "transfer_s": Column("weights", SECONDS, meaning="waiting for copies, and compute lost to them"),
    "gradient_s": Column("gradients", SECONDS, meaning="the same for gradients of replicas"),
    "planning_s": Column("planning", SECONDS), "outside_s": Column("head", SECONDS), "bubble_s": Column("bubble", SECONDS),
    "moves_s": Column("moves", SECONDS, meaning="of homes, exposed"), "reduction_s": Column("reduction", SECONDS),
    "optimizer_s": Column("optimizer", SECONDS),
    "peak_bytes": Column("peak", GIGABYTES, rank=7, meaning="memory of the fullest rank"),
    "host_bytes": Column("host", GIGABYTES), "fits": FITS,
}  # fmt: skip
HOMES_MOVE = "+ homes move: scored, never executed; the stage includes moving weights and gradients, exposed"

_HELP = """Plans one case with every strategy, simulates the stage and prints a line for each strategy.

With --gpus, all expert-parallel groups of --ranks ranks share the tokens, and the slowest group decides. Simulated times depend
on the constants of the cluster, which `foremoe calibrate` fits to a machine.

\b
Example:
  foremoe simulate --synthetic qwen3-30b-a3b --gpus 64 --ranks 16
  foremoe simulate --synthetic gpt-oss-20b --foresight exact,rerouted=0.1,none
  foremoe simulate --synthetic gpt-oss-20b --rollout-share 0.85
"""


@click.command(cls=JsonCommand, help=_HELP)
@case_options()
@planners_option(
    help="Strategies or solvers, as for `compare`. `force-balanced` is even routing."
    "  [default: even routing, and all strategies except exact]"
)
@gpus_option
@pp_option
@vpp_option
@option(
    "--foresight", metavar="LIST", multiple=True,
    help="Compare kinds of foresight of one planner (--planners NAME, or foremoe) instead of strategies: exact, previous"
    " (the micro-step before), step (the sum of all micro-steps), rerouted=SHARE, noisy=DRIFT, none (static)."
    "  [default: compare strategies]",
)  # fmt: skip
@option(
    "--trace", "trace_file", metavar="FILE",
    help="Write the stage of the first EP group, with static placement (if compared) and as planned by foremoe or the first"
    " of --planners, as a trace for Perfetto. With --pp, the trace shows every pipeline rank. The file is compressed if its name"
    " ends in .gz.  [default: not written]",
)  # fmt: skip
@table_options
@trainer_options
def simulate(
    case_options: CaseOptions, planners: tuple[str, ...], pp: int, vpp: int,
    json_file: str | None, *, gpus: int | None = None, foresight: tuple[str, ...] = (),
    trace_file: str | None = None, look: Look = Look(),  # noqa: B008
) -> None:  # fmt: skip
    """Runs ``foremoe simulate``."""
    require_writable({"the JSON file": json_file, "the trace": trace_file}, case_options.files)
    require_ending("the trace", trace_file, ".json", ".gz")
    case_options, num_groups = on_gpus(case_options, gpus, pp, vpp)
    views = knowledge.views_of(foresight)
    look.require(knowledge.COLUMNS if views else COLUMNS)
    systems = _systems(split_list(planners, "--planners"), alone=bool(views))
    shown = ["static", *(name for name, view in views.items() if view is not None)] if views else [*systems]
    kept = {} if trace_file is None else runs_to_show(shown)
    with Progress(tasks=len(views) if views else len(systems)) as progress:
        case, groups = build_groups(case_options, num_groups, progress)
        trainer = case_options.trainer.of(len(groups))
        options: dict[str, Any] = {"pp": pp, "vpp": vpp, "history_LE": case.history_LE, "trainer": trainer, "progress": progress}
        options["keep"] = kept
        if views:
            rows = simulate_foresight(groups, views, *systems.values(), **options)
        else:
            rows = simulate_systems(groups, systems, **options)
    traced = [] if trace_file is None else [write_trace(trace_file, kept, rows)]
    payload = {
        "rows": rows, "case": {**case.record, "groups": len(groups), "gpus": gpus, "pp": pp, "vpp": vpp},
        "objective": case.problem.cost.objective, "cost_model": case.cost_model,
        "residual": case.problem.cluster.residual, "trainer": trainer,
    }  # fmt: skip
    where = layout_words(case.problem.G, len(groups), pp)
    if len(groups) > 1:
        tokens = sum(int(group.tokens_MG.sum()) for group in groups if group.tokens_MG is not None)
        where += f": {tokens:,} tokens in all; the case above is the first EP group's"
    if views:
        payload["planner"] = name = next(iter(systems))
        told = knowledge.footers(rows, name, case.constants, case.history_LE is not None)
        words: list[str | Table] = [knowledge.table(rows), "", *told]
    else:
        runs = [row["solver"] for row in rows if row["executable"] and row["solver"] != BALANCED]
        words = [_table(rows), "", *footers(rows, case.constants), step_line(rows, trainer, runs)]
    memory = table_lines(rows, case.problem.cluster.memory_bytes)
    emit(json_file, payload, [case.line, where, "", *words, *memory, *traced], look)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the table with one line for every system. A plus marks systems that foremoe cannot execute."""
    real = [row if row["executable"] and row["solver"] != BALANCED else {"fits": row["fits"]} for row in rows]
    lines = [flat(row) | {"solver": _marked(row)} for row in rows]
    return Table(shown_columns(COLUMNS, rows), lines, rows, tones(real, "speedup_vs_static"))


def _marked(row: Mapping[str, Any]) -> str:
    return f"{row['solver']} +" if row["executable"] is False else str(row["solver"])


def _systems(names: Sequence[str], *, alone: bool) -> dict[str, System]:
    """Returns the systems that ``--planners`` names. With `alone`, there is only one, whose foresight varies."""
    if alone:
        names = names or ["foremoe"]
        if len(names) > 1 or names[0] == BALANCED:
            raise InputError(f"--foresight compares what one planner knows; give --planners one planner, not {','.join(names)}.")
    names = names or [*DEFAULT, BALANCED]
    return {name: _system(name) for name in names}


def _system(name: str) -> System:
    if name == BALANCED:
        return System(even=True)
    planner = planner_of(name, guard=False)  # the planner has no guard, as in `compare`
    if planner.pack != AsGiven():
        raise InputError(f"{name} has a pack level, but the case is dealt already; leave the pack level out.")
    return System(planner=planner)


def footers(rows: Sequence[Mapping[str, Any]], constants: str) -> list[str]:
    """Returns the lines that explain the table."""
    moved = [HOMES_MOVE] if any(row["executable"] is False for row in rows) else []
    return [f"simulated; constants: {constants}; stage and its parts: slowest group", *moved, *notes(rows, "solver")]


def notes(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Returns the notes of all lines. Each sentence appears once, with the names of the lines to which it applies."""
    names: dict[str, dict[str, None]] = {}
    num_names = len({row[key] for row in rows})
    for row in rows:
        if row.get("note"):
            names.setdefault(in_options(row["note"]), {})[row[key]] = None
    return [f"{'every line' if 2 < num_names == len(lines) else ', '.join(lines)}: {note}" for note, lines in names.items()]


def step_line(rows: Sequence[Mapping[str, Any]], trainer: Trainer, runs: Collection[str]) -> str:
    """Names the fastest of the systems that can be executed (`runs`), and describes the gains of whole steps.

    Without --rollout-share, there is no column of whole steps, so the line has the gain of that system at several shares.
    """
    known = [row for row in rows if row["step_speedup_at"] is not None]
    if not known:
        return "step: unknown; static and another strategy that plans all rows must be among --planners"
    real = [row for row in known if row["solver"] in runs]
    if not real:
        return "step: no strategy of the table can be executed"
    best = max([row for row in real if row.get("fits", True)] or real, key=lambda row: row["speedup_vs_static"])
    fastest = f"fastest that can be executed: {best['solver']}"
    if trainer.outside_s(0.0) is not None:
        outside = f"{outside_words(trainer)} lie outside the stages (--rollout-share)"
        return f"{fastest}; step: gain of a training step of which {outside}"
    if best["solver"] == "static":
        return fastest
    each = ", ".join(f"{gain:.3f} with {share} %" for share, gain in best["step_speedup_at"].items())
    return f"{fastest}; a whole step gains less: {each} of it outside the stages (set your share with --rollout-share)"


def outside_words(trainer: Trainer) -> str:
    """Describes the part of a step outside the stages as a share or in seconds, as the user gave it."""
    return f"{trainer.rollout_share:.0%} of static's" if trainer.rollout_s is None else f"{trainer.rollout_s:g} s"


def shown_columns(columns: Mapping[str, Column], rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Returns the columns to show. If the time outside the stages is unknown, the column of whole steps is left out."""
    hidden = all(row["step_speedup"] is None for row in rows)
    return {name: column for name, column in columns.items() if not (hidden and name == "step_speedup")}
