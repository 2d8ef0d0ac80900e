"""Terminal features: width, line wrapping and colour."""

import io
import os
import sys
import textwrap
from typing import Any

_UNKNOWN_WIDTH, _NARROWEST = 80, 20


def width(stream: Any = None) -> int | None:
    """Returns the width of the terminal to which `stream` writes, in columns. `stream` defaults to stdout.

    Returns None if `stream` is a file or a pipe, because lines are not wrapped there.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return None
    told = os.environ.get("COLUMNS", "")
    try:
        columns = int(told) if told.isascii() and told.isdigit() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, io.UnsupportedOperation):
        columns = 0
    return max(columns or _UNKNOWN_WIDTH, _NARROWEST)


def has_colour() -> bool:
    """Returns True if stdout is a colour terminal and the user has not disabled colour (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def wrapped(line: str, columns: int | None, indent: str = "  ") -> list[str]:
    """Wraps a line at words, to at most `columns` characters. Longer words are not broken, so that users can copy them."""
    if columns is None or len(line) <= columns:
        return [line]
    return textwrap.wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
