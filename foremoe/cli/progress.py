"""Progress on stderr: a bar on a terminal, one plain line per task elsewhere."""

import sys
from typing import Any, Self

import click

from foremoe.base.errors import printable


class Progress:
    """Call it with (task, done, total). It never writes to stdout, and nothing that it shows is a result.

    Use as a context manager: leaving it clears the bar, also after an error.
    """

    def __init__(self, verb: str = "planning") -> None:
        self.verb, self.task = verb, ""
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def __call__(self, task: str, done: int, total: int) -> None:
        """Shows that `done` of `total` are finished."""
        if task != self.task:
            self._clear()
            self.task = task
            if not sys.stderr.isatty():
                click.echo(f"{self.verb}: {task}", err=True)
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = click.progressbar(length=total, label=task[:40], file=sys.stderr)
            self._bar.update(done - self._bar.pos)
        if done >= total:
            self._clear()

    def note(self, text: str) -> None:
        """One line that stays."""
        self._clear()
        click.echo(printable(text), err=True)

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar = None
            click.echo("\r\033[K\033[?25h", err=True, nl=False, color=True)  # empties the line, shows the cursor
