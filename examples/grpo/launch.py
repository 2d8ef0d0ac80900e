"""Starting the ranks of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.grpo.settings import Settings
from foremoe.distributed.launch import start_ranks


def launch(settings: Settings, *, num_ranks: int, num_steps: int, redundant: int | None, pages: Path | None) -> dict[str, Any]:
    """Runs the demo on `num_ranks` processes of this machine and returns its figures.

    Raises:
        TransferError: A rank failed or died; the others are ended.
    """
    figures: dict[str, Any] = start_ranks(_rank, (settings, num_steps, redundant, pages), num_ranks, "demo")[0]
    return figures


def _rank(settings: Settings, num_steps: int, redundant: int | None, pages: Path | None) -> dict[str, Any]:
    from examples.grpo.worker import run

    return run(settings, num_steps, redundant, pages)
