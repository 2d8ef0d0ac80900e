"""Builds a `Case` from the command line's options: reads or generates routing, packs it, and poses one problem."""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from foremoe.advice.slots import SlotChoice, choose_slots
from foremoe.base.arrays import Array
from foremoe.base.budget import require_budget
from foremoe.base.errors import InputError
from foremoe.base.tensor_file import header_of, kind_of
from foremoe.cli.case_text import case_lines, case_notes
from foremoe.cli.files import cluster_of, file_name, history_load, is_file, model_of, model_told, read_routing, read_trace
from foremoe.cli.options import DEFAULT_MICRO_STEPS, DEFAULT_RANKS, DEFAULT_REGIME, DEFAULT_TOKENS_PER_RANK, CaseOptions
from foremoe.cli.progress import Progress
from foremoe.cli.texts import layer_range, packer_of
from foremoe.levels import PackSolver
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.routing.trace import RoutingTrace
from foremoe.simulate.systems import ep_groups
from foremoe.synthetic.counts import synthetic_workload
from foremoe.synthetic.imbalance import IMBALANCES, imbalance_workload
from foremoe.workload.packing import AsGiven
from foremoe.workload.recordings import SCALED, SPREAD, is_of_counts
from foremoe.workload.routed_tokens import RoutedTokens
from foremoe.workload.workload import Workload

# Letters: L layers, E experts.

# Two tokens may have equal choices by chance if there are fewer choices per token, or if a small share of tokens repeats.
_MANY, _FEW = 16, 0.01


class Case(NamedTuple):
    """The case that a command works on."""

    problem: Problem  # the problem to plan
    workload: Workload  # the counts behind the problem
    history_LE: Array | None  # load of an earlier step, int64
    record: dict[str, Any]  # description of the case in plain values, for JSON
    line: str  # description of the case for people
    slots: SlotChoice | None = None  # how foremoe chose the number of slots, if it did

    @property
    def cost_model(self) -> str:
        """Returns ``"calibrated"`` if the cluster's constants were measured, else ``"uncalibrated"``."""
        return "calibrated" if self.problem.cluster.calibrated else "uncalibrated"

    @property
    def constants(self) -> str:
        """Returns `cost_model` with the residual of the fit, as shown below tables."""
        return self.problem.cluster.standing


def build_case(
    options: CaseOptions, packer: PackSolver | None = None, num_threads: int | None = None, progress: Progress | None = None
) -> Case:
    """Builds the case that `options` describe. Without a `packer`, the sequences stay in file order."""
    return _case(options, _dealt(options, packer, 1, num_threads, progress), progress)


def build_groups(options: CaseOptions, num_groups: int, progress: Progress) -> tuple[Case, list[Problem]]:
    """Builds one case per EP group, whose ranks share the tokens. Returns the first case and all problems."""
    whole = _dealt(options, None, num_groups, None, progress)
    cases = list[Case]()
    for i, group in enumerate(ep_groups(whole.work, whole.work.G // num_groups)):
        routed = None if whole.routed is None else whole.routed.of_ranks(i * group.G, group.G)
        # All groups get the number of slots that was chosen for the first group.
        redundant = cases[0].problem.R if cases else options.redundant
        one = dataclasses.replace(options, ranks=group.G, redundant=redundant)
        cases.append(_case(one, whole._replace(work=group, routed=routed), progress))
    return cases[0], [case.problem for case in cases]


class _Dealt(NamedTuple):
    """The counts of all layers, their model and file names, and the routed tokens if the counts come from a trace."""

    work: Workload
    model: Model
    names: list[str]
    routed: RoutedTokens | None = None


def _case(options: CaseOptions, source: _Dealt, progress: Progress | None) -> Case:
    work, model, names, routed = source
    if options.layers is not None:
        work = work.layers(layer_range(options.layers, work.L))
    # Without --ranks, a cluster file gives the number of ranks.
    ranks = options.ranks if options.ranks is not None or is_file(options.cluster) else work.G
    cluster = cluster_of(options.cluster, ranks, options.ranks_per_node, options.dispatch, options.host_store, options.accept_fit)
    default = "accumulate" if work.stage == "update" else "forward"
    schedule = default if options.schedule is None else options.schedule
    problem = Problem.of(
        work, cluster, model=model, redundant=options.redundant or 0, cost=CostModel(objective=options.objective),
        schedule=Schedule.parse(schedule, work.M), slot_depth=options.slot_depth, replicas=options.replicas,
        routed=routed,
    )  # fmt: skip
    chosen = None
    if options.redundant is None:
        report = None if progress is None else functools.partial(progress, "choosing slots")
        chosen = choose_slots(problem, trainer=options.trainer.of(), pp=options.pp, progress=report)
        problem = chosen.problem
    history_LE = None if options.history is None else history_load(options.history, work, model)
    dealt = work.dealt
    record = {
        "traces": names, "synthetic": options.synthetic,
        "regime": (options.regime or DEFAULT_REGIME) if options.synthetic else None,
        "history": None if options.history is None else file_name(options.history), "trace_id": work.trace_id,
        "model": model.name, "cluster": cluster.name, "stage": work.stage, "tokens": int(work.tokens_MG.sum()),
        "unknown_tokens": int(work.unknown_ML.max(axis=1).sum()), "micro_steps": work.M, "layers": work.L,
        "layer_range": options.layers, "experts": work.E, "topk": work.num_topk, "ranks": cluster.num_ranks,
        "nodes": cluster.num_nodes, "ranks_per_node": cluster.ranks_per_node, "dispatch": cluster.dispatch,
        "host_store": cluster.host_bytes_per_s > 0.0, "redundant": problem.R,
        "slot_options": None if chosen is None else chosen.options,
        "objective": options.objective, "schedule": schedule, "slot_depth": options.slot_depth, "replicas": options.replicas,
        "tokens_per_rank": None if dealt is None else dealt.tokens_per_rank, "packer": None if dealt is None else dealt.packer,
        "seed": options.seed, "left_out_micro_steps": 0 if dealt is None else dealt.dropped_micro_steps,
    }  # fmt: skip
    notes = [*case_notes(options, record, cluster), *([] if chosen is None else [str(chosen)])]
    line = "\n".join([*case_lines(record, len(model.moe_layer_L)), *notes])
    return Case(problem=problem, workload=work, history_LE=history_LE, record=record, line=line, slots=chosen)


def require_one_source(options: CaseOptions) -> None:
    """Raises InputError unless exactly one of a trace and a synthetic load is given."""
    if options.traces and options.synthetic is not None:
        raise InputError("a TRACE and --synthetic exclude each other; give one of them.")
    if not options.traces and options.synthetic is None:
        raise InputError("there is nothing to plan; give a TRACE, or --synthetic MODEL for artificial routing.")
    if options.synthetic is None and options.regime is not None:
        raise InputError("--regime shapes --synthetic routing only; leave it out with a TRACE.")
    if options.synthetic is not None and options.model is not None:
        raise InputError("--synthetic already names the model; leave --model out.")
    if options.synthetic is not None and options.shuffle:
        raise InputError("--shuffle reorders the sequences of a TRACE; --synthetic routing has none, so leave it out.")


def _dealt(
    options: CaseOptions, packer: PackSolver | None, num_groups: int, num_threads: int | None, progress: Progress | None
) -> _Dealt:
    require_one_source(options)
    tokens_per_rank = options.tokens_per_rank or DEFAULT_TOKENS_PER_RANK
    stage = options.stage or "update"
    model: Model | None
    ranks = num_groups * source_ranks(options)
    if options.synthetic is not None:
        model, micro_steps = model_of(options.synthetic), options.micro_steps or DEFAULT_MICRO_STEPS
        require_divides(model.num_experts, ranks // num_groups)
        counts = 4 * micro_steps * model.num_layers * ranks * model.num_experts
        require_budget(counts, "the counts alone", "give fewer micro-steps or ranks")
        regime = options.regime or DEFAULT_REGIME
        asked = {"num_ranks": ranks, "tokens_per_rank": tokens_per_rank, "micro_steps": micro_steps}
        if regime in IMBALANCES:
            return _Dealt(imbalance_workload(model, regime, **asked, seed=options.seed, stage=stage), model, [])
        return _Dealt(synthetic_workload(model, **asked, regime=regime, seed=options.seed, stage=stage), model, [])
    model = None if options.model is None else model_of(options.model)
    names, routed, trace = [file_name(path) for path in options.traces], None, None
    found = read_routing(options.traces, model, ranks, tokens_per_rank, stage)
    if isinstance(found, Workload):
        work = _counts(found, options, num_groups)
    else:
        trace, model = _told(found, options.traces, model)
        require_divides(trace.num_experts, ranks // num_groups)
        packer = packer_of(AsGiven() if packer is None else packer, options.shuffle)
        work = Workload.from_trace(
            trace, num_ranks=ranks, tokens_per_rank=tokens_per_rank, packer=packer,
            seed=options.seed, stage=stage, max_micro_steps=options.micro_steps, num_threads=num_threads,
        )  # fmt: skip
        routed = RoutedTokens.of(trace, work)
    if model is None:
        model = model_told(work.model, work.L, work.E, work.num_topk)
    if (work.E, work.num_topk) != (model.num_experts, model.num_topk) or model.num_layers < work.L:
        sizes = f"{model.num_layers} layers with top-{model.num_topk} of {model.num_experts} experts"
        held = f"{names[0]} holds {work.L} layers with top-{work.num_topk} of {work.E}"
        raise InputError(f"model {model.name} has {sizes}, but {held}; name the model that was recorded.")
    remarks = [*_remarks(work, options, trace), *_of_other_model(found, model, options)]
    for remark in remarks:
        if progress is not None:
            progress.note(f"warning: {remark}")
    return _Dealt(work, model, names, routed)


def _told(trace: RoutingTrace, paths: tuple[str, ...], model: Model | None) -> tuple[RoutingTrace, Model]:
    """Returns the trace and its model. If `model` is None, the name or shape in the trace determines the model."""
    if model is not None:
        return trace, model
    model = model_told(trace.model, trace.L, trace.num_experts, trace.K)
    if model.num_layers == trace.L and (trace.moe_layer_L != model.moe_layer_L).any():
        # A recording without layer numbers gets the model's layer numbers, exactly as if the user had named the model.
        return read_trace(paths, model), model
    return trace, model


def _counts(work: Workload, options: CaseOptions, num_groups: int) -> Workload:
    """Returns the counts after checking that no option contradicts them."""
    dealt = work.dealt is None or not is_of_counts(work.dealt) or kind_of(options.traces[0]) == "workload"
    for name, value in (("--tokens-per-rank", options.tokens_per_rank), ("--shuffle", options.shuffle or None)):
        if value is not None and (dealt or name == "--shuffle"):
            raise InputError(f"{name} deals a TRACE; a workload file is dealt already, so leave it out.")
    if (options.ranks or work.G) * num_groups != work.G:
        cure = f"leave --ranks {options.ranks} (or --gpus) out, or give {work.G}"
        raise InputError(f"the workload file was dealt to {work.G} ranks; {cure}.")
    if options.stage not in (None, work.stage):
        raise InputError(f"the workload file is of stage {work.stage}; leave --stage {options.stage} out.")
    return work if options.micro_steps is None else work[: options.micro_steps]


def _of_other_model(found: RoutingTrace | Workload, model: Model, options: CaseOptions) -> list[str]:
    """Returns remarks if the model was guessed, or if it differs from the model that the files name."""
    if options.model is None:
        guessed = f"the routing does not name its model and has the shape of {model.name}; give --model if it is another one."
        return [] if found.model == model.name else [guessed]
    presets = {Model.preset_of(str(header_of(path).get("model") or "")) for path in options.traces} - {None, model.name}
    others = [other for other in map(Model.preset, sorted(map(str, presets))) if other.expert_bytes != model.expert_bytes]
    return [
        f"the routing was recorded with {other.name}, whose experts have {other.expert_bytes / 1e6:.1f} MB each; experts of"
        f" {model.name} have {model.expert_bytes / 1e6:.1f} MB."
        for other in others
    ]


def _remarks(work: Workload, options: CaseOptions, trace: RoutingTrace | None) -> list[str]:
    remarks = []
    whole = "recorded steps" if work.dealt is not None and is_of_counts(work.dealt) else "sequences"
    packer = "" if work.dealt is None else work.dealt.packer
    if packer.startswith(SPREAD):
        remarks.append(f"the counts do not name source ranks; each of {work.G} ranks gets an equal share of every expert's load.")
    repeats = 0 if trace is None or trace.L * trace.K < _MANY else trace.num_repeats()
    if repeats > _FEW * (tokens := int(work.tokens_MG.sum())):
        what = f"{repeats:,} tokens ({repeats / tokens:.0%}) have exactly the experts of the token before them in all layers"
        remarks.append(f"{what}, so the recording seems to repeat tokens.")
    if options.micro_steps is not None and options.micro_steps > work.M:
        remarks.append(f"--micro-steps {options.micro_steps}: there are only {work.M}.")
    if packer.endswith(SCALED):
        remarks.append("recorded steps with far more tokens were scaled down to --tokens-per-rank, with the same shares.")
    if work.dealt is not None and work.dealt.over_budget:
        over, budget = work.dealt.over_budget, work.G * work.dealt.tokens_per_rank
        what = "1 sequence is" if len(over) == 1 else f"{len(over)} sequences are"
        long = f"longer than a micro-step's budget of {budget} tokens (first number {over[0]})"
        remarks.append(f"{what} {long}; each is a micro-step of its own.")
    if work.dealt is not None and work.tokens_MG.max(initial=0) > 1.5 * work.dealt.tokens_per_rank:
        m, g = np.unravel_index(int(work.tokens_MG.argmax()), work.tokens_MG.shape)
        most, empty = int(work.tokens_MG[m, g]), int((work.tokens_MG == 0).sum())
        here = f"; {empty} of {work.tokens_MG.size} combinations of micro-step and rank have none" if empty else ""
        longest = f" and the longest has {int(trace.seq_len_Q.max()):,}" if trace is not None else ""
        long = f"rank {g} has {most:,} tokens in micro-step {m}, since {whole} are not cut{longest}{here}"
        remarks.append(f"{long}; a larger --tokens-per-rank than {work.dealt.tokens_per_rank} evens that out.")
    unknown = int(work.unknown_ML.max(axis=1).sum())
    if unknown:
        remarks.append(f"{unknown} of {tokens} tokens ({unknown / tokens:.1%}) have no recorded routing and are not counted.")
    return remarks


def source_ranks(options: CaseOptions) -> int:
    """Returns the value of --ranks. If it is missing, returns the number of ranks in the cluster file, or else the default."""
    if options.ranks is not None:
        return options.ranks
    if not is_file(options.cluster):
        return DEFAULT_RANKS
    return cluster_of(options.cluster, None, None, accept_fit=options.accept_fit).num_ranks


def require_divides(num_experts: int, ranks: int) -> None:
    """Raises InputError unless `ranks` divides the number of experts. Call this function before packing, which takes memory."""
    if num_experts % ranks:
        numbers = ", ".join(str(d) for d in range(1, num_experts + 1) if num_experts % d == 0)
        raise InputError(f"{num_experts} experts do not divide over {ranks} ranks; give --ranks one of {numbers}.")
