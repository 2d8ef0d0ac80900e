"""Formats values as HTML tables for notebooks, and times as text."""

import dataclasses
import html
from collections.abc import Mapping
from typing import Any

import numpy as np

_LONGEST = 120  # maximum characters of a field
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def table(caption: str, figures: Mapping[str, str]) -> str:
    """Returns an HTML table with the caption and a line for each figure."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in figures.items()
    )
    return f"<table><caption>{html.escape(caption)}</caption>{cells}</table>"


def fields(value: Any) -> str:
    """Returns a `table` of a dataclass instance. It shows dtype and shape of arrays, and the shortened `repr` of other fields."""
    shown = {field.name: _text(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return table(type(value).__name__, shown)


def seconds_words(value: float) -> str:
    """Returns a time given in seconds as text with three digits and a unit."""
    factor, unit = next(((f, u) for f, u in _UNITS if value >= f), _UNITS[-1])
    number = value / factor
    return f"{number:.0f} {unit}" if number >= 100 or value == 0 else f"{number:#.3g} {unit}"


def _text(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
