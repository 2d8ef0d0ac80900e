"""``foremoe warm-up``: compiles kernels in advance, so that the first plan does not wait for compilation."""

import click

from foremoe.cli.progress import Progress
from foremoe.warm import warm_up as compile_all

_HELP = """Compiles the readers, the default planner, advice and the simulator, and caches the code on disk.

The cache is in NUMBA_CACHE_DIR if this variable is set. The first run takes one to three minutes, and later runs take
seconds. Run the command when you build an image, so that no training job has to compile. Other strategies and solvers compile
when they first run, in `foremoe compare` for example.

\b
Example:
  foremoe warm-up
"""


@click.command("warm-up", help=_HELP)
def warm_up() -> None:
    """Runs ``foremoe warm-up``."""
    names: list[str] = []
    with Progress("compiling", tells=False) as progress:
        progress("the default planner, in one to three minutes if nothing is compiled yet", 0, 1)
        seconds = compile_all(names.append)
    click.echo(f"compiled {len(names)} functions in {seconds:.1f} s")
