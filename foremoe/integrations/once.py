"""Warnings about settings without effect, logged once per process even if it creates several engines."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Logs a warning, unless this process has logged the same message before."""
    logger.warning(message)
