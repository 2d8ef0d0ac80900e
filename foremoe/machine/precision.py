"""Precisions of GEMMs: what of a preset differs where they do not run in bf16."""

from collections.abc import Mapping
from typing import Any

from foremoe.base.errors import InputError

# The precision of a preset's own figures; another one is a table of the figures that differ.
DEFAULT = "bf16"


def at_precision(table: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """A preset's table with the figures of `precision`, and without the tables of the others.

    Raises:
        InputError: The preset has no such precision.
    """
    others = {key: value for key, value in table.items() if isinstance(value, dict)}
    plain = {key: value for key, value in table.items() if key not in others}
    key = precision.strip().lower() if isinstance(precision, str) else ""
    if key == DEFAULT:
        return plain
    if key not in others:
        known = ", ".join((DEFAULT, *others))
        raise InputError(f"the cluster preset {table['name']} has no precision {precision!r}; choose one of {known}.")
    return plain | others[key] | {"precision": key}
