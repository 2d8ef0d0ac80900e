"""``foremoe warm-up``: compiles ahead of time what a first plan would wait for."""

import sys

import click

from foremoe.warm import warm_up as compile_all


@click.command("warm-up")
def warm_up() -> None:
    """Compiles what reading, the default planner and the simulator run, and keeps it on disk (`NUMBA_CACHE_DIR` names the place).

    Takes about a minute once, then seconds. Run it when an image is built, so that no training job compiles.

    \b
    Example:
      foremoe warm-up
    """
    num = 0

    def show(name: str) -> None:
        nonlocal num
        num += 1
        if sys.stderr.isatty():
            click.echo(f"\rcompiled {num:3}: {name:30.30}", err=True, nl=False)

    if not sys.stderr.isatty():
        click.echo("compiling; about a minute where nothing is compiled yet", err=True)
    seconds = compile_all(show)
    if sys.stderr.isatty() and num:
        click.echo(f"\r{'':50}\r", err=True, nl=False)
    click.echo(f"compiled {num} functions in {seconds:.1f} s")
