"""Third-party solvers and backends, which are found through entry points if foremoe has no built-in one with the name."""

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from foremoe.base.errors import InputError


def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value))}


def entry_point_names(group: str) -> list[str]:
    """Returns the sorted names that installed packages register under `group`, without importing them."""
    return list(_found(group))


def entry_point_of(group: str, name: str) -> str | None:
    """Returns the name of the entry point `name` or, if there is none, of the first one whose object has this name.

    The object is not imported. Returns None if neither exists.
    """
    found = _found(group)
    return name if name in found else next((point.name for point in found.values() if point.attr == name), None)


@functools.cache
def load_entry_point(group: str, name: str) -> Any:
    """Imports and returns the object that is registered as `name`."""
    point = _found(group)[name]
    try:
        return point.load()
    except Exception as error:
        raise InputError(f"{group} entry point {name} ({point.value}) cannot be loaded: {error}.") from None
