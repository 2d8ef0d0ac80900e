"""The page of the command line, written from the commands themselves, so that it lists every option that they accept."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

import click

from foremoe.base.version import __version__
from foremoe.cli.helping import GROUPS
from foremoe.cli.main import main


def page() -> str:
    """Returns the page as Markdown: every command with its usage, its help and its options in the groups of ``--help``."""
    top = click.Context(main, info_name="foremoe", **main.context_settings)
    commands = {name: main.get_command(top, name) for name in main.list_commands(top)}
    parts = ["# Command line", f"These are the commands of foremoe {__version__}.", *section(main, top)]
    for name, command in commands.items():
        assert command is not None
        parts += [f"## foremoe {name}", *section(command, click.Context(command, top, info_name=name))]
    return "\n\n".join(parts) + "\n"


def section(command: click.Command, ctx: click.Context) -> Iterator[str]:
    yield f"```text\n{' '.join([ctx.command_path, *command.collect_usage_pieces(ctx)])}\n```"
    for block in inspect.cleandoc(command.help or "").split("\n\n"):
        title, _, example = block.removeprefix("\b\n").partition("\n")
        shown = block.startswith("\b")  # as it is
        yield f"{title}\n\n```text\n{textwrap.dedent(example)}\n```" if shown else marked(" ".join(block.split()))
    yield f"```{{program}} {ctx.command_path}\n```"
    group_of = {name: title for title, names in GROUPS.items() for name in names}
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    for title in ("", *GROUPS):
        found = [option for option in options if group_of.get(option.name or "", "") == title]
        records = [option.get_help_record(ctx) for option in found if "--help" not in option.opts or command is main]
        yield from [f"**{title}**"] if title and records else []
        yield from (f"```{{option}} {record[0]}\n{marked(record[1])}\n```" for record in records if record)


def marked(text: str) -> str:
    """Marks options and quoted values as code, unless they are marked already."""
    code = r"(?<![\w-])(--?[a-z][a-z-]*(?:=\w+)?)|(?<!\w)'([^']+)'(?!\w)"
    parts = re.split("(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(code, lambda m: f"`{m[1] or m[2]}`", part) for part in parts)
