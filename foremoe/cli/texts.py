"""Parsers of option values: seconds, lists, ranges, solvers, and kinds of foresight."""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from foremoe.base.errors import InputError, did_you_mean
from foremoe.base.extensions import entry_point_names
from foremoe.levels import PackSolver
from foremoe.planner.parsing import GROUP
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES, resolve
from foremoe.problem.foresight import FORESIGHTS, Foresight, Noisy, Rerouted
from foremoe.simulate.systems import BALANCED

# Exact solvers take seconds per row, so they run only if the user asks for them.
DEFAULT = tuple(name for name in STRATEGIES if name != "exact")


class Seconds(click.FloatRange):
    """Option type for a positive number of seconds."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(0, 1e6, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the time in seconds, or fails with a one-sentence message."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds above 0.", param, ctx)
        return float(seconds)


def split_list(texts: tuple[str, ...], option: str) -> list[str]:
    """Splits the values of a repeatable option at commas outside brackets and quotes."""
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


def is_count(text: str) -> bool:
    """Returns True if `text` is a whole number of at most nine digits."""
    return text.isascii() and text.isdigit() and len(text) <= 9


def whole_numbers(texts: tuple[str, ...], option: str) -> list[int]:
    """Returns the items of a list option as whole numbers of at least 0."""
    items = split_list(texts, option)
    for item in items:
        if not is_count(item):
            raise InputError(f"{option} needs whole numbers of at least 0 such as 0,1,2,4; got {item!r}.")
    return [int(item) for item in items]


def layer_range(text: str, num_layers: int) -> range:
    """Parses a range of layers ``A:B``. Either end may be missing."""
    first, colon, end = (part.strip() for part in text.partition(":"))
    if colon and all(not part or is_count(part) for part in (first, end)):
        chosen = range(int(first or 0), int(end or num_layers))
        if len(chosen) and chosen.stop <= num_layers:
            return chosen
    raise InputError(f"--layers {text!r} is not a range of the {num_layers} layers; write A:B, for example 0:{num_layers}.")


def planners_of(names: Sequence[str]) -> dict[str, Planner]:
    """Returns the planners to compare, in the order of `STRATEGIES`. If `names` is empty, returns the planners in `DEFAULT`."""
    chosen = names or list(DEFAULT)
    ordered = [*(name for name in STRATEGIES if name in chosen), *(name for name in chosen if name not in STRATEGIES)]
    return {name: planner_of(name, guard=False) for name in ordered}


def planner_of(text: str, shuffle: bool = False, guard: bool = True) -> Planner:
    """Returns the planner that `text` gives as a strategy, an expression or an object in a module. `shuffle` is ``--shuffle``."""
    # The path of an installed command begins with the command's folder, but module:name refers to the current folder.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if text.strip() == BALANCED:
        raise InputError(f"{BALANCED} is even routing, not a strategy; read the column `of balanced`, or use `foremoe simulate`.")
    require_known(text.strip(), [*STRATEGIES, *entry_point_names(GROUP)], "strategy")
    try:
        planner = resolve(text, guard=guard)
    except InputError:
        raise
    except Exception as error:
        # module:name runs code of other packages, which may fail in any way.
        raise InputError(f"{text!r} cannot be used as a solver: {type(error).__name__}: {error}.") from error
    return planner.using(packer_of(planner.pack, shuffle)) if shuffle else planner


def require_known(name: str, names: Sequence[str], what: str) -> None:
    """Raises InputError for an unknown name that resembles a known name. All other unknown names are refused elsewhere."""
    meant = "" if name in names or ":" in name or "(" in name else did_you_mean(name, names)
    if meant:
        raise InputError(f"there is no {what} {name!r}; {meant}the names are {', '.join(names)}.")


def packer_of(packer: PackSolver, shuffle: bool) -> PackSolver:
    """Returns the pack level. With ``--shuffle``, it shuffles the sequences first."""
    if not shuffle:
        return packer
    if not dataclasses.is_dataclass(packer) or all(option.name != "shuffle" for option in dataclasses.fields(packer)):
        raise InputError(f"--shuffle does not act on the pack level {packer!r}; leave it out.")
    return dataclasses.replace(packer, shuffle=True)


def in_options(note: str) -> str:
    """Returns a note from the library, in which the command line's option replaces the name of the Python argument."""
    return note.replace("history_LE", "history (--history TRACE)")


_KINDS = {"rerouted": Rerouted, "noisy": Noisy}


def foresight_of(text: str) -> Foresight:
    """Parses a kind of foresight: exact, previous, step, ``rerouted=SHARE`` or ``noisy=DRIFT``."""
    kind, equals, amount = text.partition("=")
    if equals and kind in _KINDS:
        try:
            number = float(amount)
        except ValueError:
            raise InputError(f"{text!r} needs a number after its =; got {amount!r}.") from None
        return _KINDS[kind](number)
    if text not in FORESIGHTS:
        names = [*FORESIGHTS, *(f"{name}=" for name in _KINDS)]
        meant = did_you_mean(re.split(r"[(=]", text)[0], names)
        raise InputError(f"there is no foresight {text!r}; {meant}it is {', '.join(FORESIGHTS)}, rerouted=SHARE or noisy=DRIFT.")
    return text
