"""Progress on stderr: a bar that redraws itself on a terminal, one plain line per task elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

WIDTH = 30
REDRAW_S = 0.1


class Progress:
    """Call it with (task, done, total). It never writes to stdout, and nothing it shows is a result.

    Use as a context manager: leaving it clears the bar, also after an error.
    """

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.task: str | None = None
        self.drawn_at = 0.0
        self.shown = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clear()

    def __call__(self, task: str, done: int, total: int) -> None:
        """Shows that `done` of `total` rows of `task` are finished."""
        new, self.task = task != self.task, task
        if not self.terminal:
            if new:
                self._write(f"planning: {task}\n")
            return
        now = time.monotonic()
        if new or done >= total or now - self.drawn_at >= REDRAW_S:
            self.drawn_at = now
            share = done / total if total else 1.0
            bar = "#" * round(WIDTH * share)
            self._clear()
            line = f"{task[:40]} [{bar:<{WIDTH}}] {share:4.0%}"
            self._write(line)
            self.shown = len(line)

    def note(self, text: str) -> None:
        """One line that stays."""
        self._clear()
        self._write(f"{text}\n")

    def _clear(self) -> None:
        if self.shown:
            self._write("\r" + " " * self.shown + "\r")
            self.shown = 0

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
