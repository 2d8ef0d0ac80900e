"""Plans to write or to show. A plan is either made from a case, or read from a file together with its problem."""

import dataclasses
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
from foremoe.planner.summary import PlanSummary
from foremoe.problem.problem import Problem
from foremoe.report.rows import executable_problem, require_belongs
from foremoe.simulate.systems import home_moves_L
from foremoe.workload.workload import Workload


class Shown(NamedTuple):
    """A plan with the problem for which it was made."""

    posed: Problem  # the problem with the homes before planning
    problem: Problem  # the problem with the homes of the plan
    plan: Plan
    summary: PlanSummary | None  # None if the plan was read from a file
    home: object  # home level that moved homes; None if it is not known
    history_LE: Array | None  # load of an earlier step
    source: str  # origin of the load, in a few words

    @property
    def moves_s(self) -> float:
        """Time in seconds for moving experts from their original homes to the plan's homes."""
        return float(home_moves_L(self.posed, self.problem.home_LE, self.home).sum())


def plan_case(
    options: CaseOptions,
    name: str,
    threads: int | None,
    progress: Progress,
) -> tuple[Case, Shown, PlanSummary]:
    """Builds the case and plans it. Returns the case, the plan with its problem, and the planner's summary."""
    planner = planner_of(name, options.shuffle)
    case = build_case(options, planner.pack, threads, progress)
    # The home level runs once per step, before planning. The case of a command is a whole step.
    problem = dataclasses.replace(case.problem, home_LE=planner.homes(case.problem, num_threads=threads))
    plan, summary = planner.plan(
        problem, history_LE=case.history_LE, num_threads=threads, progress=lambda done, total: progress(name, done, total)
    )
    shown = Shown(case.problem, problem, plan, summary, planner.home, case.history_LE, source_of(case))
    return case, shown, summary


def read_plan(options: CaseOptions, planner_name: str | None, plan_file: str) -> Shown:
    """Reads a plan file and returns the plan with the problem for which it was made."""
    require_one_source(options)
    plan = Plan.load(plan_file)
    # Text in a file never causes an import. Only the user of the command may name code to run.
    home = None if planner_name is None else planner_of(planner_name).home
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
    posed = dataclasses.replace(problem, home_LE=posed.home_LE)
    return Shown(posed, problem, plan, None, home, history_LE, source)


def _work_of(paths: tuple[str, ...], plan: Plan) -> Workload:
    """Returns the planned workload: the traces packed again, or the counts of the plan's micro-steps and layers."""
    if len(paths) > 1 or kind_of(paths[0]) != "workload":
        work = dealt_again(plan, paths)
    else:
        work = Workload.load(paths[0])[: plan.M]
        positions, lacking = layer_positions(work.moe_layer_L, plan.header.moe_layer_L)
        if work.L != plan.L and not lacking:
            work = work.layers(positions)
    if (work.L, work.E, work.G) != (plan.L, plan.E, plan.G):
        sizes = f"{work.L} layers, {work.E} experts and {work.G} ranks"
        raise InputError(
            f"the workload has {sizes}; the plan has {plan.L}, {plan.E} and {plan.G}; give the workload that was planned."
        )
    if work.M != plan.M:
        raise InputError(f"the workload has {work.M} micro-steps and the plan {plan.M}; give the workload that was planned.")
    return work


def source_of(case: Case) -> str:
    """Returns a few words that say where a case's load comes from."""
    return case.line.removeprefix("case: ").partition(": ")[0]
