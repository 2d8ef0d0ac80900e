"""``foremoe warm-up``: compiles kernels in advance, so that the first plan does not wait."""

import click

from foremoe.cli.progress import Progress
from foremoe.warm import warm_up as compile_all

_HELP = """Compiles the readers, the default planner and the simulator, and caches the code on disk, in
NUMBA_CACHE_DIR if that is set.

Takes about a minute once, then seconds. Run it when an image is built, so that no training job compiles.

\b
Example:
  foremoe warm-up
"""


@click.command("warm-up", help=_HELP)
def warm_up() -> None:
    """The command ``foremoe warm-up``."""
    names: list[str] = []
    with Progress("compiling", tells=False) as progress:
        progress("what a first plan runs; about a minute where nothing is compiled yet", 0, 1)
        seconds = compile_all(names.append)
    click.echo(f"compiled {len(names)} functions in {seconds:.1f} s")
