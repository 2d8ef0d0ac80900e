"""``foremoe check``: validates a plan file and checks that it was made for this routing."""

import click
import numpy as np

from foremoe.base.errors import InputError, PlanError
from foremoe.cli.files import file_name, layer_positions, read_routing, read_trace
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.options import option
from foremoe.levels import PackSolver
from foremoe.plan.files import load_plan
from foremoe.plan.plan import Plan
from foremoe.planner.parsing import parse
from foremoe.problem.problem import Problem
from foremoe.report.rows import executable_problem
from foremoe.routing.files import OtherExperts
from foremoe.workload.recordings import is_of_counts
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, P physical slots.

BROKEN, LOAD = 1, "load"
_SHOWN = 4


_HELP = """Checks a plan against every law of the Plan IR. The exit code is 0 if all laws hold, and 1 otherwise.

The laws require that every token is served exactly once, by a rank that holds its expert. Base slots must hold the experts at
home, and copies must bring the weights that each use needs. With --trace or --workload, the command also checks that the routing
has the plan's loads. The ranks' shares must then add up to these loads, and costs and bounds must follow from them. A plan that
was made for another trace is reported as such, not as broken.

\b
Example:
  foremoe check plan.safetensors --trace rollout.npz
"""


@click.command(cls=JsonCommand, help=_HELP)
@click.argument("plan_file", metavar="PLAN")
@option(
    "--trace", "traces", metavar="TRACE", multiple=True,
    help="Trace from which the plan was made. Its loads are compared with those of the plan. For several files, repeat the option"
    " in the order in which they were planned.  [default: loads are not compared]",
)  # fmt: skip
@option(
    "--workload",
    "workload_file",
    metavar="FILE",
    help="File of counts from which the plan was made. Replaces --trace.  [default: loads are not compared]",
)
def check(plan_file: str, traces: tuple[str, ...], workload_file: str | None, json_file: str | None) -> None:
    """Runs ``foremoe check``."""
    require_writable({"the JSON file": json_file}, [plan_file, workload_file, *traces])
    if traces and workload_file is not None:
        raise InputError("--trace and --workload exclude each other; give one of them.")

    plan = load_plan(plan_file)
    broken = plan.violations()
    lawful = not broken
    checked = [f"the laws of {plan.N} rows"]
    source = "the trace" if traces else "the workload file"
    work = None
    try:
        work = dealt_again(plan, traces) if traces else None if workload_file is None else Workload.load(workload_file)
    except OtherExperts as error:
        broken.append(PlanError(LOAD, "", _other_experts(plan, error)))
    if work is not None:
        broken += load_violations(plan, work, source)
        # If a plan is broken or was made for other loads, its shares and costs cannot be checked.
        broken = broken or share_violations(plan, work) + price_violations(plan, work)
        checked.append(f"loads, costs, bounds and the {plan.G} ranks' shares against {source}")
    name = file_name(plan_file)
    violations = [{"law": error.law, "where": error.where, "message": error.message} for error in broken]
    payload = {"plan": name, "valid": not broken, "violations": violations, "checked": checked}
    verdict = f"valid (checked: {'; '.join(checked)})"
    if broken:
        # A plan with other loads breaks no law. It was made for another trace.
        foreign = lawful and all(error.law == LOAD for error in broken)
        verdict = f"keeps its laws, but was made for other loads than those of {source}" if foreign else "broken"
    emit(json_file, payload, [*map(str, broken), f"{name}: {verdict}"])
    if broken:
        click.get_current_context().exit(BROKEN)


def dealt_again(plan: Plan, traces: tuple[str, ...]) -> Workload:
    """Packs `traces` again in the way that the plan's header records, and returns the workload."""
    try:
        return _dealt_again(plan, traces)
    except OtherExperts as error:
        told = f"{_other_experts(plan, error)}; give the trace that was planned."
        raise OtherExperts(told, error.num_experts) from None


def _other_experts(plan: Plan, error: OtherExperts) -> str:
    return f"the plan was made for {plan.header.model.name} ({plan.E} experts); this trace has {error.num_experts}"


def _dealt_again(plan: Plan, traces: tuple[str, ...]) -> Workload:
    head = plan.header
    if head.dealt is None:
        raise InputError("the plan does not say how its batch was dealt (it was counted elsewhere); give --workload FILE.")
    if is_of_counts(head.dealt):
        counts = read_routing(traces, head.model, plan.G, head.dealt.tokens_per_rank, head.key.stage)
        if not isinstance(counts, Workload):
            raise InputError("the plan was made from counts, not from this trace; give the file of counts.")
        work = counts[: plan.M]
    else:
        work = Workload.from_trace(
            read_trace(traces, head.model), num_ranks=plan.G, tokens_per_rank=head.dealt.tokens_per_rank,
            packer=dealing_packer(head.dealt.packer), seed=head.dealt.seed, stage=head.key.stage,
            max_micro_steps=plan.M if head.dealt.dropped_micro_steps else None,
        )  # fmt: skip
    if work.L == plan.L:
        return work
        # The plan may cover only some layers, such as those of one pipeline rank.
    positions, lacking = layer_positions(work.moe_layer_L, head.moe_layer_L)
    if lacking:
        raise InputError(f"the trace lacks the plan's layer {lacking[0]}; give the trace that was planned.")
    return work.layers(positions)


def dealing_packer(text: str) -> PackSolver:
    """Returns the pack solver that a plan file names, if it is one of foremoe's own.

    Text from a file never makes foremoe import or call other code.
    """
    try:
        packer = parse(text, builtin=True)
    except Exception:  # the text comes from a file, so parsing may fail in any way
        packer = None
    if not isinstance(packer, PackSolver):
        dealt = f"the plan was dealt by {text!r}, which is not a pack level of foremoe's own"
        raise InputError(f"{dealt}; give the workload file that was planned (--workload FILE of `foremoe check`).")
    return packer


def load_violations(plan: Plan, work: Workload, source: str) -> list[PlanError]:
    """Lists the places where the plan's loads differ from those of `work`."""
    shape, want = work.load_MLGE.shape, (plan.M, plan.L, plan.G, plan.E)
    if shape != want:
        sizes = f"{list(shape)} micro-steps, layers, ranks, experts"
        return [PlanError(LOAD, "", f"{source} has {sizes}; the plan was made for {list(want)}")]
    different = np.argwhere((work.load_MLE != plan.load_MLE).any(axis=2))
    errors = []
    for m, l in different[:_SHOWN].tolist():  # noqa: E741
        e = int((work.load_MLE[m, l] != plan.load_MLE[m, l]).argmax())
        message = f"{source} has {work.load_MLE[m, l, e]} pairs; the plan was made for {plan.load_MLE[m, l, e]}"
        errors.append(PlanError(LOAD, f"micro-step {m}, layer {l}, expert {e}", message))
    if len(different) > _SHOWN:
        errors.append(PlanError(LOAD, "", f"{len(different)} of {plan.N} rows differ in all"))
    return errors


def share_violations(plan: Plan, work: Workload) -> list[PlanError]:
    """Lists the places where the shares of the source ranks do not sum to a slot's quota or to the pairs of a source rank."""
    total_MLP = np.zeros((plan.M, plan.L, plan.G * plan.S), np.int64)
    expert_MLP = plan.expert_MLGS.reshape(plan.M, plan.L, -1)
    row_MLP = np.arange(plan.N).reshape(plan.M, plan.L, 1) * plan.E + np.where(expert_MLP < 0, 0, expert_MLP)
    errors = []
    for rank in range(plan.G):
        share_MLP = plan.rows_for(work, rank)
        total_MLP += share_MLP
        sent_MLE = np.bincount(row_MLP.ravel(), share_MLP.ravel(), minlength=plan.N * plan.E).reshape(plan.M, plan.L, plan.E)
        wrong = np.argwhere(sent_MLE != work.load_MLGE[:, :, rank])
        for m, l, e in wrong[:1].tolist():  # noqa: E741
            message = f"sends {int(sent_MLE[m, l, e])} of its {work.load_MLGE[m, l, rank, e]} pairs of expert {e}"
            errors.append(PlanError("split", f"micro-step {m}, layer {l}, rank {rank}", message))
    for m, l, p in np.argwhere(total_MLP != plan.quota_MLGS.reshape(total_MLP.shape))[:_SHOWN].tolist():  # noqa: E741
        g, s = divmod(p, plan.S)
        message = f"the ranks send {total_MLP[m, l, p]} pairs to a quota of {plan.quota_MLGS[m, l, g, s]}"
        errors.append(PlanError("split", f"micro-step {m}, layer {l}, rank {g}, slot {s}", message))
    return errors


def price_violations(plan: Plan, work: Workload) -> list[PlanError]:
    """Lists the places where the plan's trace, packing, costs or bounds differ from what `work` gives with the plan's header."""
    head = plan.header
    posed = Problem.of(work, head.cluster, model=head.model, redundant=head.redundant, schedule=head.schedule)
    return plan.violations(executable_problem(posed, plan))
