"""Writes the output of a command as text, tables, CSV or JSON. The name of a trace after ``--json`` is not taken as its value."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from foremoe.base.errors import InputError, file_errors, printable
from foremoe.base.files import write_file
from foremoe.base.version import __version__
from foremoe.cli.helping import HelpedCommand
from foremoe.cli.tables import BEST, FAILING, Look, Table, csv_text, render
from foremoe.cli.terminal import has_colour, width, wrapped

STDOUT = "-"
_HELP = (
    "Print the figures as JSON instead of text. If a file is given, as --json=FILE or as a next word that ends in .json, the "
    "JSON is written there, and the text is still printed.  [default: text only]"
)


class JsonCommand(HelpedCommand):
    """A command with the option ``--json [FILE.json]``. The parameter ``json_file`` is either None, "-" for stdout, or a path."""

    def __init__(self, *, params: list[click.Parameter], **settings: Any) -> None:
        option = click.Option(["--json", "json_file"], metavar="[FILE.json]", help=_HELP)
        super().__init__(params=[*params, option], **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Gives ``--json`` without a file its value before click parses the arguments."""
        return super().parse_args(ctx, _with_value(args))


def _with_value(args: list[str]) -> list[str]:
    end = args.index("--") if "--" in args else len(args)
    has_file = [word.lower().endswith(".json") and not word.startswith("-") for word in [*args[1:], ""]]
    return [f"--json={STDOUT}" if word == "--json" and i < end and not has_file[i] else word for i, word in enumerate(args)]


def require_writable(outputs: Mapping[str, str | None], inputs: Iterable[str | None] = ()) -> None:
    """Raises InputError for an output file that cannot be written or would replace an input. None and "-" do not name files, so
    they are not checked."""
    taken = {_place(path) for path in inputs if path}
    for what, path in outputs.items():
        if path is None or path == STDOUT:
            continue
        name, folder = click.format_filename(path), Path(path).parent
        if not path:
            raise InputError(f"{what} has an empty file name; give one.")
        if not folder.is_dir():
            place = click.format_filename(folder)
            raise InputError(f"{what} {name!r} cannot be written: there is no directory {place!r}; create it first.")
        if Path(path).is_dir():
            raise InputError(f"{what} {name!r} is a directory; give the name of a file in it.")
        # The new file is written next to the old one and then replaces it, so the folder must be writable.
        if not os.access(folder, os.W_OK) or (Path(path).exists() and not os.access(path, os.W_OK)):
            raise InputError(f"{what} {name!r} cannot be written: permission denied; choose another place.")
        if _place(path) in taken:
            raise InputError(f"{what} {name!r} would overwrite another file of this command; give another name.")
        taken.add(_place(path))


def require_ending(what: str, path: str | None, *endings: str) -> None:
    """Raises InputError if an output file's name has the ending of another kind of file. The ending may be missing."""
    ending = Path(path or "").suffix.lower()
    if ending and ending not in endings:
        raise InputError(f"{what} {click.format_filename(str(path))!r} must end in {' or '.join(endings)}; give another name.")


def _place(path: str) -> str:
    with file_errors(path, "use", "give another file name"):
        return os.path.realpath(path)


def plain(value: Any) -> Any:
    """Converts `value` to plain JSON types, including numpy numbers and arrays. NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def emit(
    json_file: str | None,
    payload: Mapping[str, Any],
    lines: Iterable[str | Table],
    look: Look = Look(),  # noqa: B008
) -> None:
    """Prints either lines and tables, JSON or CSV. If `json_file` is a path, also writes the JSON to it.

    On a terminal, lines wrap at words, and the best and the failing rows of tables are coloured.
    """
    if json_file is not None:
        body = json.dumps(plain({**payload, "foremoe_version": __version__}), indent=2, allow_nan=False) + "\n"
        if json_file == STDOUT:
            click.echo(body, nl=False)
            return
        write_file(json_file, body)
    if look.csv:
        first = next(part for part in lines if isinstance(part, Table))
        click.echo(csv_text(plain(first.figures), look.columns, first.columns), nl=False)
        return
    columns, out = width(), list[str]()
    for part in lines:
        if isinstance(part, Table):
            out += [_toned(printable(line), tone) for line, tone in render(part, look, columns)]
        else:
            # These lines contain text from files, which may contain control characters.
            out += [short for line in part.split("\n") for short in wrapped(printable(line), columns)]
    click.echo("\n".join(out))


_COLOURS = {BEST: "green", FAILING: "red"}


def _toned(line: str, tone: str | None) -> str:
    return click.style(line, fg=_COLOURS[tone]) if tone is not None and has_colour() else line
