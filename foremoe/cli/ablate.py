"""``foremoe ablate``: runs planners with one level left out at a time, for several numbers of slots, foresights and seeds."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import click

from foremoe.base.errors import InputError
from foremoe.cli.ablated import COLUMNS, lines_of
from foremoe.cli.inputs import Case, build_case
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.options import CaseOptions, case_options, option, planners_option, table_options
from foremoe.cli.progress import Progress
from foremoe.cli.tables import Look
from foremoe.cli.texts import Seconds, foresight_of, planner_of, split_list, whole_numbers
from foremoe.planner import ablation
from foremoe.planner.comparison import EXACT_BUDGET_S
from foremoe.planner.planner import Planner
from foremoe.simulate.runs import Judge
from foremoe.workload.packing import AsGiven


class Varied(NamedTuple):
    """Options that vary besides the levels. Every combination of their values is planned."""

    planners: dict[str, Planner]
    nodes: list[int | None]  # numbers of ranks per node; None means the cluster's own number
    seeds: list[int]
    redundant: list[int]
    foresight: list[Any]

    @property
    def num_tasks(self) -> int:
        """Returns the number of planners to run."""
        variants = [one for planner in self.planners.values() for one in ablation.left_out(planner).values()]
        num_slots = sum(slots > 0 for slots in self.redundant)
        return sum(bool(one.rank) for one in variants) * len(self.nodes) * len(self.seeds) * num_slots * len(self.foresight)


_HELP = """Leaves out one level of a planner at a time: pack, home, node, rank, split, order, path and the guard.

The ablation is repeated for every number of redundant slots, kind of foresight, node size and seed. Slots and kinds of foresight
with the same plans share their lines. In JSON and CSV, each plan has a row of its own.

\b
Examples:
  foremoe ablate rollout.npz --ranks 16 --redundant 0,1,2
  foremoe ablate --synthetic gpt-oss-20b --ranks 16 --seed 0,1,2
"""


@click.command(cls=JsonCommand, help=_HELP)
@case_options(without=("redundant", "ranks_per_node", "seed"))
@planners_option(
    help="Comma-separated list of planners to ablate. Each is a strategy or an expression such as "
    "'Planner(rank=(Quota(), Search()))'.  [default: foremoe]"
)
@option("--redundant", metavar="LIST", multiple=True, default=("0,1,2,4",), help="Numbers of redundant slots per rank to try.")
@option(
    "--foresight", metavar="LIST", multiple=True, default=("exact,previous,step",),
    help="Kinds of foresight to try: exact, previous (the micro-step before), step (the sum of all micro-steps), "
    "rerouted=SHARE, noisy=DRIFT.",
)  # fmt: skip
@option(
    "--ranks-per-node", "nodes", metavar="LIST", multiple=True,
    help="Comma-separated numbers of ranks per node to try, for example 8,72.  [default: as in the cluster]",
)  # fmt: skip
@option(
    "--seed", "seeds", metavar="LIST", multiple=True, default=("0",),
    help="Comma-separated random seeds, for example 0,1,2. The table then shows means and standard deviations over the seeds.",
)  # fmt: skip
@option(
    "--exact-seconds", type=Seconds(), default=EXACT_BUDGET_S,
    help="Time in seconds that each exact solver may spend on a line of the table.",
)  # fmt: skip
@table_options
def ablate(
    case_options: CaseOptions, planners: tuple[str, ...], redundant: tuple[str, ...],
    foresight: tuple[str, ...], nodes: tuple[str, ...], seeds: tuple[str, ...], json_file: str | None, *,
    exact_seconds: float = EXACT_BUDGET_S, look: Look = Look(),  # noqa: B008
) -> None:  # fmt: skip
    """Runs ``foremoe ablate``."""
    require_writable({"the JSON file": json_file}, case_options.files)
    look.require(COLUMNS)
    names = split_list(planners, "--planners") or ["foremoe"]
    views = [foresight_of(text) for text in split_list(foresight, "--foresight")]
    varied = Varied(
        {name: planner_of(name, case_options.shuffle) for name in names},
        [*whole_numbers(nodes, "--ranks-per-node")] if nodes else [None], whole_numbers(seeds, "--seed"),
        whole_numbers(redundant, "--redundant"), views,
    )  # fmt: skip
    if len(varied.seeds) > 1 and case_options.synthetic is None and not case_options.shuffle:
        raise InputError("seeds change only --synthetic routing or --shuffle; without these, give --seed one number.")
    with Progress(tasks=varied.num_tasks) as progress:
        case, rows = _rows(case_options, varied, exact_seconds, progress)
    payload = {
        "rows": rows, "case": case.record | {"redundant": varied.redundant, "seeds": varied.seeds},
        "planner": repr(varied.planners[names[0]]), "planners": {name: repr(p) for name, p in varied.planners.items()},
        "objective": case.problem.cost.objective, "cost_model": case.cost_model,
        "residual": case.problem.cluster.residual,
    }  # fmt: skip
    table, notes = lines_of(rows, varied.planners)
    emit(json_file, payload, [*_head(case, varied), "", table, "", *_foot(case, notes)], look)


def _rows(options: CaseOptions, varied: Varied, exact_seconds: float, progress: Progress) -> tuple[Case, list[dict[str, Any]]]:
    """Returns the first case, and the table rows for every planner, node size and seed."""
    cases, rows = [], []
    for (name, planner), node, seed in itertools.product(varied.planners.items(), varied.nodes, varied.seeds):
        chosen = dataclasses.replace(options, redundant=max(varied.redundant), ranks_per_node=node, seed=seed)
        if node is not None and node < 1:
            raise InputError(f"--ranks-per-node needs numbers of at least 1; got {node}.")
        case = build_case(chosen, planner.pack, progress=progress)
        cases.append(case)
        packs = not isinstance(planner.pack, AsGiven) and options.synthetic is None
        found = ablation.ablate(
            case.problem, planner, redundant=varied.redundant, foresight=varied.foresight, history_LE=case.history_LE,
            unpacked=build_case(chosen).problem if packs else None, exact_budget_s=exact_seconds, progress=progress,
            judge=Judge.of(case.problem),
        )  # fmt: skip
        where = {"planner": name, "ranks_per_node": case.record["ranks_per_node"], "seed": seed}
        rows += [row | where for row in found]
    return cases[0], rows


def _head(case: Case, varied: Varied) -> list[str]:
    line = case.line.replace(f"R = {max(varied.redundant)}", "R below")
    lines = [line] + [f"planner: {planner!r}" for planner in varied.planners.values()]
    if len(varied.seeds) > 1:
        seeds = ", ".join(map(str, varied.seeds))
        lines.append(f"seeds {seeds}: means ± standard deviations; the case above is the first one's")
    return lines


def _foot(case: Case, notes: list[str]) -> list[str]:
    return [
        f"stage, speed-up over static: simulated, {case.constants}",
        *notes,
    ]  # fmt: skip
