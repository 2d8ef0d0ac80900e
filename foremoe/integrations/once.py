"""Warnings about settings that have no effect: a process that makes several engines logs each of them once."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Logs a warning, the first time that this process has the message."""
    logger.warning(message)
