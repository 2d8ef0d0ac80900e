"""Plans to write or to show: planned now from a case, or read from a file with the problem it was made for."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.tensor_file import kind_of
from foremoe.cli.check import dealt_again
from foremoe.cli.files import file_name, history_load, layer_positions
from foremoe.cli.inputs import Case, build_case, require_one_source
from foremoe.cli.options import CaseOptions
from foremoe.cli.progress import Progress
from foremoe.cli.texts import planner_of
from foremoe.plan.plan import Plan
from foremoe.planner.parsing import parse
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES, resolve
from foremoe.planner.summary import PlanSummary
from foremoe.problem.problem import Problem
from foremoe.report.rows import executable_problem, require_belongs
from foremoe.simulate.systems import home_moves_L
from foremoe.workload.workload import Workload


class Shown(NamedTuple):
    """A plan with its problem."""

    posed: Problem  # with its own homes
    problem: Problem  # with the homes that the plan has
    plan: Plan
    summary: PlanSummary | None  # None for a plan of a file
    planner: Planner | None  # for other numbers of slots, if it is known
    history_LE: Array | None  # load of an earlier step
    source: str  # where the load comes from, in a few words

    @property
    def moves_s(self) -> float:
        """Seconds for moving experts from the original homes to the plan's."""
        home = None if self.planner is None else self.planner.home
        return float(home_moves_L(self.posed, self.problem.home_LE, home).sum())


def plan_case(
    options: CaseOptions,
    name: str,
    threads: int | None,
    progress: Progress,
    redundant: Sequence[int] = (),
) -> tuple[Case, Shown, PlanSummary]:
    """Plans the case now, after checking that the other numbers of redundant slots are possible."""
    planner = planner_of(name, options.shuffle)
    case = build_case(options, planner.pack, threads, progress)
    _require_possible(case.problem, redundant)
    # The home level acts once per step, outside of planning; a command's case is the whole step.
    problem = dataclasses.replace(case.problem, home_LE=planner.homes(case.problem, num_threads=threads))
    plan, summary = planner.plan(
        problem, history_LE=case.history_LE, num_threads=threads, progress=lambda done, total: progress(name, done, total)
    )
    shown = Shown(case.problem, problem, plan, summary, planner, case.history_LE, source_of(case))
    return case, shown, summary


def read_plan(options: CaseOptions, planner_name: str | None, plan_file: str, redundant: Sequence[int]) -> Shown:
    """Reads a plan file and returns the plan with the problem it was made for."""
    require_one_source(options)
    plan = Plan.load(plan_file)
    # A file's own text never imports anything: only the caller of the command may name code that runs.
    planner = None if planner_name is None else planner_of(planner_name)
    if planner_name is None and redundant:
        planner = _builtin_planner(plan.header.planner)
    if options.traces:
        head, work = plan.header, _work_of(options.traces, plan)
        posed = Problem.of(work, head.cluster, model=head.model, redundant=head.redundant, schedule=head.schedule)
        history_LE = None if options.history is None else history_load(options.history, work, head.model)
        source = " + ".join(file_name(path) for path in options.traces)
    else:
        case = build_case(dataclasses.replace(options, redundant=plan.header.redundant))
        posed, history_LE, source = case.problem, case.history_LE, source_of(case)
        sizes, wanted = ([its.M, its.L, its.G, its.E] for its in (posed, plan))
        if sizes != wanted:
            differ = f"the case has [M, L, G, E] = {sizes} and the plan {wanted}"
            raise InputError(f"{differ}; give the options that it was planned with.")
    problem = executable_problem(posed, plan)
    require_belongs(problem, plan)
    _require_possible(problem, redundant)
    posed = dataclasses.replace(problem, home_LE=posed.home_LE)
    return Shown(posed, problem, plan, None, planner, history_LE, source)


def _work_of(paths: tuple[str, ...], plan: Plan) -> Workload:
    """What was planned: traces dealt again, or counts cut to the plan's micro-steps and layers."""
    if len(paths) > 1 or kind_of(paths[0]) != "workload":
        work = dealt_again(plan, paths)
    else:
        work = Workload.load(paths[0])[: plan.M]
        positions, lacking = layer_positions(work.moe_layer_L, plan.header.moe_layer_L)
        if work.L != plan.L and not lacking:
            work = work.layers(positions)
    if (work.L, work.E, work.G) != (plan.L, plan.E, plan.G):
        sizes = f"{work.L} layers, {work.E} experts and {work.G} ranks"
        raise InputError(f"the workload has {sizes}; the plan has {plan.L}, {plan.E} and {plan.G}: give what was planned.")
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
        dataclasses.replace(problem, redundant=slots)


def source_of(case: Case) -> str:
    """Describes in a few words where the load of a case comes from."""
    return case.line.removeprefix("case: ").partition(": ")[0]
