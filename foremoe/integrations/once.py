"""Warnings about settings that have no effect. Each is logged once per process, even if the process creates several engines."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Logs a warning, unless this process has logged the same message before."""
    logger.warning(message)
