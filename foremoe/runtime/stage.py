"""Stages, which give the runtime its slots, its weights and its order of passes, either with a plan or without one."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.distributed.group import Group, first_fault
from foremoe.plan.plan import Plan
from foremoe.problem.schedule import Phase
from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.dispatch import Route
from foremoe.runtime.remap import Intervals, remap_planned
from foremoe.runtime.replay import ReplayedRows
from foremoe.transfer.engine import Engine
from foremoe.transfer.residency import Residency
from foremoe.transfer.timeline import Timeline

# Letters: T tokens, K top-k, M micro-steps, L layers, E experts, S slots of a rank, B base slots, P physical slots of all ranks.


class Stage(abc.ABC):
    """Running stage of one rank. It counts the passes of every layer to determine the micro-step of each call."""

    num_slots: int  # slots of a rank

    def __init__(self, home_slot_LE: Array, device: torch.device) -> None:
        self.num_layers = len(home_slot_LE)
        self._home_slot_LE = torch.from_numpy(home_slot_LE.astype(np.int64)).to(device)
        self._num_done = {phase: [0] * self.num_layers for phase in Phase}
        self.fell_back: list[tuple[int, int]] = []
        self.drift: dict[tuple[int, int], torch.Tensor] = {}  # (micro-step, layer) -> pairs that are not planned
        self.served: dict[tuple[int, int], list[int]] = {}  # (micro-step, layer) -> pairs that each slot of this rank served

    @abc.abstractmethod
    def use(self, layer: int, in_backward: bool) -> tuple[int, Phase]:
        """Returns the micro-step whose forward pass or recomputation now runs in a layer, and the phase of this use."""

    @abc.abstractmethod
    def slots(self, micro_step: int, layer: int, topk_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the physical slot of each pair and the number of pairs that the plan does not contain."""

    def replayed(self, micro_step: int, layer: int, topk_TK: torch.Tensor) -> Route | None:
        """Returns the route that was computed for a row when the stage began. Returns None on all ranks if there is no route."""
        return None

    def verdict(self) -> str:
        """Returns the reason why the stage's results must not be used, or an empty string.

        The result is the same on all ranks. Collective if the stage has a plan.
        """
        return ""

    def prepare(self, micro_step: int, layer: int, phase: int) -> bool:
        """Does the host's part of fetching weights before tokens are exchanged. Returns True if all replicas are available."""
        return True

    @abc.abstractmethod
    def weights(self, micro_step: int, layer: int, phase: int) -> Residency:
        """Returns the content of the slots. Called just before the experts' matrix products."""

    def gradients(self, micro_step: int, layer: int) -> None:  # noqa: B027 (without a plan they were added at home)
        """Records that the backward pass of the row's experts is done."""

    def release(self, micro_step: int, layer: int, phase: int) -> None:
        """Ends the use, so that its buffers may be filled again."""
        self._num_done[Phase(phase)][layer] += 1

    def launch(self) -> None:  # noqa: B027 (without a plan nothing waits for it)
        """Starts the transfers that may run after this use. Called when the last exchange of the use is queued."""

    def fall_back(self, micro_step: int, layer: int) -> None:
        """Makes the row run with all experts at home. Called after all ranks have agreed to do so."""
        self.fell_back.append((micro_step, layer))

    @abc.abstractmethod
    def end(self, *, partial: bool) -> Timeline | None:
        """Ends the stage. Collective if the stage has a plan."""

    def at_home(self, layer: int, topk_TK: torch.Tensor) -> torch.Tensor:
        """Returns the home slot of each pair's expert, int64 [T, K]."""
        return self._home_slot_LE[layer][topk_TK.long()]

    def counts(self) -> tuple[Array, Array]:
        """Returns drift_ML and served_MLS of `StageSummary`. Both are zero for rows that did not run."""
        drift_ML = np.zeros((self.num_micro_steps, self.num_layers), np.int64)
        served_MLS = np.zeros((*drift_ML.shape, self.num_slots), np.int64)
        if self.drift:  # read all at once, because each read waits for the device
            drift_ML[tuple(np.array([*self.drift]).T)] = torch.stack([*self.drift.values()]).cpu().numpy()
        for row, num_S in self.served.items():
            served_MLS[row] = num_S
        return drift_ML, served_MLS

    @property
    def num_micro_steps(self) -> int:
        """Number of micro-steps, M."""
        return max(self._num_done[Phase.FORWARD])


class HomeStage(Stage):
    """Stage without a plan, in which every pair goes to its expert's home. Any number of micro-steps may run in any order."""

    def __init__(self, bank: ExpertBank) -> None:
        super().__init__(bank.home_LE, bank.device)
        self.bank, self.num_slots = bank, bank.num_base
        self._weights: dict[tuple[int, bool], Residency] = {}

    def use(self, layer: int, in_backward: bool) -> tuple[int, Phase]:
        phase = Phase.BACKWARD if in_backward else Phase.FORWARD
        return self._num_done[phase][layer], phase

    def slots(self, micro_step: int, layer: int, topk_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.at_home(layer, topk_TK), torch.zeros((), dtype=torch.int64)

    def weights(self, micro_step: int, layer: int, phase: int) -> Residency:
        key = layer, phase == Phase.BACKWARD
        if key not in self._weights:
            experts = self.bank.expert_LB[layer].tolist()
            weights = tuple(self.bank.home(layer, e) for e in experts)
            grads = tuple(self.bank.main_grad(layer, e) for e in experts) if phase == Phase.BACKWARD else None
            self._weights[key] = Residency(tuple(experts), weights, grads, True)
        return self._weights[key]

    def end(self, *, partial: bool) -> None:
        return None


class PlannedOrder:
    """Order in which micro-steps run through each layer according to a plan's schedule."""

    def __init__(self, plan: Plan) -> None:
        uses = plan.header.schedule.uses(plan.L)
        self._order = {
            phase: [uses.micro_step_U[(uses.layer_U == layer) & (uses.phase_U == phase)].tolist() for layer in range(plan.L)]
            for phase in Phase
        }

    def use(self, layer: int, in_backward: bool, num_done: Mapping[Phase, Sequence[int]]) -> tuple[int, Phase]:
        """Returns the micro-step and the phase of the use, as described in `Stage.use`.

        Args:
            num_done: For each phase, the number of times that each layer has run.
        """
        phase = Phase.FORWARD
        if in_backward:
            # The recomputation of layers in a block is a separate use.
            phase = Phase.REFORWARD if self._order[Phase.REFORWARD][layer] else Phase.BACKWARD
        order, done = self._order[phase][layer], num_done[phase][layer]
        if done >= len(order):
            surplus = f"{phase.name.lower()} once more than the {len(order)} times of the plan's schedule"
            raise InputError(f"layer {layer} runs {surplus}; end the stage first, or plan all micro-steps.")
        return order[done], phase


class PlannedStage(Stage):
    """Stage that follows a plan. The engine has already begun the plan.

    `split_MLP` is the number of pairs that the plan sends from this source to each slot. `replay` holds the known rows.
    """

    def __init__(
        self, engine: Engine, plan: Plan, split_MLP: Array, device: torch.device, replay: ReplayedRows | None = None
    ) -> None:
        rank_LE, slot_LE = np.divmod(plan.home_LE, plan.B)
        super().__init__(rank_LE * plan.S + slot_LE, device)
        self.num_slots, self._engine, self._plan, self._replay = plan.S, engine, plan, replay
        self._order = PlannedOrder(plan)
        split = torch.from_numpy(np.array(split_MLP, np.int64)).to(device)
        expert = torch.from_numpy(plan.expert_MLGS.reshape(split_MLP.shape).astype(np.int64)).to(device)
        self._planned_ML = self._intervals(split, expert)

    def _intervals(self, split_MLP: torch.Tensor, expert_MLP: torch.Tensor) -> Any:
        """Returns the part of the plan that `remap` needs, for all rows at once."""
        return Intervals.of(split_MLP, expert_MLP, self._home_slot_LE)

    def use(self, layer: int, in_backward: bool) -> tuple[int, Phase]:
        return self._order.use(layer, in_backward, self._num_done)

    def slots(self, micro_step: int, layer: int, topk_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return remap_planned(topk_TK, self._planned_ML.row(micro_step, layer))

    def replayed(self, micro_step: int, layer: int, topk_TK: torch.Tensor) -> Route | None:
        found = None if self._replay is None else self._replay.route(micro_step, layer, topk_TK.shape)
        if self._replay is None or found is None:
            return None
        known_TK, route = found
        self._replay.compare(micro_step, layer, (topk_TK != known_TK).sum())
        return route

    def verdict(self) -> str:
        fault = "" if self._replay is None else self._replay.verdict()
        return f"{fault}, and were sent to the latter; drop this step, and leave out rows that are not replayed." if fault else ""

    def prepare(self, micro_step: int, layer: int, phase: int) -> bool:
        return self._engine.prepare(micro_step, layer, phase)

    def weights(self, micro_step: int, layer: int, phase: int) -> Residency:
        return self._engine.weights(micro_step, layer, phase)

    def gradients(self, micro_step: int, layer: int) -> None:
        self._engine.gradients(micro_step, layer)

    def release(self, micro_step: int, layer: int, phase: int) -> None:
        self._engine.release(micro_step, layer, phase)
        super().release(micro_step, layer, phase)

    def launch(self) -> None:
        self._engine.launch()

    def fall_back(self, micro_step: int, layer: int) -> None:
        self._engine.fall_back(micro_step, layer)
        super().fall_back(micro_step, layer)

    def end(self, *, partial: bool) -> Timeline:
        return self._engine.end(partial=partial)

    @property
    def num_micro_steps(self) -> int:
        return self._plan.M


def agree_on_split(group: Group, plan: Plan, split_MLP: Array, home_LE: Array, device: torch.device) -> Array:
    """Checks on all ranks that the splits of all sources add up to every slot's quota. Collective.

    Returns:
        received_GMLS: Number of pairs that the plan sends from each source to each of this rank's slots, int64.

    Raises:
        InputError: The splits do not add up to the quotas. Raised on all ranks with the same message.
    """
    G, M, L, S = group.size, plan.M, plan.L, plan.S
    answers = group.gather((split_fault(plan, split_MLP, home_LE, G), (M, L, S)))
    fault = first_fault([answer[0] for answer in answers])
    if not fault and any(shape != (M, L, S) for _, shape in answers):
        fault = "ranks were given plans of different sizes; plan once and share the plan."
    if not fault:
        received_GMLS = exchange_splits(group, split_MLP, device)
        fault = first_fault(group.gather(received_fault(plan, group.rank, received_GMLS.sum(0))))
    if fault:
        raise InputError(fault)
    return received_GMLS


def exchange_splits(group: Group, split_MLP: Array, device: torch.device) -> Array:
    """Returns the number of pairs that each source sends to each slot of this rank, int64 [G, M, L, S]. Collective."""
    M, L, P = split_MLP.shape
    sent_GMLS = np.moveaxis(np.array(split_MLP, np.int64).reshape(M, L, group.size, -1), 2, 0)
    sent = torch.from_numpy(np.ascontiguousarray(sent_GMLS).reshape(group.size, -1)).to(device)
    received, each = torch.empty_like(sent), [1] * group.size
    group.all_to_all(received, sent, each, each)
    received_GMLS: Array = received.view(group.size, M, L, P // group.size).cpu().numpy()
    return received_GMLS


def split_fault(plan: Plan, split_MLP: Array, home_LE: Array, num_ranks: int) -> str:
    """Returns the reason why this rank cannot run the plan with its split, or an empty string. Uses only data of this rank."""
    shape = (plan.M, plan.L, plan.G * plan.S)
    if np.shape(split_MLP) != shape:
        return f"split_MLP must have shape {shape}; got {np.shape(split_MLP)}. It is plan.rows_for(workload, rank)."
    if num_ranks != plan.G or plan.home_LE.shape != home_LE.shape or (plan.home_LE != home_LE).any():
        num_layers, num_experts = home_LE.shape
        planned = f"{plan.G} ranks, {plan.L} layers, {plan.E} experts and homes of its own"
        model = f"the model {num_layers} layers and {num_experts} experts"
        return f"the plan has {planned}; the group has {num_ranks} ranks and {model}. Plan for this model's home_LE."
    return ""


def received_fault(plan: Plan, rank: int, received_MLS: Array) -> str:
    """Returns a message about this rank's first slot for which the splits do not add up to the quota, or an empty string."""
    wrong = np.argwhere(received_MLS != plan.quota_MLGS[:, :, rank])
    if not len(wrong):
        return ""
    m, layer, s = wrong[0].tolist()
    received, quota = received_MLS[m, layer, s], plan.quota_MLGS[m, layer, rank, s]
    slot = f"slot {s} of rank {rank} in micro-step {m}, layer {layer}"
    cure = "Give every rank plan.rows_for(workload, rank)."
    return f"the splits given by all ranks send {received} pairs to {slot}; its quota is {quota}. {cure}"
