"""``foremoe simulate``: what each strategy would give on a cluster, as an event timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

import foremoe
from foremoe.base.errors import InputError
from foremoe.cli.jsonio import JsonCommand, emit, json_option, require_writable
from foremoe.cli.options import COUNT, RANKS, CaseOptions, case_options
from foremoe.cli.progress import Progress
from foremoe.cli.tables import Column, number, percent, plural, render, scaled
from foremoe.cli.texts import Whole, planner_of, split_list

FOREMOE, BALANCED = "foremoe", "force-balanced"
COLUMNS = (
    ("skew mean", number(3), "skew_mean"),
    ("replicas", number(1), "replicas_per_layer"),
    ("stage ms", scaled(1e3, 1), "stage_s"),
    ("speed-up", number(3), "stage_speedup_vs_static"),
    ("of balanced", percent, "share_of_balanced"),
    ("tokens/s/rank", number(0), "tokens_per_s_per_rank"),
    ("attention", scaled(1e3, 1), "window_s"),
    ("dispatch", scaled(1e3, 1), "dispatch_s"),
    ("experts", scaled(1e3, 1), "compute_s"),
    ("combine", scaled(1e3, 1), "combine_s"),
    ("weights", scaled(1e3, 1), "transfer_s"),
    ("gradients", scaled(1e3, 1), "gradient_s"),
    ("planning", scaled(1e3, 1), "planning_s"),
    ("bubble", scaled(1e3, 1), "bubble_s"),
    ("moves", scaled(1e3, 1), "moves_s"),
    ("apart", scaled(1e3, 1), "apart_s"),
    ("peak GB", scaled(1e-9, 2), "simulated_peak_bytes"),
)


@click.command(cls=JsonCommand, short_help="Strategies side by side as simulated timelines, for clusters that are not at hand.")
@case_options()
@click.option(
    "--solvers",
    metavar="LIST",
    multiple=True,
    help="Strategies or solvers as in `compare`; `foremoe` is hierarchical with the home level, `force-balanced` even routing.  "
    "[default: all but exact, and those two]",
)
@click.option("--ep", type=RANKS, help="Ranks of one expert-parallel group; each group has tokens of its own.  [default: all]")
@click.option("--pp", type=COUNT, default=1, show_default=True, help="Pipeline stages that the layers are split over.")
@click.option("--vpp", type=COUNT, default=1, show_default=True, help="Chunks of every pipeline stage (interleaved schedule).")
@click.option("--prefetch", type=Whole(0), default=2, show_default=True, help="Uses of a layer that a copy may be ahead.")
@json_option
def simulate(
    case_options: CaseOptions, solvers: tuple[str, ...], ep: int | None, pp: int, vpp: int, prefetch: int, json_file: str | None
) -> None:
    """Plans one case with every strategy, simulates the stage and prints a row for each.

    All ranks (--ranks) share the tokens; --ep cuts them into expert-parallel groups, and --pp puts as many more behind them.
    Simulated seconds follow from the constants of the cluster, as the cost model does; `foremoe calibrate` fits them on a
    machine.

    \b
    Example:
      foremoe simulate --synthetic qwen3-30b-a3b --ranks 64 --ep 16 --tokens-per-rank 8192
    """
    require_writable({"the JSON file": json_file}, case_options.files)
    names = split_list(solvers, "--solvers")
    if pp * vpp > 1 and case_options.schedule is not None:
        raise InputError("--pp makes the schedule of every stage itself; leave --schedule out.")

    from foremoe.cli.inputs import build_groups
    from foremoe.planner.strategies import STRATEGIES
    from foremoe.simulate.systems import System, foremoe_planner, simulate_systems
    from foremoe.solvers import AsGiven

    systems: dict[str, System] = {}
    for name in names or [*(name for name in STRATEGIES if name != "exact"), FOREMOE, BALANCED]:
        if name == BALANCED:
            systems[name] = System(even=True)
        else:
            planner = foremoe_planner() if name == FOREMOE else planner_of(name)
            if planner.pack != AsGiven():
                raise InputError(f"{name} has a pack level, but the case is dealt already; leave the pack level out.")
            systems[name] = System(planner=planner, prefetch=prefetch)
    case, groups = build_groups(case_options, ep)
    with Progress() as progress:
        for warning in case.warnings:
            progress.note(f"warning: {warning}")
        rows = simulate_systems(groups, systems, pp=pp, vpp=vpp, history_LE=case.history_LE, progress=progress)
    calibrated = case.problem.cluster.calibrated
    payload = {
        "rows": rows,
        "case": {**case.record, "groups": len(groups), "pp": pp, "vpp": vpp, "prefetch": prefetch},
        "objective": case.problem.cost.objective,
        "cost_model": "calibrated" if calibrated else "uncalibrated",
        "foremoe_version": foremoe.__version__,
    }
    where = f"{plural(len(groups), 'EP group')} of {case.problem.G}" + (f", {pp} pipeline stages" if pp > 1 else "")
    if len(groups) > 1:
        tokens = sum(int(group.tokens_MG.sum()) for group in groups if group.tokens_MG is not None)
        where += f": {tokens} tokens on {sum(group.G for group in groups)} ranks in all; the case above is the first group's"
    emit(json_file, payload, "\n".join([case.line, where, "", table(rows), "", *footers(rows, calibrated)]))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text; seconds of parts as ms."""
    columns = [Column("solver", left=True), *(Column(heading, show) for heading, show, _ in COLUMNS)]
    return render(columns, [[row["solver"], *(row[key] for _, _, key in COLUMNS)] for row in rows])


def footers(rows: Sequence[Mapping[str, Any]], calibrated: bool) -> list[str]:
    """What a reader must know to read the table."""
    lines = [
        f"simulated; constants: {'calibrated' if calibrated else 'model, uncalibrated'}; stage ms and its parts: slowest group",
        "speed-up: over static; of balanced: share of the throughput with even routing (locality can make it more than 100 %)",
        "weights, gradients: waiting for copies, and compute lost to them; moves: homes that change, once, hidden under nothing",
    ]
    if any(row["apart_s"] for row in rows):
        lines.append(
            "apart: weights of plans that re-place experts, spread over all links; in no other column, so they are bounds"
        )
    return lines
