"""Advice about the number of redundant slots and the homes. It is logged once per job if another choice would be better."""

from __future__ import annotations

import dataclasses
import logging

from foremoe.advice.changes import Case, experts_moved, stage_seconds
from foremoe.advice.slots import LEAST_GAIN, SlotChoice, choose_slots
from foremoe.base.errors import InputError
from foremoe.base.threads import call_in_thread
from foremoe.machine.trainer import Trainer
from foremoe.planner.planner import Planner
from foremoe.problem.memory import gigabytes
from foremoe.problem.problem import Problem
from foremoe.solvers.home.anneal import Anneal

_logger = logging.getLogger(__name__)

HOMES = Anneal(state_bytes=4.0)  # engines exchange weights when a stage begins, and float32 gradients when it ends


class SlotAdvice:
    """Logs the results of `better_slots` and `better_homes` for the first update that is planned for time."""

    def __init__(self) -> None:
        self._said = False

    def say(self, problem: Problem | None) -> None:
        """Takes a planned problem, or None. A separate thread computes and logs the advice, so that no stage waits for it."""
        # With the objective "balance", time does not matter.
        if self._said or problem is None or problem.stage != "update" or problem.cost.objective != "time":
            return
        self._said = True
        call_in_thread(lambda: _say(problem), "choosing slots")


def _say(problem: Problem) -> None:
    try:
        choice = choose_slots(problem, num_threads=1)
        slots, homes = better_slots(choice, problem), better_homes(choice)
    except InputError:  # failing advice must not end a job
        return
    if slots or homes:
        level = logging.WARNING if choice.redundant > problem.R or homes else logging.INFO
        _logger.log(level, f"{'; '.join(filter(None, (slots, homes)))} (simulated; {problem.cluster.standing}).")


def better_slots(choice: SlotChoice, problem: Problem) -> str:
    """Returns a sentence that compares the best number of slots with the current number, or an empty string.

    The string is empty if both numbers are equal or if the current number was not tried.
    """
    tried = {option.redundant: option for option in choice.options}
    best, now = tried[choice.redundant], tried.get(problem.R)
    if now is None or best is now:
        return ""
    which = f"redundant={best.redundant} in place of {now.redundant}"
    memory = f"{gigabytes(best.buffer_bytes)} GB of buffers a rank in place of {gigabytes(now.buffer_bytes)}"
    change = best.stage_s / now.stage_s - 1.0 if now.stage_s else 0.0
    effect = "no longer" if abs(change) < 0.005 else f"{-change:.0%} shorter" if change < 0.0 else f"{change:.0%} longer"
    return f"{which} would make this {problem.stage} {effect}, for {memory}"


def better_homes(choice: SlotChoice) -> str:
    """Returns a sentence about homes that save at least 1 % of the stage, including their exchange, or an empty string."""
    problem, trainer = choice.problem, Trainer()
    home_LE = Planner(home=HOMES).homes(problem, num_threads=1)
    now_s = next(option.stage_s for option in choice.options if option.redundant == choice.redundant)
    there, here = Case(dataclasses.replace(problem, home_LE=home_LE), trainer), Case(problem, trainer)
    gain = 1.0 - stage_seconds(there, here, num_threads=1, state_bytes=HOMES.state_bytes) / now_s if now_s else 0.0
    if gain < LEAST_GAIN:
        return ""
    which = f"homes by Anneal(state_bytes={HOMES.state_bytes:g}) for {experts_moved(problem, home_LE)} of {problem.E} experts"
    effect = f"would make this {problem.stage} {gain:.0%} shorter, if your loop calls moe.homes"
    return f"with R = {choice.redundant}, {which} of a layer {effect}"
