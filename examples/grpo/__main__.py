"""``python -m examples.grpo``: a real RL step on processes of this machine, with and without foremoe."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import click

from examples.grpo.settings import SIZES
from foremoe.base.errors import InputError, TransferError, file_errors
from foremoe.base.hardware import cores
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.main import OneSentence

FAILED = 1


class _Command(OneSentence, JsonCommand):
    pass


@click.command(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--ranks", type=click.IntRange(2, 32), default=2, show_default=True, help="Processes; the experts are spread over them."
)
@click.option("--steps", type=click.IntRange(1, 10_000), default=4, show_default=True, help="GRPO steps.")
@click.option(
    "--redundant",
    metavar="R",
    type=click.IntRange(1, 2**15 - 1),
    help="Redundant slots per rank.  [default: the fewest whose load bound allows to take away 95 % of (static skew - 1)]",
)
@click.option(
    "--seed", type=click.IntRange(0), default=SIZES["default"].seed, show_default=True, help="Of everything that is drawn."
)
@click.option(
    "--pages", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path), help="Leave a report page and a trace there."
)
@click.option("--size", type=click.Choice(["default", "tiny"]), default="default", hidden=True)
@click.pass_context
def main(
    ctx: click.Context,
    ranks: int,
    steps: int,
    redundant: int | None,
    seed: int,
    pages: Path | None,
    size: str,
    json_file: str | None,
) -> None:
    """Pre-trains a small MoE language model on puzzles, then improves it by GRPO, on processes of this machine (CPU).

    In every step the recorded routing is replayed in the recompute and update stages, three times from the same parameters: with
    experts at home (static), by a plan (foremoe), and with routing forced to be even (force-balanced). Takes some minutes.

    \b
    Example:
      python -m examples.grpo --ranks 2 --steps 12 --pages demo
    """
    require_writable({"the JSON file": json_file})

    settings = dataclasses.replace(SIZES[size], seed=seed)
    if settings.num_experts % ranks:
        raise InputError(f"{settings.num_experts} experts do not divide over {ranks} ranks; give --ranks 2, 4, 8, 16 or 32.")
    if redundant is not None and redundant > settings.num_experts - settings.num_experts // ranks:
        away = settings.num_experts - settings.num_experts // ranks
        raise InputError(f"a rank can hold replicas of the {away} experts that live elsewhere; give --redundant up to {away}.")
    if find_spec("torch") is None:
        raise InputError("the demo needs torch; pip install 'foremoe[torch]'.")
    if pages is not None:  # now, not after some minutes
        with file_errors(pages, "make", "give --pages another folder"):
            pages.mkdir(parents=True, exist_ok=True)
        require_writable({"the report page": str(pages / "report.html")})
    if cores() < ranks:
        click.echo(f"note: {ranks} ranks share {cores()} of this machine's cores; wall times say little.", err=True)
    click.echo("loading torch and foremoe", err=True)  # takes seconds

    from examples.grpo.compiling import compile_kernels
    from examples.grpo.launch import launch
    from examples.grpo.pages import REPORT, TRACE
    from examples.grpo.table import report

    compile_kernels(settings, ranks, lambda line: click.echo(line, err=True))
    click.echo(f"starting {ranks} ranks", err=True)
    try:
        figures = launch(settings, num_ranks=ranks, num_steps=steps, redundant=redundant, pages=pages)
    except TransferError as error:
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        ctx.exit(FAILED)
    opened = [] if pages is None else [f"Open {pages / REPORT} in a browser, and {pages / TRACE} at ui.perfetto.dev."]
    emit(json_file, figures, report(figures) + opened)


if __name__ == "__main__":
    main(prog_name="python -m examples.grpo")
