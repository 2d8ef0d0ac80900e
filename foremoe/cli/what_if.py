"""``foremoe simulate --what-if``: lower precision on overloaded ranks, and several jobs in turns on the same GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foremoe.base.errors import InputError
from foremoe.cli.tables import SECONDS, Column, Table, flat, number, percent, plural
from foremoe.cli.texts import amount_of, split_list
from foremoe.machine.trainer import Trainer
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.simulate.knowledge import planning_figures
from foremoe.simulate.systems import System
from foremoe.simulate.what_if import multiplexed

LOW_PRECISION, MULTIPLEX = "low-precision", "multiplex"
MAX_JOBS = 1000
TURNS = {
    "alone_s": Column("alone", SECONDS), "round_s": Column("round", SECONDS), "gain": Column("gain", number(2)),
    "vs_static": Column("x static", number(3)), "planning_s": Column("plan", SECONDS), "filling_s": Column("fill", SECONDS),
    "busy": Column("busy", percent),
}  # fmt: skip
TURN_COLUMNS = {"solver": Column("solver", left=True, rank=0)} | {f"{MULTIPLEX}.{key}": of for key, of in TURNS.items()}


class WhatIf(NamedTuple):
    """What the option asks; None where it says nothing."""

    low_precision: float | None = None
    jobs: int | None = None

    def systems(self, prefetch: int) -> dict[str, System]:
        """The line of static placement in lower precision, as ReaLB runs."""
        if self.low_precision is None:
            return {}
        system = System(planner=Planner(rank=()), prefetch=prefetch, low_precision=self.low_precision)
        return {f"{LOW_PRECISION}={self.low_precision:g}": system}


def what_if_of(texts: tuple[str, ...]) -> WhatIf:
    """Reads ``low-precision=SPEEDUP`` and ``multiplex=JOBS``."""
    found: dict[str, Any] = {}
    for text in split_list(texts, "--what-if") if texts else []:
        name, _, amount = text.partition("=")
        if name == LOW_PRECISION:
            found["low_precision"] = amount_of(text, amount)
        elif name == MULTIPLEX:
            jobs = amount_of(text, amount)
            if jobs not in range(1, MAX_JOBS + 1):
                raise InputError(f"--what-if {text!r} needs a whole number of jobs from 1 to {MAX_JOBS}.")
            found["jobs"] = int(jobs)
        else:
            raise InputError(f"--what-if {text!r} is unknown; give {LOW_PRECISION}=SPEEDUP or {MULTIPLEX}=JOBS.")
    return WhatIf(**found)


def add_turns(
    rows: Sequence[dict[str, Any]], systems: Mapping[str, System], groups: Sequence[Problem], trainer: Trainer, jobs: int
) -> None:
    """Adds ``multiplex`` to every row: the figures of `multiplexed`, and ``vs_static`` of the rounds."""
    static = next((row for row in rows if row["solver"] == "static"), None)
    if static is None and trainer.rollout_s is None:
        raise InputError("multiplex: a share of static's step lies outside; add static to --planners, or give seconds.")
    outside_s = trainer.outside_s(0.0 if static is None else static["simulated_stage_s"]) or 0.0
    for row in rows:
        if not row["n_solved"]:  # it refuses the case
            row[MULTIPLEX] = dict.fromkeys(TURNS)
            continue
        system = systems[row["solver"]]
        plans = not system.even and system.planner.rank != ()
        row |= planning_figures(row, system.planner.foresight if plans else None, groups)
        row[MULTIPLEX] = multiplexed(row, jobs, outside_s)
    static_s = None if static is None else static[MULTIPLEX]["round_s"]
    for turns in [row[MULTIPLEX] for row in rows]:
        turns["vs_static"] = None if static_s is None or turns["round_s"] is None else static_s / turns["round_s"]


def starred(row: Mapping[str, Any]) -> str:
    """The name of a line, with a star if it changes numerics and a plus if no engine runs it."""
    if row.get("executable") is False:
        return f"{row['solver']} +"
    return f"{row['solver']} *" if row["changes_numerics"] else str(row["solver"])


def turn_lines(rows: Sequence[Mapping[str, Any]], trainer: Trainer, jobs: int) -> list[str | Table]:
    """The table of `add_turns` and what a reader must know."""
    table = Table(TURN_COLUMNS, [flat(row) | {"solver": starred(row)} for row in rows])
    outside = f"{trainer.rollout_share:.0%} of static's step" if trainer.rollout_s is None else f"{trainer.rollout_s:g} s"
    return [
        f"what if {plural(jobs, 'such job')} took turns: one rolls out ({outside}, on GPUs of its own) while another trains",
        "", table, "",
        "alone: a step of one job with exposed planning; round: a step of every job; gain: steps per second, all over one alone",
        "plan, fill: what planning and filling host stores add to a round; busy: GPUs of training; loading jobs' states left out",
    ]  # fmt: skip
