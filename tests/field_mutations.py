"""Ways to change any one field of a frozen value, at boundary values, whether the result can be made or not."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from types import NoneType
from typing import Any

import numpy as np

Path = tuple[str, ...]

# Of a plan: text for people, and numbers that callers choose.
FREE = {
    ("header", "planner"),
    ("header", "foremoe"),
    ("header", "key", "step"),
    ("header", "key", "mini_batch"),
    ("header", "key", "ep_group"),
}

# Scalars of a wrong type or out of any range; what a field has itself is left out.
SCALARS = (None, True, False, -1, 0, 1, 7, 2**31 - 1, 2**63, 1.5, -1e300, float("inf"), float("nan"), "", "1", "nodes", (), (-1,))
DTYPES = (np.float64, np.int64, np.int16, np.uint8, np.bool_, np.str_, object)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every field of a dataclass value and of those in it, as (path, content)."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from leaves(inner, (*path, field.name))
        else:
            yield (*path, field.name), inner


def paths(kind: type, path: Path = ()) -> Iterator[Path]:
    """The paths of `leaves`, from types alone: of a union the first counts, and what may be absent is a leaf."""
    hints = typing.get_type_hints(kind)
    for name in (field.name for field in dataclasses.fields(kind)):
        kinds = typing.get_args(hints[name]) or (hints[name],)
        if dataclasses.is_dataclass(kinds[0]) and NoneType not in kinds:
            yield from paths(kinds[0], (*path, name))
        else:
            yield (*path, name)


def replaced(value: Any, path: Path, content: Any) -> Any:
    """The value with another content of one field; its own checks may refuse it."""
    if len(path) > 1:
        content = replaced(getattr(value, path[0]), path[1:], content)
    return dataclasses.replace(value, **{path[0]: content})


def changed(content: Any, rng: np.random.Generator) -> Any:
    """Another content for a field that has this one."""
    if not isinstance(content, np.ndarray):
        near = [content + 1, content - 1, content * 1000] if isinstance(content, int | float) else []
        return _one_of([*SCALARS, *near], rng)
    if rng.random() < 0.8 and content.size:
        return _one_entry(content, rng)
    shapes = [
        content[1:],
        content[..., :-1],
        content[None],
        content.ravel(),
        content[:0],
        content[::-1],
        np.repeat(content, 2, 0),
    ]
    return _one_of([*shapes, *(content.astype(kind) for kind in DTYPES), None, content.tolist(), content * 2], rng)


def _one_entry(content: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The array with one entry at a boundary, near what it was, another's, or traded."""
    found, at = content.copy(), tuple(int(rng.integers(n)) for n in content.shape)
    other = tuple(int(rng.integers(n)) for n in content.shape)
    own = found[at]
    if found.dtype.kind == "f":
        found[at] = _one_of(
            [0.0, -1.0, -own, own * 1000, own * 1.01, own / 1000, np.inf, -np.inf, np.nan, 1e300, found[other]], rng
        )
    elif found.dtype.kind == "b":
        found[at] = ~own
    elif rng.random() < 0.15:
        found[at], found[other] = found[other], own
    else:
        info = np.iinfo(found.dtype)
        near = [int(own) + step for step in (-2, -1, 1, 2)] + [-1, 0, 1, int(found[other]), int(found.max()) + 1]
        found[at] = _one_of([info.min, info.max, *(n for n in near if info.min <= n <= info.max)], rng)
    return found


def _one_of(values: list[Any], rng: np.random.Generator) -> Any:
    return values[int(rng.integers(len(values)))]
