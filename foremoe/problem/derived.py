"""What a problem works out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Derived:
    """Room for what a problem works out once; no field, so copies and files leave it out."""

    __slots__ = ("_counts", "_rates", "_row_times")

    def once(self, slot: str, make: Callable[[], T]) -> T:
        """What `make` returns, made at the first call and kept in `slot`."""
        if not hasattr(self, slot):
            object.__setattr__(self, slot, make())
        kept: T = getattr(self, slot)
        return kept
