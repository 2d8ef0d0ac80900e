"""Whether torchrun, or a launcher that sets its variables, started this process as one of several ranks. Needs no torch."""

from __future__ import annotations

import os

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


def under_torchrun() -> bool:
    """All that joining the other ranks takes is in the environment; what a scheduler leaves behind in part is not enough."""
    found = [os.environ.get(name, "") for name in _NUMBERS]
    if not os.environ.get("MASTER_ADDR") or not all(text.isascii() and text.isdigit() and len(text) <= 9 for text in found):
        return False
    rank, size = int(found[0]), int(found[1])
    return size > 1 and rank < size
