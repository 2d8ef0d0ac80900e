"""Plain text tables: columns as wide as their content, numbers to the right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

NONE = "-"


class Column(NamedTuple):
    """One column: its heading, and how a value becomes text (None becomes ``-``)."""

    heading: str
    show: Callable[[Any], str] = str
    left: bool = False


def render(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> str:
    """The table as lines; a row that is shorter than the columns leaves the rest blank."""
    cells = [[NONE if value is None else column.show(value) for column, value in zip(columns, row, strict=False)] for row in rows]
    headings = [column.heading for column in columns]
    lines = [headings, *(row + [""] * (len(columns) - len(row)) for row in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    pad = [str.ljust if column.left else str.rjust for column in columns]
    return "\n".join("  ".join(p(cell, w) for p, cell, w in zip(pad, line, widths, strict=True)).rstrip() for line in lines)


def number(digits: int) -> Callable[[Any], str]:
    """Shows a number with `digits` decimals."""
    return lambda value: f"{value:.{digits}f}"


def scaled(factor: float, digits: int) -> Callable[[Any], str]:
    """Shows a number times `factor` with `digits` decimals: seconds as milliseconds, bytes as megabytes."""
    return lambda value: f"{value * factor:.{digits}f}"


def percent(value: float) -> str:
    """Shows a share as per cent."""
    return f"{value:.2%}"


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
