"""Precisions of GEMMs, with the figures of a preset that differ from its figures for bf16."""

from collections.abc import Mapping
from typing import Any

from foremoe.base.errors import InputError

# Precision of a preset's own figures. For another precision, the preset has a table of the figures that differ.
DEFAULT = "bf16"


def at_precision(table: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Returns a preset's table with the figures for `precision`, without the tables for other precisions.

    Raises:
        InputError: The preset has no figures for this precision.
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
