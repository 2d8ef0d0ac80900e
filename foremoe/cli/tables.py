"""Tables of all commands. They show the most important columns that fit, all columns, or selected columns, or are CSV."""

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from foremoe.base.errors import InputError, did_you_mean
from foremoe.cli.terminal import wrapped

NONE = "-"
MOST_COLUMNS = 6
BEST, FAILING = "best", "failing"
_GAP = "  "
_NAME_SHARE = 0.35  # the names of lines may take this share of a terminal's width


class Unit(NamedTuple):
    """Units for a column of seconds or bytes. The column uses the first unit in which its largest value is below 10,000."""

    digits: int
    sizes: tuple[tuple[str, float], ...]

    def of(self, values: Sequence[float]) -> tuple[str, float]:
        """Returns the name and the size of the unit for these values."""
        largest = max(map(abs, values), default=0.0)
        return next((one for one in self.sizes if largest < 1e4 * one[1]), self.sizes[-1])


SECONDS = Unit(1, (("ms", 1e-3), ("s", 1.0)))
BYTES = Unit(1, (("MB", 1e6), ("GB", 1e9), ("TB", 1e12)))
GIGABYTES = Unit(2, (("GB", 1e9), ("TB", 1e12)))


class Column(NamedTuple):
    """A column: its heading, the format of its values, its importance and its meaning. The value None is shown as ``-``."""

    heading: str
    show: Callable[[Any], str] | Unit = str
    left: bool = False
    rank: int = 99  # columns with the largest ranks are left out first; those with rank 0 name a line and are always shown
    meaning: str = ""  # explanation, printed below the table if the column is shown


class Look(NamedTuple):
    """Options for the look of tables: whether to show all columns, selected columns, or CSV."""

    wide: bool = False
    columns: tuple[str, ...] = ()
    csv: bool = False

    def require(self, columns: Mapping[str, Column]) -> None:
        """Raises InputError if ``--columns`` names a column that the table lacks."""
        for name in self.columns:
            if name not in columns:
                raise InputError(f"--columns has no {name!r}; {did_you_mean(name, columns)}choose from {', '.join(columns)}.")


@dataclass(frozen=True, slots=True)
class Table:
    """A table to print, with the rows to write as JSON or CSV.

    Attributes:
        columns: Columns, keyed by their names in JSON. The parts of nested names are joined by dots (``bytes_by_link.peer``).
        lines: Values to print in each line, keyed by column name. If a name is missing, the cell is blank.
        figures: Rows of the JSON output. CSV prints all of them.
        tones: `BEST`, `FAILING` or None for every line. If `tones` is empty, no line is highlighted.
    """

    columns: Mapping[str, Column]
    lines: Sequence[Mapping[str, Any]]
    figures: Sequence[Mapping[str, Any]] = ()
    tones: Sequence[str | None] = ()


class Spread(float):
    """A mean with its standard deviation, shown as ``1.184 ± 0.012``."""

    def __new__(cls, mean: float, spread: float) -> Self:
        """Creates the number `mean` with the attribute ``spread``."""
        self = super().__new__(cls, mean)
        self.spread = spread
        return self

    spread: float


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens the nested mappings of a row. The parts of nested names are joined by dots."""
    out: dict[str, Any] = {}
    for name, value in row.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return out


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), first: Iterable[str] = ()) -> str:
    """Formats rows as CSV, with times in seconds and sizes in bytes. None is an empty cell, and a list is written as JSON.

    Args:
        columns: Names of the columns. If there are none, all columns are written, beginning with the columns in `first`.
    """
    lines = [flat(row) for row in rows]
    there = list(dict.fromkeys(name for line in lines for name in line))
    order = {name: i for i, name in enumerate(first)}
    names = list(columns) or sorted(there, key=lambda name: order.get(name, len(order)))
    # If a mapping is None in some row, `flat` gives this row a column with the mapping's name, which is left out.
    names = [name for name in names if columns or not any(other.startswith(f"{name}.") for other in names)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for line in lines:
        values = [line.get(name) for name in names]
        writer.writerow([json.dumps(value) if isinstance(value, list) else value for value in values])
    return out.getvalue()


class _Cells(NamedTuple):
    """One column as text, without a limit on its width."""

    heading: str
    texts: list[str]
    left: bool

    @property
    def width(self) -> int:
        return max(map(len, (self.heading, *self.texts)))


def _cells(name: str, column: Column, lines: Sequence[Mapping[str, Any]]) -> _Cells:
    heading, show = column.heading, column.show
    if isinstance(show, Unit):
        suffix, size = show.of([line[name] for line in lines if line.get(name) is not None])
        heading, show = f"{heading} {suffix}", number(show.digits, 1.0 / size)
    return _Cells(heading, [_text(line[name], show) if name in line else "" for line in lines], column.left)


def _text(value: Any, show: Callable[[Any], str]) -> str:
    if value is None:
        return NONE
    return f"{show(value)} ± {show(value.spread)}" if isinstance(value, Spread) else show(value)


def render(table: Table, look: Look = Look(), width: int | None = None) -> list[tuple[str, str | None]]:  # noqa: B008
    """Returns the lines of the table, each with its tone.

    Args:
        look: Selects the columns. By default, the `MOST_COLUMNS` most important columns are shown, or fewer if they do not fit.
        width: Width of the terminal, or None for no limit. Selected columns beyond the width are printed in further blocks, each
            with the names of the lines.
    """
    columns = table.columns
    cells = {name: _cells(name, column, table.lines) for name, column in columns.items()}
    names = [name for name, column in columns.items() if column.rank == 0]
    limit = None if width is None else max(12, int(_NAME_SHARE * width))
    widths = {name: of.width if limit is None or not of.left else min(of.width, limit) for name, of in cells.items()}
    wished = [name for name in look.columns if name in columns]  # names that are missing here may belong to a second table
    if wished:
        chosen = [*names, *(name for name in wished if name not in names)]
    elif look.wide:
        chosen = list(columns)
    else:
        blank = {name for name, of in cells.items() if not {*of.texts} - {"", NONE}}
        ranked = sorted(columns, key=lambda name: (name in blank, columns[name].rank))
        important = _most_important(ranked, names, widths, width)
        chosen = [name for name in columns if name in important]
    left_out = len(columns) - len(chosen)
    out: list[tuple[str, str | None]] = []
    for part in _parts(chosen, names, widths, width):
        out += [("", None)] * bool(out) + _block([cells[name] for name in part], [widths[name] for name in part], table.tones)
    if left_out and not wished:
        hint = f"({plural(left_out, 'more column')}: --wide, --columns NAME,NAME or --csv)"
        out += [(line, None) for line in wrapped(hint, width, "")]
    told = [f"{columns[name].heading}: {columns[name].meaning}" for name in chosen if columns[name].meaning]
    return out + [(line, None) for text in ("", *told) for line in wrapped(text, width)] if told else out


def _most_important(ranked: Sequence[str], names: list[str], widths: Mapping[str, int], width: int | None) -> set[str]:
    chosen = set(names)
    for name in ranked:
        needed = sum(widths[other] + len(_GAP) for other in chosen) + widths[name]
        if name not in chosen and len(chosen) < MOST_COLUMNS and (width is None or needed <= width):
            chosen.add(name)
    return chosen


def _parts(chosen: Sequence[str], names: Sequence[str], widths: Mapping[str, int], width: int | None) -> list[list[str]]:
    """Splits the chosen columns into blocks that fit the width. Each block has the columns that name the lines."""
    heads = [name for name in chosen if name in names]
    parts = [list(heads)]
    for name in chosen:
        if name in heads:
            continue
        needed = sum(widths[other] + len(_GAP) for other in parts[-1]) + widths[name]
        if width is not None and needed > width and len(parts[-1]) > len(heads):
            parts.append(list(heads))
        parts[-1].append(name)
    return parts


def _block(part: Sequence[_Cells], widths: Sequence[int], tones: Sequence[str | None]) -> list[tuple[str, str | None]]:
    out: list[tuple[str, str | None]] = []
    num_lines = len(part[0].texts)
    lines = [[of.heading for of in part], *([of.texts[i] for of in part] for i in range(num_lines))]
    for texts, tone in zip(lines, [None, *(tones or [None] * num_lines)], strict=True):
        # Text that does not fit its column continues in the lines below.
        rows = [[text] if len(text) <= size else _folded(text, size) for text, size in zip(texts, widths, strict=True)]
        for shown in itertools.zip_longest(*rows, fillvalue=""):
            padded = [
                text.ljust(size) if of.left else text.rjust(size) for text, size, of in zip(shown, widths, part, strict=True)
            ]
            out.append((_GAP.join(padded).rstrip(), tone))
    return out


def _folded(text: str, size: int) -> list[str]:
    """Splits text into lines of at most `size` characters, if possible after a space, comma, bracket or equals sign."""
    lines = [""]
    for part in re.findall(r"[^ ,(=]*[ ,(=]*", text):
        if len(lines[-1]) + len(part.rstrip()) > size and lines[-1].strip():
            lines.append("  ")
        lines[-1] += part
        while len(lines[-1].rstrip()) > size:  # the line is a single word that is longer than the column
            lines[-1:] = [lines[-1][:size], f"  {lines[-1][size:]}"]
    return [line.rstrip() for line in lines if line.strip()]


def number(digits: int, factor: float = 1.0) -> Callable[[Any], str]:
    """Returns a function that formats a number times `factor`, with `digits` decimals and separated thousands."""
    return lambda value: f"{value * factor:,.{digits}f}"


def count(value: float) -> str:
    """Formats a whole number without decimals, and a mean of whole numbers with one decimal."""
    return f"{value:,.{0 if float(value).is_integer() else 1}f}"


def percent(value: float) -> str:
    """Formats a share as a percentage."""
    return f"{value:.2%}"


def seconds(value: float) -> str:
    """Formats a time in seconds, such as ``0.4 ms``, ``17.7 ms`` or ``174 s``."""
    return f"{value * 1e3:,.1f} ms" if value < 1.0 else f"{value:.2f} s" if value < 100.0 else f"{value:,.0f} s"


def plural(count: int, noun: str) -> str:
    """Formats a number with its noun, such as ``1 rank``, ``2 ranks`` or ``4,096 tokens``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
