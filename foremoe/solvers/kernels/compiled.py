"""`kernel`: numba's ``njit`` for functions that call each other across the files of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numba import njit


def kernel(function: Any) -> Any:
    """``njit(nogil=True, cache=True)`` whose disk cache is renewed when any file of this folder changes.

    Numba compares only the file that holds a function, and would go on running the callees it was compiled with.
    """
    dispatcher: Any = njit(nogil=True, cache=True)(function)
    file = getattr(dispatcher._cache, "_cache_file", None)
    if file is not None:  # numba's own; without it an edit needs the cache files to be deleted by hand
        file._source_stamp = _STAMP
    return dispatcher


def _stamp() -> tuple[tuple[float, int], ...]:
    stats = [path.stat() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return tuple((stat.st_mtime, stat.st_size) for stat in stats)


_STAMP = _stamp()
