"""Logs once per job if another number of redundant slots would be better."""

from __future__ import annotations

import logging

from foremoe.advice.slots import SlotChoice, choose_slots
from foremoe.base.errors import InputError
from foremoe.base.threads import call_in_thread
from foremoe.problem.memory import gigabytes
from foremoe.problem.problem import Problem

_logger = logging.getLogger(__name__)


class SlotAdvice:
    """Logs the result of `better_slots` for the first update that is planned for time."""

    def __init__(self) -> None:
        self._said = False

    def say(self, problem: Problem | None) -> None:
        """Takes a planned problem, or None; logs from a separate thread, so that no stage waits for it."""
        # Who levels loads has not asked for seconds.
        if self._said or problem is None or problem.stage != "update" or problem.cost.objective != "time":
            return
        self._said = True
        call_in_thread(lambda: _say(problem), "choosing slots")


def _say(problem: Problem) -> None:
    try:
        choice = choose_slots(problem, num_threads=1)
    except InputError:  # advice is no reason to end a job
        return
    if sentence := better_slots(choice, problem):
        _logger.log(logging.WARNING if choice.redundant > problem.R else logging.INFO, sentence)


def better_slots(choice: SlotChoice, problem: Problem) -> str:
    """Compares the chosen number of slots with the current one in a sentence; empty if they are equal, or it was not tried."""
    tried = {option.redundant: option for option in choice.options}
    best, now = tried[choice.redundant], tried.get(problem.R)
    if now is None or best is now:
        return ""
    which = f"redundant={best.redundant} in place of {now.redundant}"
    memory = f"{gigabytes(best.buffer_bytes)} GB of buffers a rank in place of {gigabytes(now.buffer_bytes)}"
    change = best.stage_s / now.stage_s - 1.0 if now.stage_s else 0.0
    effect = "no longer" if abs(change) < 0.005 else f"{-change:.0%} shorter" if change < 0.0 else f"{change:.0%} longer"
    return f"{which} would make this {problem.stage} {effect}, for {memory} (simulated; {problem.cluster.standing})."
