"""PlanStream: plans micro-steps while rollout still samples later ones."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster
from foremoe.plan.header import PlanKey
from foremoe.plan.plan import Plan
from foremoe.planner.answers import linked, valid
from foremoe.planner.planner import Planner
from foremoe.planner.summary import LevelSummary, PlanSummary, count_stops
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.solvers.home.keep import Keep
from foremoe.workload.workload import Workload

# Letters: M micro-steps, N rows.

_SAME = ("L", "G", "E", "num_topk", "stage", "model")


class PlanStream:
    """Plans the micro-steps of one stage in a background thread as they are added.

    The plan is, byte for byte, the plan that the planner makes of all micro-steps at once. This requires rank solvers that solve
    every row independently, as the built-in solvers do, and that have no wall-clock limit.

    Example::

        with foremoe.PlanStream(foremoe.Planner(), cluster, redundant=1) as stream:
            for work in sampled_micro_steps:
                stream.add(work)
            plan, report = stream.finish()
        plan.check(stream.problem)

    Args:
        planner: A planner with foresight ``"exact"``. Other kinds of foresight are not supported.
        cluster: The cluster, as for `Problem.of`.
        reforward: Whether backward passes run the forward pass again. The schedule that is given to `finish` must have the same
            value.
        key: Position of the plan in training. Defaults to step 0 of the stage.
        num_threads: Number of planning threads. Defaults to all cores.
        options: Arguments of `Problem.of`: redundant, slot_depth, model, home_LE, cost, replicas.

    Raises:
        InputError: The foresight is not "exact", an option is unknown, or there is a home level but no ``home_LE``.
    """

    def __init__(
        self, planner: Planner, cluster: Cluster, *,
        reforward: bool = False, key: PlanKey | None = None, num_threads: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(planner, Planner) or planner.foresight != "exact":
            raise InputError(f"a PlanStream needs a Planner with foresight='exact'; got {planner!r}.")
        unknown = set(options) - {"redundant", "model", "home_LE", "cost", "slot_depth", "replicas"}
        if unknown:
            raise InputError(f"a PlanStream has no option {', '.join(sorted(unknown))}; the schedule goes to finish().")
        if planner.home != Keep() and options.get("home_LE") is None:
            raise InputError(f"a PlanStream has no load to decide homes by; give home_LE, or leave home={planner.home!r} out.")
        self._planner, self._cluster, self._options = planner, cluster, options
        self._reforward, self._key, self._num_threads = reforward, key, num_threads
        self._works: list[Workload] = []
        self._taken = 0  # number of works that are planned or being planned; used only by the background thread
        self._cancel = threading.Event()
        self._parts: list[Future[tuple[Plan, PlanSummary] | None]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foremoe-plan")
        self._closed = False
        self._problem: Problem | None = None

    @property
    def problem(self) -> Problem:
        """The problem of all micro-steps. It is available after `finish` has returned."""
        if self._problem is None:
            raise InputError("the problem is known once finish() has returned; call it first.")
        return self._problem

    def add(self, work: Workload) -> None:
        """Adds one or more micro-steps to be planned in the background, and returns at once.

        Raises:
            InputError: The micro-steps do not fit the earlier ones, or the stream is closed.
            Exception: Planning of earlier micro-steps raised this error.
        """
        self._require_open()
        if not isinstance(work, Workload):
            raise InputError(f"add takes a Workload, such as work[0:1] or Workload.from_counts(...); got {type(work).__name__}.")
        if self._works:
            first = self._works[0]
            for name in _SAME:
                if getattr(work, name) != getattr(first, name):
                    raise InputError(f"the first micro-steps have {name} {getattr(first, name)!r}; got {getattr(work, name)!r}.")
            if not np.array_equal(work.moe_layer_L, first.moe_layer_L):
                raise InputError("these micro-steps have other layers than the first ones; plan them in a stream of their own.")
        for future in self._parts:
            if future.done():
                future.result()  # raises the error of planning, if any
        self._works.append(work)
        self._parts.append(self._pool.submit(self._plan_waiting))

    def finish(self, schedule: Schedule | None = None) -> tuple[Plan, PlanSummary]:
        """Waits for the background thread and returns the plan of all micro-steps.

        Args:
            schedule: Order of the passes of all micro-steps. Defaults to the schedule of `Problem.of`, with the `reforward` of
                this stream.

        Returns:
            The plan, and a summary in which the times of all parts are added up.

        Raises:
            InputError: Nothing was added, the schedule does not fit, or the stream is closed.
            Exception: Planning raised this error.
        """
        self._require_open()
        if not self._works:
            raise InputError("no micro-steps were added; add some before finish().")
        whole = _joined(self._works)
        if schedule is None:
            schedule = Schedule.plain(whole.stage, whole.M, self._reforward)
        if schedule.reforward != self._reforward:
            raise InputError(f"this stream was made with reforward={self._reforward}; the schedule has {schedule.reforward}.")
        problem = Problem.of(whole, self._cluster, schedule=schedule, **self._options)
        try:
            self._pool.shutdown()
            parts = [part for part in (future.result() for future in self._parts) if part is not None]
            began = time.perf_counter()
            plan = self._join(problem, [plan for plan, _ in parts])
            report = _merged([report for _, report in parts], plan, time.perf_counter() - began)
        finally:
            self.close()
        self._problem = problem
        return plan, report

    def close(self) -> None:
        """Ends planning and discards unfinished work. It may be called more than once."""
        self._closed = True
        self._cancel.set()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan_waiting(self) -> tuple[Plan, PlanSummary] | None:
        """Plans in one call all micro-steps added since the last call, because many small parts cost more than a large one."""
        works = self._works[self._taken :]
        if not works:
            return None
        self._taken += len(works)
        work = _joined(works)
        schedule = Schedule.plain(work.stage, work.M, self._reforward)
        problem = Problem.of(work, self._cluster, schedule=schedule, **self._options)
        # Homes apply to the whole step. `finish` compares them with the planner's home level.
        rows = dataclasses.replace(self._planner, home=Keep())
        return rows.plan(problem, key=self._key, num_threads=self._num_threads, cancel=self._cancel)

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("this PlanStream is finished; make a new one for the next stage.")

    def _join(self, problem: Problem, plans: Sequence[Plan]) -> Plan:
        plan = Plan.join(plans, problem.schedule)
        ran = self._planner.what_ran(problem)
        plan = dataclasses.replace(plan, header=ran.header(problem, plan.header.key))
        return linked(plan, ran.path, problem) if plan.executable else valid(plan)


def _joined(works: Sequence[Workload]) -> Workload:
    """Returns one workload of consecutive micro-steps.

    Slices of one workload keep its trace and its packing. They keep that of the last slice, because the first slice counts the
    later micro-steps as left out.
    """
    last = works[-1]
    if len(works) == 1:
        return last
    of_trace: dict[str, Any] = {"micro_step_Q": None, "rank_Q": None}
    if any(work.trace_id != last.trace_id for work in works):
        of_trace |= {"trace_id": "", "dealt": None}
    return dataclasses.replace(last, **Workload.join_arrays(works, "M"), **of_trace)


def _merged(reports: Sequence[PlanSummary], plan: Plan, finish_s: float) -> PlanSummary:
    """Returns the summary of the whole from the summaries of its parts."""
    levels = []
    for parts in zip(*(report.levels for report in reports), strict=True):
        sums = {name: _sum(parts, name) for name in ("seconds", "cpu_s", "objective_sum", "rows_improved")}
        skew_mean = sum(part.skew_mean * report.rows for part, report in zip(parts, reports, strict=True)) / plan.N
        levels.append(LevelSummary(solver=parts[0].solver, skew_mean=skew_mean, **sums))
    all_warnings = dict.fromkeys(text for report in reports for text in report.warnings)
    return PlanSummary(
        plan_s=_sum(reports, "plan_s") + finish_s, levels=tuple(levels), rows=plan.N,
        rows_kept_at_start=_sum(reports, "rows_kept_at_start"), stops=count_stops(plan.stop_ML),
        warnings=tuple(all_warnings), compile_s=_sum(reports, "compile_s"),
    )  # fmt: skip


def _sum(parts: Sequence[Any], name: str) -> Any:
    return sum(getattr(part, name) for part in parts)
