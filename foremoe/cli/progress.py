"""Progress on stderr. On a terminal, one line is updated.

Elsewhere, every task prints one plain line, and so does every 20th second of compiling.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

import click

from foremoe.base.errors import printable
from foremoe.cli.terminal import width, wrapped

_TICK_S = 0.5
_PLAIN_S = 20.0  # between plain lines while kernels are compiled
_BAR = 10
# A rate from less work or time is a guess.
_LEAST_SHARE, _LEAST_S = 0.1, 5.0


class Progress:
    """Progress of a command, shown on stderr and never on stdout. Call the object with (task, done, total).

    As a context manager, it also shows the elapsed time and, once, that kernels are being compiled. Leaving the context clears
    the line, even after an error.

    Args:
        verb: Word that says what a task does, such as "planning".
        tasks: Expected number of tasks, or None if it is unknown. May be set later.
        tells: Whether to print a note when kernels are compiled.
    """

    def __init__(self, verb: str = "planning", tasks: int | None = None, *, tells: bool = True) -> None:
        self.verb, self.tasks, self.tells = verb, tasks, tells
        self.task, self.share, self.num_done = "", 0.0, 0
        self._begin_s = self._task_begin_s = time.monotonic()
        self._num_compiled, self._compile_s = 0, _never
        self._live = sys.stderr.isatty()
        self._lock, self._over, self._inside = threading.RLock(), threading.Event(), contextlib.ExitStack()

    def __enter__(self) -> Self:
        from foremoe.base.compiled import compile_seconds, watch_compilation

        begin_s = compile_seconds()[0]
        self._compile_s = lambda: compile_seconds()[0] - begin_s
        self._inside.enter_context(watch_compilation(self._compiled))
        if self._live:
            self._draw()
        ticker = threading.Thread(target=self._tick, daemon=True)
        self._inside.callback(ticker.join)
        self._inside.callback(self._over.set)
        ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()
        self._clear()

    def __call__(self, task: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of `task` are finished."""
        with self._lock:
            if task != self.task:
                self.num_done += int(bool(self.task) and self.share < 1.0)
                self.task, self.share = task, 0.0
                self._task_begin_s = time.monotonic() - self._compile_s()
                if not self._live:
                    click.echo(f"{self.verb}: {task}{self._count()}", err=True)
            share = 1.0 if done >= total else done / total
            self.num_done += int(share == 1.0 and self.share < 1.0)
            self.share = share
            if self._live:
                self._draw()
                if share == 1.0 and not self.tasks:  # no later call may clear the line
                    self._clear()

    def within(self, task: str) -> Callable[[str, int, int], None]:
        """Returns a progress callback that reports all tasks given to it as parts of `task`."""
        return lambda _, done, total: self(task, done, total)

    def note(self, text: str) -> None:
        """Prints one line that stays on the screen."""
        with self._lock:
            self._clear()
            click.echo("\n".join(wrapped(printable(text), width(sys.stderr))), err=True)

    def status(self, now_s: float) -> str:
        """Returns the text of the line, with the task last, because narrow terminals cut the end of the line.

        The bar and the remaining time cover all tasks if their number is known. The rate excludes the time of compilation.
        """
        words = [f"{clock(now_s - self._begin_s)} elapsed"]
        worked_s = now_s - self._compile_s() - (self._begin_s if self.tasks else self._task_begin_s)
        share = min((self.num_done + self.share % 1.0) / self.tasks, 1.0) if self.tasks else self.share
        if _LEAST_SHARE <= share < 1.0 and worked_s >= _LEAST_S:
            words.append(f"about {clock(worked_s / share - worked_s)} left")
        if 0.0 < share < 1.0:
            words.append(f"[{'#' * int(_BAR * share):-<{_BAR}}] {share:.0%}")
        if self._num_compiled and not self.num_done:
            words.append(f"{self._num_compiled} kernels compiled")
        # The work after a task (checks, a simulation, preparing the next task) does not report its progress.
        verb = "finishing" if self.share == 1.0 else self.verb
        words.append(f"{verb} {self.task}{self._count()}" if self.task else "preparing")
        return ", ".join(words)

    def _count(self) -> str:
        return f" ({min(self.num_done + (self.share < 1.0), self.tasks)} of {self.tasks})" if self.tasks else ""

    def _compiled(self, _: str) -> None:
        from foremoe.base.compiled import COMPILING

        with self._lock:
            if self.tells and not self._num_compiled:
                self.note(COMPILING if self._live else f"{self.verb}: {COMPILING}")
            self._num_compiled += 1

    def _tick(self) -> None:
        compiled_s = 0.0
        while not self._over.wait(_TICK_S if self._live else _PLAIN_S):
            with self._lock:
                if self._live:
                    self._draw()
                elif self._compile_s() - compiled_s > _PLAIN_S / 2:
                    gone = clock(time.monotonic() - self._begin_s)
                    click.echo(f"{self.verb}: {self._num_compiled} kernels compiled so far, {gone} elapsed", err=True)
                compiled_s = self._compile_s()

    def _draw(self) -> None:
        line = printable(self.status(time.monotonic()))[: (width(sys.stderr) or 80) - 1]
        click.echo(f"\r\033[K{line}", err=True, nl=False, color=True)

    def _clear(self) -> None:
        if self._live:
            click.echo("\r\033[K", err=True, nl=False, color=True)


def _never() -> float:
    return 0.0


def clock(seconds: float) -> str:
    """Formats seconds: ``0:07``, ``12:34``, ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
