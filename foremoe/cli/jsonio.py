"""JSON out: strictly valid, and an option ``--json`` whose file name is optional but never swallows a trace."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from foremoe.base.errors import InputError

STDOUT = "-"
Function = TypeVar("Function", bound=Callable[..., Any])


class JsonCommand(click.Command):
    """A command whose ``--json`` takes a file only as ``--json=FILE`` or if the next word ends in ``.json``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Writes the option out in full before click sees it."""
        return super().parse_args(ctx, _written_out(args))


def _written_out(args: list[str]) -> list[str]:
    out: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            return [*out, word, *words]
        if word != "--json":
            out.append(word)
            continue
        following = next(words, None)
        if following is not None and following.lower().endswith(".json") and not following.startswith("-"):
            out.append(f"--json={following}")
            continue
        out.append(f"--json={STDOUT}")
        if following is not None:
            # The word after may itself be --json or --; it gets the same treatment.
            return out + _written_out([following, *words])
    return out


def json_option(function: Function) -> Function:
    """The option ``--json [FILE.json]`` as parameter ``json_file`` (None, "-" for stdout, or a path)."""
    return click.option(
        "--json",
        "json_file",
        metavar="[FILE.json]",
        default=None,
        help="Figures as JSON. Alone: JSON and nothing else on stdout. With a file (--json=FILE, or a next word that ends in "
        ".json): written there, and the text still goes to stdout.  [default: text only]",
    )(function)


def require_writable(outputs: Mapping[str, str | None], inputs: Iterable[str | None] = ()) -> None:
    """Refuses output files before any work is done for them.

    Args:
        outputs: what each is called, to its path; None and "-" are no files.
        inputs: files that the command reads, which no output may replace.

    Raises:
        InputError: a directory is missing or not writable, the path is a directory, or two files of the command are the same.
    """
    taken = {Path(path).resolve() for path in inputs if path}
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
        if not os.access(path if Path(path).exists() else folder, os.W_OK):
            raise InputError(f"{what} {name!r} cannot be written: permission denied; choose another place.")
        if Path(path).resolve() in taken:
            raise InputError(f"{what} {name!r} would overwrite another file of this command; give another name.")
        taken.add(Path(path).resolve())


def plain(value: Any) -> Any:
    """`value` as plain JSON types: numpy numbers and arrays too; NaN and infinity become null."""
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


def emit(json_file: str | None, payload: Mapping[str, Any], text: str) -> None:
    """Prints `text`, or the JSON instead of it; writes the JSON file if one was asked for."""
    if json_file is not None:
        body = json.dumps(plain(payload), indent=2, allow_nan=False) + "\n"
        if json_file == STDOUT:
            click.echo(body, nl=False)
            return
        try:
            Path(json_file).write_text(body, encoding="ascii")
        except OSError as error:
            raise InputError(f"cannot write {click.format_filename(json_file)!r}: {error.strerror}.") from None
    click.echo(text)
