"""`simulate_pipeline`: simulates the ranks of a pipeline and their mutual waits. Each rank has a plan of its own layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase, Schedule
from foremoe.simulate.result import Simulation
from foremoe.simulate.stage import StageRun

# Letters: L layers, X passes, M micro-steps.


class PipelineRank(NamedTuple):
    """The problem and the plan of the layers on one pipeline rank."""

    problem: Problem
    plan: Plan


def pipeline_problems(problem: Problem, pp: int, vpp: int = 1) -> list[Problem]:
    """Splits a problem over pipeline ranks with a 1F1B or interleaved schedule. Each rank has `vpp` chunks of contiguous layers.

    Raises:
        InputError: There are more chunks than layers, or an interleaved schedule does not allow this number of micro-steps.
    """
    if pp < 1 or vpp < 1 or pp * vpp > problem.L:
        raise InputError(f"PP{pp} with VPP{vpp} needs {pp * vpp} layers; the problem has {problem.L}.")
    chunks = np.array_split(np.arange(problem.L), pp * vpp)
    trains, reforward = problem.schedule.trains, problem.schedule.reforward
    out = []
    for rank in range(pp):
        mine = [chunks[v * pp + rank] for v in range(vpp)]
        if vpp == 1:
            schedule = Schedule.one_f_one_b(problem.M, pp, rank, reforward)
        else:
            chunk_L = np.repeat(np.arange(vpp), [len(chunk) for chunk in mine])
            schedule = replace(Schedule.interleaved(problem.M, pp, vpp, rank, reforward), chunk_L=chunk_L)
        if not trains:
            schedule = schedule.without_backward()
        out.append(problem.layers(np.concatenate(mine).tolist(), schedule))
    return out


def on_pipeline(problem: Problem, pp: int, vpp: int = 1) -> list[Problem]:
    """Returns the result of `pipeline_problems`, or only the problem itself, with its own schedule, if there is one chunk."""
    return [problem] if pp * vpp == 1 else pipeline_problems(problem, pp, vpp)


def run_passes(schedules: Sequence[Schedule], run_pass: Callable[[int, int, int, float | None], float]) -> None:
    """Runs the passes of all pipeline ranks, each after the pass in the neighbouring chunk that it waits for.

    Args:
        schedules: Schedules of the ranks in order, as in `pipeline_problems`.
        run_pass: Callback that gets (rank, position of its pass, chunk of the model, end of the awaited pass
            or None) and returns the end of the pass. Ends are in seconds.

    Raises:
        InputError: The schedules wait for each other in a circle.
    """
    pp = len(schedules)
    last = pp * schedules[0].num_chunks - 1
    done: dict[tuple[int, int, int], float] = {}  # (position of the micro-step, chunk of the model, phase) -> end time
    next_pass = [0] * pp
    while any(next_pass[s] < len(schedule.micro_step_X) for s, schedule in enumerate(schedules)):
        moved = False
        for s, schedule in enumerate(schedules):
            while next_pass[s] < len(schedule.micro_step_X):
                x = next_pass[s]
                m, phase = int(schedule.micro_step_X[x]), int(schedule.phase_X[x])
                v = int(schedule.chunk_X[x]) * pp + s
                needs = (m, v - 1, phase) if phase == Phase.FORWARD else (m, v + 1, phase)
                first = v == (0 if phase == Phase.FORWARD else last)
                if not first and needs not in done:
                    break
                done[m, v, phase] = run_pass(s, x, v, None if first else done[needs])
                next_pass[s], moved = x + 1, True
        if not moved:
            raise InputError("the pipeline ranks' schedules wait for each other; use those of pipeline_problems.")


def simulate_pipeline(
    ranks: Sequence[PipelineRank], *, prefetch: int = 2, known: str = "rollout", plan_s: float = 0.0, share_links: bool = True,
    outside_s_MG: Array | None = None, full_stores: bool = False,
) -> list[Simulation]:  # fmt: skip
    """Simulates the timelines of all pipeline ranks. Each timeline is as long as that of the slowest rank.

    A forward pass waits for the pass of the same micro-step in the previous chunk, and a backward pass for the one in the next
    chunk. It also waits for activations or their gradients, which the slowest EP rank sends as one message. Pipeline ranks do not
    share links.

    Args:
        ranks: Pipeline ranks in order, with the schedules of `pipeline_problems`.
        outside_s_MG: Time in seconds of work outside the MoE layers in the last chunk. All further options are those of
            `simulate`.

    Raises:
        InputError: The schedules wait for each other in a circle.
    """
    pp = len(ranks)
    runs = [
        StageRun(
            rank.problem,
            rank.plan,
            prefetch=prefetch,
            known=known,
            plan_s=plan_s,
            share_links=share_links,
            full_stores=full_stores,
        )
        for rank in ranks
    ]
    schedules = [rank.plan.header.schedule for rank in ranks]
    last = pp * schedules[0].num_chunks - 1

    def run_pass(s: int, x: int, v: int, awaited_s: float | None) -> float:
        run, ready_s = runs[s], awaited_s or 0.0
        if awaited_s is not None and pp > 1:
            ready_s += message_s(run.problem, int(run.micro_step_X[x]))
        return run.run_pass(x, ready_s, outside_s_MG if v == last else None)

    run_passes(schedules, run_pass)
    end_s = max(run.settled_s() for run in runs)
    return [run.finish(end_s) for run in runs]


def message_s(problem: Problem, micro_step: int) -> float:
    """Returns the seconds to send a micro-step's activations from one pipeline rank to the next."""
    tokens = 0 if problem.tokens_MG is None else int(problem.tokens_MG[micro_step].max())
    return problem.cluster.copy_seconds(tokens * problem.model.token_bytes)[1]
