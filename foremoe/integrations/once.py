"""Warnings about settings that have no effect: a process that makes several engines says each of them once."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str) -> None:
    """Warns, the first time that this process has the message."""
    warnings.warn(message, stacklevel=2)
