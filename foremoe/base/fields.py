"""Functions that check the fields of frozen values, and that convert these values to and from TOML tables."""

import dataclasses
import difflib
import functools
import importlib.resources
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from foremoe.base.errors import InputError, did_you_mean, first_line
from foremoe.base.files import read_file, write_file

MAX_WHOLE = 2**53
"""Largest whole number that a field may hold. float64 represents it and all smaller ones exactly."""
# Enough for the nodes of 32767 ranks, with one line for each.
_MAX_TOML_BYTES = 2**19
# A message lists all keys if there are no more.
_FEW_KEYS = 12
# Parsing a key of n parts takes n^2 / 2 references. foremoe's tables do not use such keys.
_MANY_PARTS = re.compile(r"(?:\.[^.\n]*){32}")


def whole(value: object, name: str, low: int = 1, high: float = math.inf) -> int:
    """Returns `value` as an int in [low, high]. Refuses 8.0 and True."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise InputError(f"{name} must be a whole number {limits}; got {shown(value)}.")
    return int(value)


def real(value: object, name: str, low: float = 0.0, high: float = math.inf, *, open_low: bool = True) -> float:
    """Returns `value` as a finite float in (low, high] or, if `open_low` is False, in [low, high]."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number; got {shown(value)}.")
    try:
        out = float(value)
    except OverflowError:
        out = math.inf
    if not math.isfinite(out) or out < low or out > high or (open_low and out == low):
        if math.isinf(high):
            limits = f"a finite number {'above' if open_low else 'of at least'} {low:g}"
        else:
            limits = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise InputError(f"{name} must be {limits}; got {shown(value)}.")
    return out


def flag(value: object, name: str) -> bool:
    """Returns `value` as a bool. Refuses 0 and 1."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{name} must be true or false; got {shown(value)}.")
    return bool(value)


def text(value: object, name: str) -> str:
    """Returns `value` unchanged. Refuses anything but a string of printable characters that is not blank."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise InputError(f"{name} must be a line of printable text; got {shown(value)}.")
    return value


def check_fields(value: Any, checks: Sequence[tuple[Callable[[Any, str], Any], Sequence[str]]]) -> None:
    """Replaces fields of a frozen dataclass instance with the results of checks. Skips fields whose default None was kept."""
    for check, names in checks:
        for name in names:
            given = getattr(value, name)
            if given is not None or value.__dataclass_fields__[name].default is not None:
                object.__setattr__(value, name, check(given, name))


def scalars(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance whose values are a single number, bool or string, in order."""
    pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return {name: item for name, item in pairs if isinstance(item, bool | int | float | str)}


def check_keys(table: Mapping[str, Any], known: Collection[str], required: Collection[str], where: str) -> None:
    """Raises InputError if `table` has a key that is not in `known`, or if it lacks a key in `required`."""
    unknown = [key for key in table if key not in known]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), known, 3)
        which = f"remove it, because none of its {len(known)} keys is similar"
        if near or len(known) <= _FEW_KEYS:
            which = f"the {'nearest' if near else 'keys'} are {', '.join(near or known)}"
        raise InputError(f"{where} has the unknown key {shown(unknown[0])}; {which}.")
    missing = [key for key in required if key not in table]
    if missing:
        raise InputError(f"{where} lacks {', '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}.")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the table in the TOML file at `path`."""
    data = read_file(path, _MAX_TOML_BYTES)
    try:
        text = data.decode("utf-8-sig")  # some editors begin files with a byte-order mark
        if _MANY_PARTS.search(text):
            raise ValueError("a key of many parts")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else first_line(error)
        raise InputError(f"{os.fspath(path)!r} is not valid TOML ({reason}); correct the file.") from error


def write(path: str | os.PathLike[str], table: Mapping[str, Any]) -> None:
    """Writes `table` to `path` as TOML, in the table's order."""
    try:
        import tomli_w  # imported here, because GPU images lack it and running plans does not need it
    except ImportError:
        raise InputError("writing TOML needs tomli-w, which is not installed; pip install tomli-w.") from None
    write_file(path, tomli_w.dumps(table))


@functools.cache
def _shipped(file: str) -> dict[str, dict[str, Any]]:
    resource = importlib.resources.files("foremoe.machine").joinpath("presets", file)
    return tomllib.loads(resource.read_text(encoding="utf-8"))


def preset_names(file: str) -> tuple[str, ...]:
    """Returns the names of the presets in a file of the package, in the order of the file."""
    return tuple(_shipped(file))


def preset(file: str, name: str, kind: str) -> dict[str, Any]:
    """Returns a copy of a preset's table, to which the name is added. The case of `name` does not matter."""
    key = name.strip().lower() if isinstance(name, str) else ""
    if key not in _shipped(file):
        meant = did_you_mean(key, preset_names(file)) if key else ""
        raise InputError(f"there is no {kind} preset {shown(name)}; {meant}choose one of {', '.join(preset_names(file))}.")
    return {"name": key, **_shipped(file)[key]}


def shown(value: object) -> str:
    """Returns `value` for messages, as text shortened to one line of at most 60 characters."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    line = ascii(value).replace("\n", " ")
    return line if len(line) <= 60 else line[:57] + "..."
