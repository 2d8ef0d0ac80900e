"""Joint planning by all ranks of an EP group. Each layer is planned by one rank, and all ranks get the whole plan.

Each rank receives the counts of all sources for the layers that it plans. It plans them, computes the split of every source, and
sends each source its part. No rank needs the counts of all layers from all sources.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any, TypeVar

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.base.compiled import compile_seconds
from foremoe.base.errors import InputError, TransferError
from foremoe.base.threads import call_in_thread
from foremoe.distributed.group import Group, reporting
from foremoe.levels import PathSolver
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.plan.split import split_over_sources
from foremoe.plan.transfers import TransferList
from foremoe.planner.answers import linked
from foremoe.planner.planner import Planner
from foremoe.problem.cost import Cost, CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.solvers.home.keep import Keep
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, P physical slots of all ranks.

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanningTask:
    """Planning task: the fields of `Problem` except for the counts. It must be the same on all ranks."""

    model: Model
    cluster: Cluster
    stage: str
    schedule: Schedule
    redundant: int
    moe_layer_L: Array
    slot_depth: int = 3
    cost: CostModel = dataclasses.field(default_factory=CostModel)
    replicas: str = "any"
    home_LE: Array | None = None

    def problem(self, workload: Workload, layers: Array) -> Problem:
        """Returns the problem of the given layers with the counts of `workload`."""
        return Problem.of(
            workload, self.cluster, redundant=self.redundant, model=self.model, cost=self.cost, slot_depth=self.slot_depth,
            schedule=self.schedule.cut(L=layers), replicas=self.replicas,
            home_LE=None if self.home_LE is None else self.home_LE[layers],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """Plan of all layers, the split of this source, and the seconds that this rank spent on planning."""

    plan: Plan
    split_MLP: Array  # int32, pairs that this source sends to every slot
    plan_s: float  # seconds to plan its own layers
    share_s: float  # seconds to exchange counts, placements and splits
    agreed: bool = False  # whether split and quotas come from the counts of all sources
    # (micro-step, layer) -> known experts [T, K] of this source's tokens
    routing: Mapping[tuple[int, int], Array] = field(default_factory=dict)
    problem: Problem | None = None  # problem of the layers that this rank planned, if any, with the counts of all sources


def plan_together(
    group: Group, planner: Planner, task: PlanningTask, load_MLE: Array, tokens_M: Array, *,
    device: torch.device | None = None, num_threads: int | None = None, plan_limit_s: float | None = None,
) -> Planned:  # fmt: skip
    """Plans a stage from this source's integer counts `load_MLE` and `tokens_M`. Collective.

    Messages use memory of `device`, which must be the rank's GPU if the group uses NCCL. If planning fails on any rank, all ranks
    raise an `InputError` with the reason. Planning fails if the planner raises an error, returns an invalid plan, or takes longer
    than `plan_limit_s` seconds, after which it is cancelled.
    """
    with reporting(group):
        begin = time.perf_counter()
        M, L, E = load_MLE.shape
        layers_G = _layers_by_rank(L, group.size)
        mine = layers_G[group.rank]
        workload = _workload(group, task, load_MLE, tokens_M, device)
        shared_s, at = time.perf_counter() - begin, time.perf_counter()
        fault, text, part, problem = "", "", dict[str, Array](), None
        split_GLMP = np.zeros((group.size, len(mine), M, 0), np.int32)
        if workload is not None:
            try:
                problem = task.problem(workload, mine)
                made, split_GLMP = _within(plan_limit_s, partial(_plan_layers, planner, problem, num_threads))
                text, part = made.header.planner, _arrays_of(made)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
        plan_s, at = time.perf_counter() - at, time.perf_counter()
        sizes = {"M": M, "G": group.size, "S": E // group.size + task.redundant, "E": E}
        form_G = [_form(_PARTS, L=len(layers), **sizes) for layers in layers_G]
        texts, parts = zip(*_gathered(group, fault, text, part, form_G), strict=True)
        plan = _linked(group, plan_limit_s, planner.path, *_merged(parts, layers_G, task, planner, texts[0]))
        split_MLP = _to_sources(group, split_GLMP, layers_G, plan.G * plan.S, device)
    share_s = shared_s + time.perf_counter() - at
    return Planned(plan=plan, split_MLP=split_MLP, plan_s=plan_s, share_s=share_s, agreed=True, problem=problem)


def homes_together(
    group: Group, planner: Planner, tasks: Sequence[PlanningTask], loads_MLE: Sequence[Array], tokens_M: Sequence[Array], *,
    device: torch.device | None = None, num_threads: int | None = None,
) -> Array:  # fmt: skip
    """Returns the homes for the stages of a step, int32 [L, E], like `Planner.homes`. One rank plans each layer. Collective."""
    _, L, E = loads_MLE[0].shape
    layers_G = _layers_by_rank(L, group.size)
    mine = layers_G[group.rank]
    with reporting(group):
        works = [_workload(group, *stage, device) for stage in zip(tasks, loads_MLE, tokens_M, strict=True)]
        fault, part = "", dict[str, Array]()
        if len(mine):
            try:
                problems = [t.problem(w, mine) for t, w in zip(tasks, works, strict=True) if w is not None]
                part = {"home_LE": planner.homes(*problems, num_threads=num_threads)}
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
        form_G = [_form({"home_LE": np.int32}, L=len(layers), E=E) for layers in layers_G]
        found = np.concatenate([made["home_LE"] for _, made in _gathered(group, fault, "", part, form_G)])
    home_LE: Array = found[np.argsort(np.concatenate(layers_G))]
    return home_LE


def _layers_by_rank(num_layers: int, num_ranks: int) -> list[Array]:
    return [np.arange(g, num_layers, num_ranks) for g in range(num_ranks)]


_Form = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]  # dtype and shape of the arrays of a part
_COST = tuple(f"{part.name}_ML" for part in dataclasses.fields(Cost))
# Arrays with a layer axis, of which every rank sends the part of its layers.
_PARTS = {name: field.dtype for name, field in Plan.array_fields().items() if "L" in field.axes and not field.optional}
_PARTS |= dict.fromkeys(_COST, np.dtype(np.float64))


def _form(dtypes: Mapping[str, Any], **sizes: int) -> _Form:
    """Returns dtype and shape of each array that a rank sends for its layers. Without layers, it sends no arrays."""
    axes = {name: name.rpartition("_")[2] for name in dtypes}
    return {name: (np.dtype(dtypes[name]), tuple(sizes[axis] for axis in axes[name])) for name in dtypes if sizes["L"]}


def _arrays_of(plan: Plan) -> dict[str, Array]:
    """Returns the arrays of one rank's layers, by the names of `_PARTS`."""
    arrays = {name: getattr(plan, name) for name in _PARTS if name not in _COST}
    return arrays | dict(zip(_COST, plan.cost_ML.parts().values(), strict=True))


def _gathered(
    group: Group, fault: str, text: str, part: dict[str, Array], form_G: Sequence[_Form]
) -> list[tuple[str, dict[str, Array]]]:
    """Returns the messages (text and arrays) from ranks with layers, or raises the same error on all ranks."""
    answers = group.gather((fault, text, part))
    _require_none([other for other, _, _ in answers], "plan its layers")
    for g, ((_, _, made), form) in enumerate(zip(answers, form_G, strict=True)):
        if {name: (x.dtype, x.shape) for name, x in made.items()} != form:
            raise TransferError(f"rank {g} sent arrays that do not match its layers; run the same foremoe on all ranks.", (g,))
    return [(theirs, made) for _, theirs, made in answers if made]


def _require_none(fault_G: Sequence[str], verb: str) -> None:
    """Raises the first fault on all ranks."""
    for g, fault in enumerate(fault_G):
        if fault:
            raise InputError(f"rank {g} could not {verb} ({fault}); fix the cause, or run this stage without a plan.")


def _linked(group: Group, plan_limit_s: float | None, path: PathSolver, plan: Plan, problem: Problem) -> Plan:
    """Returns the plan with links, which every rank chooses separately, or raises the same error on all ranks."""
    fault, found = "", plan
    try:
        found = _within(plan_limit_s, lambda _: linked(plan, path, problem))
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    _require_none(group.gather(fault), "choose the links of the copies")
    return found


def _workload(group: Group, task: PlanningTask, load_MLE: Array, tokens_M: Array, device: torch.device | None) -> Workload | None:
    """Returns the counts of all sources for the layers of this rank, or None if it has no layers. Collective."""
    shape = load_MLE.shape
    answers = group.gather((shape, np.asarray(tokens_M, np.int64)))
    if any(other != shape for other, _ in answers):
        raise InputError(f"ranks have counts of different sizes: {sorted({other for other, _ in answers})}; give all the same.")
    tokens_MG = np.stack([tokens for _, tokens in answers], axis=1)
    layers_G = _layers_by_rank(shape[1], group.size)
    load_MLGE = _by_owner(group, load_MLE, layers_G, device)
    if not len(layers_G[group.rank]):
        return None
    num_topk = task.model.num_topk
    whole = (load_MLGE.sum(axis=(2, 3)) == num_topk * tokens_MG.sum(axis=1)[:, None]).all()
    return Workload.from_counts(
        load_MLGE, num_topk=num_topk, stage=task.stage, tokens_MG=tokens_MG if whole else None,
        moe_layer_L=task.moe_layer_L[layers_G[group.rank]],
    )  # fmt: skip


def _by_owner(group: Group, load_MLE: Array, layers_G: list[Array], device: torch.device | None) -> Array:
    """Returns the counts of all sources for the layers that this rank plans, int32 [M, L of this rank, G, E]."""
    M, _, E = load_MLE.shape
    load_LME = load_MLE.transpose(1, 0, 2)[np.concatenate(layers_G)]
    sent = torch.from_numpy(np.ascontiguousarray(load_LME, np.int32).reshape(-1, M * E)).to(device)
    num_mine = len(layers_G[group.rank])
    received = torch.empty(group.size * num_mine, M * E, dtype=torch.int32, device=device)
    group.all_to_all(received, sent, [num_mine] * group.size, [len(layers) for layers in layers_G])
    load_GLME = received.cpu().numpy().reshape(group.size, num_mine, M, E)
    return np.ascontiguousarray(load_GLME.transpose(2, 1, 0, 3))


def _plan_layers(planner: Planner, problem: Problem, num_threads: int | None, cancel: Event) -> tuple[Plan, Array]:
    """Plans one rank's layers. Returns the plan and the split of every source, [G, L, M, P]."""
    # `homes_together` runs the home level over all stages. Planning only these layers could lead to other homes.
    plan, summary = dataclasses.replace(planner, home=Keep()).plan(problem, num_threads=num_threads, cancel=cancel)
    if not cancel.is_set():  # otherwise the caller no longer waits, and the cause is already known
        summary.log_warnings()
    plan.check(problem)
    assert problem.load_NGE is not None
    sources = problem.load_NGE, plan.expert_NGS, plan.quota_NGS, problem.cluster.node_of_rank_G
    split_GNP = [split_over_sources(*sources, g, demand_NVE=problem.counts().demand_NVE) for g in range(plan.G)]
    split_GLMP = np.stack(split_GNP).reshape(plan.G, plan.M, plan.L, -1).transpose(0, 2, 1, 3)
    return dataclasses.replace(plan, transfers=TransferList.none()), split_GLMP


def _within(plan_limit_s: float | None, plan: Callable[[Event], T]) -> T:
    """Calls `plan` and returns its result. Raises `TimeoutError` after `plan_limit_s` seconds, without compilation time."""
    cancel = Event()
    if plan_limit_s is None:
        return plan(cancel)

    def work() -> T:
        try:
            return plan(cancel)
        except Exception:
            raise
        except BaseException as error:  # a solver that exits its thread must not exit the program
            raise RuntimeError(f"the planner raised {type(error).__name__}: {error}") from error

    until = time.perf_counter() - compile_seconds()[0] + plan_limit_s
    made = call_in_thread(work, "planning")
    try:
        while not made.done():
            left_s = until - time.perf_counter() + compile_seconds()[0]
            if left_s <= 0:
                raise TimeoutError(f"planning took longer than {plan_limit_s:g} s")
            wait([made], max(left_s, 0.1))
    finally:
        cancel.set()  # the result is no longer needed
    return made.result()


def _merged(
    parts: Sequence[dict[str, Array]], layers_G: list[Array], task: PlanningTask, planner: Planner, text: str
) -> tuple[Plan, Problem]:
    """Returns one plan of all layers, with transfers on default links, and its problem without sources, for the path level.

    `text` is the description of the planner that ran, from one rank's plan.
    """
    order = np.argsort(np.concatenate(layers_G))

    def whole(name: str) -> Array:
        axis = name.rpartition("_")[2].index("L")
        return np.concatenate([part[name] for part in parts], axis=axis).take(order, axis)

    arrays = {name: whole(name) for name in _PARTS if name not in _COST}
    cost_ML = Cost(**{part.name: whole(name) for part, name in zip(dataclasses.fields(Cost), _COST, strict=True)})
    problem = Problem(
        model=task.model, cluster=task.cluster, cost=task.cost, stage=task.stage, schedule=task.schedule,
        redundant=task.redundant, slot_depth=task.slot_depth, replicas=task.replicas, home_LE=arrays["home_LE"],
        load_MLE=arrays["load_MLE"], moe_layer_L=task.moe_layer_L,
    )  # fmt: skip
    header = dataclasses.replace(planner.header(problem, None), planner=text)
    return Plan(header=header, cost_ML=cost_ML, transfers=TransferList.none(), **arrays).rederived(), problem


def _to_sources(group: Group, split_GLMP: Array, layers_G: list[Array], num_slots: int, device: torch.device | None) -> Array:
    """Returns the split of this source from the ranks that planned each layer, int32 [M, L, P]."""
    G, num_mine, M, _ = split_GLMP.shape
    order = np.argsort(np.concatenate(layers_G))
    sent = torch.from_numpy(np.ascontiguousarray(split_GLMP).reshape(G * num_mine, M * num_slots))
    received = torch.empty(len(order), M * num_slots, dtype=torch.int32, device=device)
    group.all_to_all(received, sent.to(device), [len(layers) for layers in layers_G], [num_mine] * G)
    split_LMP = received.cpu().numpy().reshape(-1, M, num_slots)[order]
    return np.ascontiguousarray(split_LMP.transpose(1, 0, 2))
