"""The command ``foremoe``, a group of subcommands. It reports bad input as one sentence, and its exit code gives the result.

Exit codes: 0 for success, 1 for a checked plan or job with a fault, 2 for bad input, 130 if interrupted. The module of a command
is imported when the command runs, so that ``foremoe --help`` is fast.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from foremoe.base.errors import InputError, PlanError, did_you_mean, printable
from foremoe.base.version import __version__
from foremoe.cli.terminal import width, wrapped

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

COMMANDS = {
    "plan": "Plan every layer of every micro-step, and write the plan.",
    "compare": "Compare strategies by skew, copies, bytes and simulated stage time.",
    "simulate": "Simulate the timelines of strategies and compare them.",
    "advise": "Suggest what to change next: slots, homes, dispatch, micro-step, recomputation or EP size.",
    "import": "Convert files of engines and recorders to a trace or to counts.",
    "inspect": "Show what a trace, workload or plan file contains.",
    "check": "Validate a plan and check that it was made for this routing.",
    "ablate": "Measure what each level, redundant slot and kind of foresight gains.",
    "solvers": "List strategies and installed solvers.",
    "doctor": "List the software and hardware that foremoe finds here, for a bug report.",
    "calibrate": "Measure this machine's constants for the cost model.",
    "report": "Write an HTML page about a plan: skew, copies, links and memory.",
    "warm-up": "Compile the readers, the default planner, advice and the simulator ahead of the first run.",
}


class OneSentence(click.Command):
    """A command that reports bad input as ``error: <one sentence>`` on stderr, without a traceback."""

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs the command line and exits. With ``standalone_mode=False``, errors are raised and the process does not exit."""
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        try:
            code = super().main(args, standalone_mode=False, **extra)
        except click.Abort:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
        except click.NoSuchOption as error:
            fail(where_option_is(error))
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
        """Runs the chosen command. An interrupt ends it with one line on stderr."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError):
            raise click.Abort() from None


class CommandLine(OneSentence, click.Group):
    """The group of foremoe's commands."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """Runs the command line as ``foremoe``, regardless of the file that started it. Without arguments, shows help."""
        return super().main((sys.argv[1:] if args is None else list(args)) or ["--help"], **(extra | {"prog_name": "foremoe"}))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Imports and returns the command `name`. Returns None if there is no such command."""
        if name not in COMMANDS:
            return None
        name = {"import": "import_"}.get(name, name.replace("-", "_"))  # `import` is a Python keyword
        watched = sys.stderr.isatty()
        if watched:  # importing numpy and numba takes one to two seconds
            click.echo("loading", err=True, nl=False)
        try:
            return getattr(importlib.import_module(f"foremoe.cli.{name}"), name)
        finally:
            if watched:
                click.echo("\r       \r", err=True, nl=False)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolves a command as click does, but suggests the closest name for an unknown command."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            meant = did_you_mean(args[0], COMMANDS)
            raise click.UsageError(f"there is no command {args[0]!r}; {meant}the commands are {', '.join(sorted(COMMANDS))}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


def where_option_is(error: click.NoSuchOption) -> str:
    """Returns a sentence with the commands that have an option which this one lacks, or click's message if there are none."""
    context = error.ctx or click.Context(main)
    commands = {name: main.get_command(context, name) for name in sorted(COMMANDS)}
    have = [name for name, c in commands.items() if c and any(error.option_name in param.opts for param in c.params)]
    mistyped = any(near.startswith(error.option_name) or error.option_name.startswith(near) for near in error.possibilities or ())
    if not have or mistyped:
        return error.format_message()
    return (
        f"`{context.command_path}` has no option {error.option_name}; {', '.join(have)} {'has' if len(have) == 1 else 'have'} it."
    )


def fail(sentence: str) -> NoReturn:
    """Prints one message on stderr, wrapped at words on a terminal, and exits."""
    line = f"error: {printable(' '.join(sentence.split()))}"
    click.echo("\n".join(wrapped(line, width(sys.stderr))), err=True)
    sys.exit(BAD_INPUT)


_HELP = """Balances Mixture-of-Experts training with routing that rollout has already recorded.

A TRACE is a file with the experts that were chosen for every token. Its format is .npz, .safetensors, or a format of a rollout
engine or recorder that `foremoe import` reads. Instead of a TRACE, most commands accept --synthetic MODEL.

\b
Start here:
  foremoe compare --synthetic qwen3-30b-a3b --ranks 16 --dispatch node
  foremoe plan rollout.npz --ranks 16 -o plan.safetensors
  foremoe check plan.safetensors --trace rollout.npz

Exit codes: 0 for success, 1 for a checked plan or job with a fault, 2 for bad input, 130 if interrupted.
"""


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, help=_HELP)
@click.version_option(__version__, prog_name="foremoe", message="%(prog)s %(version)s")
def main() -> None:
    """Runs the command line."""
