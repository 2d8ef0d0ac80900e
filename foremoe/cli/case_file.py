"""``--case FILE.toml``: reads options of a case from a file, as defaults that the command line overrides."""

from collections.abc import Sequence
from typing import Any

import click

from foremoe.base.errors import InputError

_BITS = 128  # no option takes a larger number, and Python refuses to write very large ones as text


def read_case(context: click.Context, path: str | None, names: Sequence[str]) -> str | None:
    """Makes the values in a TOML file the defaults of the command in `context`, and returns `path`.

    Args:
        path: File with keys named as the options, such as ``tokens-per-rank``, or None for no file. Keys that only other
            commands have are left out, so that all commands can share a file.
        names: Names of all parameters that a file may give.

    Raises:
        InputError: The file cannot be read, a key is unknown, or a value does not have the type of its option.
    """
    if path is None:
        return None
    from foremoe.base import fields  # imported here, because it imports numpy and help needs none

    table = fields.read(path)
    fields.check_keys(table, [name.replace("_", "-") for name in names if name != "case"], (), repr(path))
    known = {word.removeprefix("--"): param for param in context.command.params for word in param.opts}
    # click converts and checks text as on the command line; it would take the number 16.5 as 16.
    context.default_map = {
        str(known[key].name): _words(value, f"{key} in {path!r}", known[key]) for key, value in table.items() if key in known
    }
    return path


def _words(value: Any, what: str, param: click.Parameter) -> str | list[str]:
    if param.nargs == -1 or param.multiple:
        return [_word(item, what) for item in (value if isinstance(value, list) else [value])]
    return _word(value, what)


def _word(value: Any, what: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | float) or (isinstance(value, int) and value.bit_length() <= _BITS):
        return str(value)
    kind = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    raise InputError(f"{what} must be a text, a number, true or false, as the option takes it; got {kind}.")
