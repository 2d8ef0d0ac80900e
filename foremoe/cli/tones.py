"""Chooses the lines of a table to highlight."""

from collections.abc import Mapping, Sequence
from typing import Any

from foremoe.cli.tables import BEST, FAILING


def tones(rows: Sequence[Mapping[str, Any]], gain: str) -> list[str | None]:
    """Returns `FAILING` for rows that do not fit into memory, and `BEST` for the fitting row with the largest gain."""
    fitting = [row[gain] for row in rows if row.get(gain) is not None and row.get("fits", True)]
    best = max(fitting, default=None)
    return [
        FAILING if row.get("fits") is False else BEST if best is not None and row.get(gain) == best and len(fitting) > 1 else None
        for row in rows
    ]
