"""How the command line's texts are read: numbers, lists, ranges, and names of solvers and policies."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from foremoe.base.errors import InputError

if TYPE_CHECKING:
    from foremoe.levels import PackSolver
    from foremoe.planner.planner import Planner


class Whole(click.ParamType):  # type: ignore[type-arg]
    """A whole number of at least `low`, in plain ASCII digits."""

    name = "N"

    def __init__(self, low: int = 1, high: int = 2**31 - 1) -> None:
        self.low, self.high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; fails with one sentence."""
        text = str(value).strip()
        # int() would also take 1_0 and digits of other scripts.
        digits = text.isascii() and text.isdigit() and len(text) <= 19
        if not digits or not self.low <= int(text) <= self.high:
            self.fail(f"{value!r} is not a whole number from {self.low} to {self.high}.", param, ctx)
        return int(text)


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """A finite number of seconds above 0."""

    name = "S"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds; fails with one sentence."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is not a number of seconds above 0.", param, ctx)
        return seconds


def split_list(texts: tuple[str, ...], option: str) -> list[str]:
    """The items of an option that may be repeated and holds commas: only commas outside brackets and quotes separate.

    Raises:
        InputError: nothing between two commas, or brackets and quotes that do not close.
    """
    items = [item.strip() for text in texts for item in _split(text, option)]
    if not all(items):
        raise InputError(f"{option} {','.join(texts)!r} has an empty item; write the names with single commas between them.")
    return list(dict.fromkeys(items))


def _split(text: str, option: str) -> list[str]:
    items, depth, quote, begin = [], 0, "", 0
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            items.append(text[begin:i])
            begin = i + 1
        if depth < 0:
            break
    if depth or quote:
        raise InputError(f"{option} {text!r} has a bracket or quote that does not close; quote the whole list for the shell.")
    return [*items, text[begin:]]


def whole_numbers(texts: tuple[str, ...], option: str) -> list[int]:
    """The items of a list option as whole numbers of at least 0.

    Raises:
        InputError: an item is none.
    """
    items = split_list(texts, option)
    for item in items:
        if not (item.isascii() and item.isdigit() and len(item) <= 9):
            raise InputError(f"{option} needs whole numbers of at least 0 such as 0,1,2,4; got {item!r}.")
    return [int(item) for item in items]


def layer_range(text: str, num_layers: int) -> range:
    """The layers of ``A:B``; either end may be left out.

    Raises:
        InputError: no range, or none of the layers.
    """
    first, colon, end = (part.strip() for part in text.partition(":"))
    if colon and all(not part or (part.isascii() and part.isdigit() and len(part) <= 9) for part in (first, end)):
        chosen = range(int(first or 0), int(end or num_layers))
        if len(chosen) and chosen.stop <= num_layers:
            return chosen
    raise InputError(f"--layers {text!r} is no range of the {num_layers} layers; write A:B, for example 0:{num_layers}.")


def planner_of(text: str) -> Planner:
    """The planner that a strategy's name, a solver's text or a place in a module stands for.

    Raises:
        InputError: none of them, or code of the caller's own that cannot be used.
    """
    from foremoe.planner.strategies import resolve

    # An installed command has its own folder first on the path; module:name means the folder it is called in.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return resolve(text)
    except InputError:
        raise
    except Exception as error:
        # A module:name runs somebody else's code, which may fail in any way.
        raise InputError(f"{text!r} cannot be used as a solver: {type(error).__name__}: {error}.") from error


def packer_of(packer: PackSolver, shuffle: bool) -> PackSolver:
    """The pack level, which shuffles first if ``--shuffle`` says so.

    Raises:
        InputError: a pack level that cannot shuffle.
    """
    if not shuffle:
        return packer
    if not dataclasses.is_dataclass(packer) or all(option.name != "shuffle" for option in dataclasses.fields(packer)):
        raise InputError(f"--shuffle does not act on the pack level {packer!r}; leave it out.")
    return dataclasses.replace(packer, shuffle=True)


def foresight_of(text: str) -> Any:
    """A foresight: exact, previous, step, or a text such as ``Noisy(0.2)``.

    Raises:
        InputError: none of them.
    """
    from foremoe.planner.parsing import parse
    from foremoe.problem.foresight import require_foresight

    value = parse(text) if "(" in text else text
    require_foresight(value)
    return value
