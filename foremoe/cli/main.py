"""``foremoe``: the group of commands, and the one place where bad input becomes one sentence and an exit code.

Exit codes: 0 done, 1 a checked plan is broken, 2 bad input, 130 interrupted. Command modules
import numpy, numba and torch only when they run, so that ``foremoe --help`` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

import foremoe
from foremoe.base.errors import InputError, PlanError
from foremoe.cli.ablate import ablate
from foremoe.cli.calibrate import calibrate
from foremoe.cli.check import check
from foremoe.cli.compare import compare
from foremoe.cli.inspect import inspect
from foremoe.cli.plan import plan
from foremoe.cli.report import report
from foremoe.cli.simulate import simulate
from foremoe.cli.solvers import solvers

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class OneSentence(click.Command):
    """A command that ends bad input with ``error: <one sentence>`` on stderr, never with a traceback."""

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs the command line and exits; with ``standalone_mode=False`` errors are raised instead."""
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        try:
            code = super().main(args, standalone_mode=False, **extra)
        except click.Abort:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            fail(error.format_message())
        except (InputError, PlanError) as error:
            fail(str(error))
        except MemoryError:
            fail("there is not enough memory for this; use fewer tokens, micro-steps or ranks.")
        except OSError as error:
            name = f"{click.format_filename(os.fsdecode(error.filename))!r}: " if error.filename else ""
            fail(f"{name}{error.strerror or error}; check the path and its permissions.")
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the chosen command; an interrupt leaves one line."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError):
            raise click.Abort() from None


class CommandLine(OneSentence, click.Group):
    """The group of commands."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """Runs the command line under the package's name, however it was started."""
        return super().main(args, **(extra | {"prog_name": "foremoe"}))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the options before the command; with nothing at all, shows the help."""
        return super().parse_args(ctx, args or ["--help"])


def fail(sentence: str) -> NoReturn:
    """Ends with one line on stderr."""
    click.echo(f"error: {' '.join(sentence.split())}", err=True)
    sys.exit(BAD_INPUT)


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(foremoe.__version__, prog_name="foremoe", message="%(prog)s %(version)s")
def main() -> None:
    """Balances Mixture-of-Experts training with routing that rollout has already recorded.

    A TRACE holds the experts chosen for every token (.npz or .safetensors). No trace at hand? plan, compare and
    ablate also take --synthetic MODEL.

    \b
    Start here:
      foremoe compare --synthetic qwen3-30b-a3b --ranks 16
      foremoe plan rollout.npz --ranks 16 -o plan.safetensors
      foremoe check plan.safetensors --trace rollout.npz

    Exit codes: 0 done, 1 a checked plan is broken, 2 bad input, 130 interrupted.
    """


for command in (plan, compare, simulate, inspect, check, ablate, solvers, calibrate, report):
    main.add_command(command)
