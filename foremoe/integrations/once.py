"""Logs warnings about settings without effect once per process, even if it makes several engines."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Logs a warning the first time that this process has the message."""
    logger.warning(message)
