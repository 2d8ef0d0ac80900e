"""``foremoe advise``: recommends what to change next."""

import dataclasses

import click

from foremoe.advice import changes
from foremoe.advice.changes import Advice, Case
from foremoe.base.errors import InputError
from foremoe.cli.inputs import build_case
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.memory import cure
from foremoe.cli.options import DEFAULT_TOKENS_PER_RANK, CaseOptions, case_options, table_options, trainer_options
from foremoe.cli.progress import Progress
from foremoe.cli.tables import Column, Look, Table, number, plural
from foremoe.problem.problem import Problem

COLUMNS = {
    "change": Column("change", left=True, rank=0), "speedup": Column("throughput", number(3), rank=1),
    "fits": Column("fits", lambda fits: "yes" if fits else "no", rank=2), "cost": Column("costs or needs", left=True, rank=3),
}  # fmt: skip
SMALLER = (2, 4, 8)  # divisors of the EP degree
_FEW = 4  # micro-steps

_HELP = """Suggests what to change next: redundant slots, homes, dispatch, micro-step, activation recomputation or EP degree.

Each change is tried alone. The default planner plans a sample of the stage, and the sample is simulated. Throughput is the number
of tokens per second and rank, relative to the case without the change.

\b
Example:
  foremoe advise rollout.npz --ranks 16 --tokens-per-rank 4096
"""


@click.command(cls=JsonCommand, help=_HELP)
@case_options()
@table_options
@trainer_options
def advise(case_options: CaseOptions, json_file: str | None, look: Look = Look()) -> None:  # noqa: B008
    """Runs ``foremoe advise``."""
    require_writable({"the JSON file": json_file}, case_options.files)
    look.require(COLUMNS)
    with Progress(verb="trying") as progress:
        case = build_case(case_options, progress=progress)
        trainer = case_options.trainer.of()
        redealt = _redealt(case_options, case.problem.G, case.problem.R)
        found = changes.advise(case.problem, trainer=trainer, slots=case.slots, redealt=redealt, progress=progress)
    rows = found.rows()
    payload = {
        "advice": str(found), "speedup": found.speedup, "even_gain": found.even_gain, "fits": found.fit.fits, "changes": rows,
        "case": case.record, "cost_model": case.cost_model,
    }  # fmt: skip
    memory = [] if found.fit.fits else [f"memory: {found.fit.text()}{cure(found.fit)}"]
    said = [*words(found, case.constants), *memory, *few_micro_steps(case.problem.M), *few_layers(case.problem)]
    emit(json_file, payload, [case.line, *said, "", Table(COLUMNS, rows, rows)], look)


def words(found: Advice, constants: str) -> list[str]:
    """Formats the advice and the figures on which it is based."""
    now = f"now: {found.speedup:.2f}x over experts at home; {found.beside_even}"
    return [f"advice: {found}", f"{now} (simulated sample, {constants})"]


def few_micro_steps(num: int) -> list[str]:
    """Returns a note if the trace has fewer micro-steps than a training step usually has."""
    if num >= _FEW:
        return []
    have = f"the trace has {plural(num, 'micro-step')}; a training step usually has more"
    return [f"note: {have}, in which moving homes and reducing gradients once a step cost a smaller share"]


def few_layers(problem: Problem) -> list[str]:
    """Returns a note if the stage has only some of the model's layers, which take less memory than all of them."""
    num_layers = len(problem.model.moe_layer_L)
    return [f"note: memory, and what fits, is that of {problem.L} of {num_layers} layers"] if num_layers > problem.L else []


def _redealt(options: CaseOptions, ranks: int, redundant: int) -> dict[str, Case]:
    """Builds cases from the same routing and ranks, with longer micro-steps, smaller EP groups or larger ones."""
    tokens = options.tokens_per_rank or DEFAULT_TOKENS_PER_RANK
    groups = options.trainer.data_parallel or 1
    tried = {f"{2 * tokens} tokens a rank and micro-step": (dataclasses.replace(options, tokens_per_rank=2 * tokens), groups)}
    for n in SMALLER:
        if ranks % n == 0 and ranks > n:
            tried[f"EP {ranks // n}"] = dataclasses.replace(options, ranks=ranks // n), n * groups
    if groups % 2 == 0:
        tried[f"EP {2 * ranks}"] = dataclasses.replace(options, ranks=2 * ranks), groups // 2
    out = {}
    for name, (changed, data_parallel) in tried.items():
        around = dataclasses.replace(options.trainer, data_parallel=data_parallel)
        try:
            problem = build_case(dataclasses.replace(changed, redundant=redundant, trainer=around)).problem
        except InputError:
            continue  # counts cannot be packed again, and the number of experts may not be a multiple of `ranks`
        out[name] = Case(problem, around.of())
    return out
