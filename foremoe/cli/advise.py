"""``foremoe advise``: recommends what to change next."""

import dataclasses
from collections.abc import Iterator

import click

from foremoe.advice import changes
from foremoe.advice.changes import Advice, Case
from foremoe.base.errors import InputError
from foremoe.cli.gpus import OF_ALL_LAYERS, gpus_option, layout_words, on_gpus, pp_option
from foremoe.cli.inputs import build_case
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.memory import cure
from foremoe.cli.options import (
    DEFAULT_MICRO_STEPS,
    DEFAULT_TOKENS_PER_RANK,
    CaseOptions,
    case_options,
    table_options,
    trainer_options,
)
from foremoe.cli.progress import Progress
from foremoe.cli.simulate import FITS
from foremoe.cli.tables import Column, Look, Table, number, plural
from foremoe.problem.problem import Problem
from foremoe.simulate.pipeline import on_pipeline

COLUMNS = {
    "change": Column("change", left=True, rank=0), "speedup": Column("throughput", number(3), rank=1),
    "fits": FITS._replace(rank=2), "cost": Column("costs or needs", left=True, rank=3),
}  # fmt: skip
SMALLER = (2, 4, 8)  # divisors of the EP degree
_FEW = 4  # micro-steps

_HELP = """Suggests what to change next: redundant slots, homes, dispatch, micro-step, activation recomputation or layout.

Each change is tried alone. The default planner plans a sample of the stage, and the sample is simulated. Throughput is the number
of tokens per second and rank, relative to the case without the change.

\b
Example:
  foremoe advise rollout.npz --ranks 16 --tokens-per-rank 4096
  foremoe advise --synthetic qwen3-235b-a22b --gpus 64 --pp 4 --dispatch node
"""


@click.command(cls=JsonCommand, help=_HELP)
@case_options()
@gpus_option
@pp_option
@table_options
@trainer_options
def advise(
    case_options: CaseOptions, json_file: str | None, *, gpus: int | None = None, pp: int = 1, look: Look = Look()  # noqa: B008
) -> None:  # fmt: skip
    """Runs ``foremoe advise``."""
    require_writable({"the JSON file": json_file}, case_options.files)
    look.require(COLUMNS)
    case_options, _ = on_gpus(case_options, gpus, pp, 1)
    with Progress(verb="trying") as progress:
        case = build_case(case_options, progress=progress)
        trainer = case_options.trainer.of()
        redealt = _redealt(case_options, case.problem, progress)
        found = changes.advise(
            case.problem, trainer=trainer, pp=pp, slots=case.slots, redealt=redealt, progress=progress
        )  # fmt: skip
    rows = found.rows()
    payload = {
        "advice": str(found), "speedup": found.speedup, "even_gain": found.even_gain, "fits": found.fit.fits, "changes": rows,
        "case": {**case.record, "gpus": gpus, "pp": pp}, "cost_model": case.cost_model,
    }  # fmt: skip
    memory = [] if found.fit.fits else [f"memory: {found.fit.text()}{cure(found.fit)}"]
    said = [*words(found, case.constants), *memory, *few_micro_steps(case.problem.M), *few_layers(case.problem)]
    where = [layout_words(case.problem.G, trainer.data_parallel, pp)] if pp > 1 else []
    emit(json_file, payload, [case.line, *where, *said, "", Table(COLUMNS, rows, rows)], look)


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
    return [f"note: the memory check covers only {problem.L} of {num_layers} layers"] if num_layers > problem.L else []


def _redealt(options: CaseOptions, now: Problem, progress: Progress) -> dict[str, Case]:
    """Builds cases from the same routing and GPUs: longer micro-steps, other EP groups, and other pipelines.

    Each case has the number of slots that pays off in it, unless the user gave a number.
    """
    out = {}
    for name, changed in _layouts(options, now):
        progress(name, 0, 1)
        try:
            problem = build_case(changed).problem
            on_pipeline(problem, changed.pp)
        except InputError:
            continue  # counts cannot be packed again, and the number of experts may not be a multiple of `ranks`
        slots = "" if problem.R == now.R else f", R = {problem.R}"
        out[f"{name}{slots}"] = Case(problem, changed.trainer.of(), changed.pp)
    return out


def _layouts(options: CaseOptions, now: Problem) -> Iterator[tuple[str, CaseOptions]]:
    """Yields names and options of the cases to try."""
    ranks, pp, groups = now.G, options.pp, options.trainer.data_parallel or 1
    tokens = 2 * (options.tokens_per_rank or DEFAULT_TOKENS_PER_RANK)
    yield f"{tokens} tokens a rank and micro-step", dataclasses.replace(options, tokens_per_rank=tokens, ranks=ranks)
    same = [(ranks // n, pp, n * groups) for n in SMALLER if ranks % n == 0 and ranks > n]
    same += [(2 * ranks, pp, groups // 2)] if groups % 2 == 0 else []
    other = [(ranks * pp // p, p, groups) for p in (pp // 2, 2 * pp, 4 * pp) if p and ranks * pp % p == 0 and ranks * pp > p]
    if options.schedule not in OF_ALL_LAYERS:
        other = []  # the case is one rank of a pipeline already
    for ep, p, data_parallel in [*same, *other]:
        steps = options.micro_steps or (DEFAULT_MICRO_STEPS if options.synthetic is not None else None)
        name = f"EP {ep}{f' x DP {data_parallel}' if data_parallel > 1 else ''}{f' x PP {p}' if max(p, pp) > 1 else ''}"
        yield name, dataclasses.replace(
            options, ranks=ep, pp=p, micro_steps=steps and max(steps * p // pp, 1),
            trainer=dataclasses.replace(options.trainer, data_parallel=data_parallel),
        )  # fmt: skip
