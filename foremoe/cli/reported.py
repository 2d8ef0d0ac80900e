"""What ``foremoe report`` shows: a case planned now, or the plan of a file and the problem it was made for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.cli.check import dealt_again
from foremoe.cli.files import file_name, history_load, kind_of
from foremoe.cli.inputs import Case, build_case, require_one_source
from foremoe.cli.options import CaseOptions
from foremoe.cli.progress import Progress
from foremoe.cli.texts import packer_of, planner_of
from foremoe.plan.plan import Plan
from foremoe.planner.parsing import parse
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES, resolve
from foremoe.planner.summary import PlanSummary
from foremoe.problem.problem import Problem
from foremoe.report.rows import executable_problem, require_belongs
from foremoe.simulate.systems import home_moves_L
from foremoe.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the page is of.

    Attributes:
        posed: The problem with its own homes.
        problem: The problem with the homes that the plan has.
        plan: The plan.
        summary: How planning went; None for a plan of a file.
        planner: For other numbers of slots, if it is known.
        history_LE: Load of an earlier step, int64 [L, E], or None.
        source: Where the load comes from, in a few words.
    """

    posed: Problem
    problem: Problem
    plan: Plan
    summary: PlanSummary | None
    planner: Planner | None
    history_LE: Array | None
    source: str

    @property
    def moves_s(self) -> float:
        """Seconds from the posed homes to the plan's."""
        home = None if self.planner is None else self.planner.home
        return float(home_moves_L(self.posed, self.problem.home_LE, home).sum())


def plan_case(options: CaseOptions, name: str, redundant: Sequence[int], threads: int | None, progress: Progress) -> Shown:
    """The case, planned now."""
    planner = planner_of(name)
    planner = planner.using(packer_of(planner.pack, options.shuffle))
    case = build_case(options, planner.pack, threads, progress)
    _require_possible(case.problem, redundant)
    problem = dataclasses.replace(case.problem, home_LE=planner.homes(case.problem, num_threads=threads))
    plan, summary = planner.plan(
        problem, history_LE=case.history_LE, num_threads=threads, progress=lambda done, total: progress(name, done, total)
    )
    return Shown(
        posed=case.problem, problem=problem, plan=plan, summary=summary, planner=planner, history_LE=case.history_LE,
        source=_source_of(case),
    )  # fmt: skip


def read_plan(options: CaseOptions, planner_name: str | None, plan_file: str, redundant: Sequence[int]) -> Shown:
    """The plan of a file, and the problem it was made for."""
    require_one_source(options)
    plan = Plan.load(plan_file)
    broken = plan.violations()
    if broken:
        raise InputError(f"the plan {file_name(plan_file)!r} breaks its laws ({broken[0]}); `foremoe check` says more.")
    # A file's own text never imports anything: only the caller of the command may name code that runs.
    planner = (
        planner_of(planner_name) if planner_name is not None else _builtin_planner(plan.header.planner) if redundant else None
    )
    if options.traces:
        head, work = plan.header, _work_of(options.traces, plan)
        posed = Problem.of(work, head.cluster, model=head.model, redundant=head.redundant, schedule=head.schedule)
        history_LE = None if options.history is None else history_load(options.history, work, head.model)
        source = " + ".join(file_name(path) for path in options.traces)
    else:
        case = build_case(options)
        posed, history_LE, source = case.problem, case.history_LE, _source_of(case)
        if (posed.M, posed.L, posed.G, posed.E) != (plan.M, plan.L, plan.G, plan.E):
            raise InputError(
                f"the case has [M, L, G, E] = {[posed.M, posed.L, posed.G, posed.E]} and the plan "
                f"{[plan.M, plan.L, plan.G, plan.E]}; give the options that it was planned with."
            )
    problem = executable_problem(posed, plan)
    require_belongs(problem, plan)
    _require_possible(problem, redundant)
    if (posed.home_LE == plan.home_LE).all():
        posed = problem
    else:
        # What slots hold belongs to the moved homes.
        posed = dataclasses.replace(problem, home_LE=posed.home_LE, resident_LGS=None)
    return Shown(
        posed=posed, problem=problem, plan=plan, summary=None, planner=planner, history_LE=history_LE, source=source
    )  # fmt: skip


def _work_of(paths: tuple[str, ...], plan: Plan) -> Workload:
    """What was planned: traces dealt again, or counts cut to the plan's micro-steps and layers."""
    if len(paths) > 1 or kind_of(paths[0]) != "workload":
        work = dealt_again(plan, paths)
    else:
        work = Workload.load(paths[0])[: plan.M]
        position = {int(number): at for at, number in enumerate(work.moe_layer_L)}
        wanted = [int(number) for number in plan.header.moe_layer_L]
        if work.L != plan.L and all(number in position for number in wanted):
            work = work.layers([position[number] for number in wanted])
    if (work.L, work.E, work.G) != (plan.L, plan.E, plan.G):
        raise InputError(
            f"the workload has {work.L} layers, {work.E} experts and {work.G} ranks; the plan has {plan.L}, {plan.E} and "
            f"{plan.G}; give what was planned."
        )
    if work.M != plan.M:
        raise InputError(f"the workload has {work.M} micro-steps and the plan {plan.M}; give what was planned.")
    return work


def _builtin_planner(text: str) -> Planner | None:
    """The planner of a plan file's text if foremoe itself brings all of it; never code from elsewhere."""
    if text in STRATEGIES:
        return STRATEGIES[text]
    try:
        found = parse(text, builtin=True)
        # A text in quotes is text again, and could name a module.
        return None if isinstance(found, str) else resolve(found)
    except Exception:  # the text is anybody's, and may fail in any way
        return None


def _require_possible(problem: Problem, redundant: Sequence[int]) -> None:
    """Raises InputError for numbers of redundant slots that the problem cannot have."""
    for slots in redundant:
        dataclasses.replace(problem, redundant=slots, resident_LGS=None)


def _source_of(case: Case) -> str:
    return case.line.removeprefix("case: ").partition(": ")[0]
