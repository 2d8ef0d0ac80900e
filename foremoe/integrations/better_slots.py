"""What another number of redundant slots would do for a job, said once in its log."""

from __future__ import annotations

import logging

from foremoe.advice.slots import SlotChoice, choose_slots
from foremoe.base.errors import InputError
from foremoe.base.threads import call_in_thread
from foremoe.problem.memory import gigabytes
from foremoe.problem.problem import Problem

_logger = logging.getLogger(__name__)


def say_better_slots(problem: Problem) -> None:
    """Logs what `better_slots` says of a planned problem, from a thread of its own, so that no stage waits for it."""
    if problem.cost.objective != "time":
        return  # who levels loads has not asked for seconds

    def say() -> None:
        try:
            choice = choose_slots(problem, num_threads=1)
        except InputError:  # advice is no reason to end a job
            return
        if sentence := better_slots(choice, problem):
            _logger.log(logging.WARNING if choice.redundant > problem.R else logging.INFO, sentence)

    call_in_thread(say, "choosing slots")


def better_slots(choice: SlotChoice, problem: Problem) -> str:
    """One sentence on the chosen number of slots beside the one that runs; empty where they are the same, or it was not tried."""
    tried = {option.redundant: option for option in choice.options}
    best, now = tried[choice.redundant], tried.get(problem.R)
    if now is None or best is now:
        return ""
    which = f"redundant={best.redundant} in place of {now.redundant}"
    memory = f"{gigabytes(best.buffer_bytes)} GB of buffers a rank in place of {gigabytes(now.buffer_bytes)}"
    change = best.stage_s / now.stage_s - 1.0 if now.stage_s else 0.0
    effect = f"{-change:.0%} shorter" if change < 0.0 else f"{change:.0%} longer"
    return f"{which} would make this {problem.stage} {effect}, for {memory} (simulated; {problem.cluster.standing})."
