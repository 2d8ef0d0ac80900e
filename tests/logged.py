"""What foremoe logs in this process while a block runs."""

import contextlib
import logging


@contextlib.contextmanager
def logged(level=logging.WARNING):
    """The records, as they come: of this level and above, of all of foremoe's modules."""
    found = []
    handler, logger = logging.Handler(), logging.getLogger("foremoe")
    handler.emit = found.append
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
