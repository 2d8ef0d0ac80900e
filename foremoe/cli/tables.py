"""Plain text tables: columns as wide as their content, numbers to the right, too wide tables in parts."""

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

NONE = "-"


class Column(NamedTuple):
    """One column: its heading, and how a value becomes text (None becomes ``-``)."""

    heading: str
    show: Callable[[Any], str] = str
    left: bool = False


def render(columns: Sequence[Column], rows: Sequence[Sequence[Any]], width: int | None = None) -> str:
    """The table as lines; a row that is shorter than the columns leaves the rest blank.

    Columns beyond `width` (default: the terminal's; no limit elsewhere) follow below, after the first one again, so that no
    terminal breaks a line inside a number.
    """
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    cells = [[NONE if value is None else column.show(value) for column, value in zip(columns, row, strict=False)] for row in rows]
    lines = [[column.heading for column in columns], *(row + [""] * (len(columns) - len(row)) for row in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    parts: list[list[int]] = [[0]]
    for i in range(1, len(columns)):
        if width is not None and len(parts[-1]) > 1 and sum(widths[j] + 2 for j in parts[-1]) + widths[i] > width:
            parts.append([0])
        parts[-1].append(i)
    pad = [str.ljust if column.left else str.rjust for column in columns]
    return "\n\n".join(
        "\n".join("  ".join(pad[i](line[i], widths[i]) for i in part).rstrip() for line in lines) for part in parts
    )


def number(digits: int, factor: float = 1.0) -> Callable[[Any], str]:
    """Shows a number times `factor` with `digits` decimals: seconds as milliseconds, bytes as megabytes."""
    return lambda value: f"{value * factor:.{digits}f}"


def percent(value: float) -> str:
    """Shows a share as per cent."""
    return f"{value:.2%}"


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
