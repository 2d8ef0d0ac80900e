"""`Engine`: executes a plan's transfers while the model runs, fetches weights before they are used, and handles failures."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch.distributed as dist

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.agreement import require_same
from foremoe.distributed.group import Group, as_group, reporting
from foremoe.plan.plan import Plan
from foremoe.plan.programme import use_text
from foremoe.problem.schedule import Phase
from foremoe.transfer.admission import refusal, require_agreement
from foremoe.transfer.backends import BackendSet, class_name, default_backends, resolve_backend
from foremoe.transfer.base import Buffers
from foremoe.transfer.carrier import Carrier
from foremoe.transfer.contents import DebugContents, HomeWatch, watch_homes
from foremoe.transfer.departures import Departures
from foremoe.transfer.residency import Residencies, Residency, SlotContents
from foremoe.transfer.returns import Returns
from foremoe.transfer.settings import EngineSettings
from foremoe.transfer.timeline import Timeline

# Letters: S slots of a rank, B base slots, C copies.


class Engine:
    """Executes the transfers of one plan after another on one rank.

    For each use, in the order of the plan's schedule, call ``prepare(m, l, phase)``, exchange tokens, ``weights(m, l, phase)``,
    compute, ``gradients(m, l)`` in backward, ``release(m, l, phase)``, exchange tokens, and ``launch()``. The last call allows
    copies into buffers that this use has read. If layers are recomputed one by one, request the weights of the backward use
    before recomputation and release them after backward. Recomputing a longer block is a separate use.

    If a pull fails, this rank repeats it over another backend. If a two-sided backend fails, all ranks retire it at a pass
    boundary. If a row lacks replicas in forward, it runs at home on all ranks. In backward, every rank ends the step with an
    error that names the cause. After a `TransferError`, only `close` may be called.

    Args:
        buffers: Experts of the model and slots on this rank.
        group: EP group, given as a `Group`, a process group, or None for all ranks.
        settings: Settings, which must be the same on all ranks. Creating an engine is collective and compares them.
        options: Fields of `EngineSettings` that override `settings`, such as ``backends=("collective",)``.
    """

    def __init__(
        self, buffers: Buffers, *, group: Group | dist.ProcessGroup | None = None,
        settings: EngineSettings | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.settings = EngineSettings.of(settings, **options)
        resolved = [resolve_backend(backend) for backend in self.settings.backends or ()]
        self._owns_group = not isinstance(group, Group)
        self.group = as_group(group)
        self.buffers, self._version, self.sum_bytes = buffers, 0, 0
        self._plan: Plan | None = None
        self._open: Residency | None = None
        self._watch: HomeWatch | None = None
        self._ended = ""  # reason why the engine cannot be used any more
        try:
            # Opening a backend may be collective.
            require_same(self.group, self.settings.agreed() | {"backends": ", ".join(map(class_name, resolved)) or "default"})
            chosen = resolved or [*map(resolve_backend, default_backends(buffers, self.group))]
            self._backends = BackendSet(chosen, self.group, buffers)
        except BaseException:
            if self._owns_group:
                self.group.close()
            raise
        self._carrier = Carrier(self._backends, buffers, self.group, self.settings.timeout_s)

    def begin(self, plan: Plan, *, same_weights: bool = False) -> None:
        """Starts a plan. Collective.

        Args:
            plan: Plan with the homes of `buffers`, the same on all ranks. Rank 0 checks it for all unless `Plan.checked` is True.
            same_weights: True if no rank has written a home weight since the previous plan began. Host stores then stay valid. If
                False, they are filled again.

        Raises:
            InputError: The plan does not match this engine or differs between ranks. Raised on all ranks.
        """
        self._require_usable()
        begin = time.perf_counter()
        if self._plan is not None:
            raise InputError("a plan is running; call end() before the next begin().")
        rank = self.group.rank
        refused = refusal(plan, rank, self.group.size, self.buffers.num_buffers, debug=self.settings.debug)
        if same_weights and not self._version:
            refused = "same_weights needs a plan before this one; omit it for the first."
        if plan.header.schedule.trains and all(backend.one_sided for backend in self._backends.backends):
            refused = refused or "a stage with gradients needs a two-sided backend to bring them home; add collective."
        watch, fault = watch_homes(plan, self.buffers, rank, self._watch if same_weights else None)
        require_agreement(self.group, plan, refused or fault, same_weights)
        self._watch, self._version = watch, self._version + (not same_weights)
        self._slots = SlotContents()
        self._residencies = Residencies(plan, rank, self.buffers, self._slots)
        with self._step():
            self._carrier.begin(plan, self.settings.prefetch, self._version)
            self._programme = self._carrier.programme
            self._contents = DebugContents(plan, self.buffers, self.group) if self.settings.debug else None
        self._returns = Returns(self._carrier, self.buffers, rank, self.settings)
        self._departures = Departures(self._carrier, self._returns, self.buffers, self._slots, debug=self.settings.debug)
        self._plan, self._next, self._open, self._returned = plan, 0, None, False
        self._fell_back: dict[tuple[int, int], None] = {}  # in the order of execution
        self._in_flight: set[tuple[int, int]] = set()  # rows with replicas whose backward has not run yet
        self._homes_only = plan.header.schedule.trains and self._backends.return_backend() < 0
        if self._contents is not None:
            self._contents.spoil_all()
        self._begin_s, self._carrier.zero_s = time.perf_counter() - begin, time.perf_counter()
        self.launch()

    def prepare(self, micro_step: int, layer: int, phase: int) -> bool:
        """Does the host's part of `weights` in advance, so that a GPU can exchange tokens before its stream waits for copies.

        Returns:
            False if this rank lacks a replica in forward, in which case the row must run at home on all ranks.

        Raises:
            InputError: The use is not the next one of the plan.
            TransferError: A replica that backward needs is missing.
            StaleWeights: Home weights changed while the plan was running.
        """
        plan, position = self._turn(micro_step, layer, phase)
        if self._open is None:
            with self._step():
                self._departures.launch()
                if position and self._programme.pass_U[position] != self._programme.pass_U[position - 1]:
                    self._agree(plan, position)
                assert self._watch is not None
                self._watch.check(layer)
                missing = self._carrier.arrive(position)
                self._slots.take(plan.transfers, self._programme.arrivals.get(position, ()), missing)
                self._open = self._resident(plan, micro_step, layer, phase)
        return self._open.complete

    def weights(self, micro_step: int, layer: int, phase: int) -> Residency:
        """Returns the content of this rank's slots for a use, after copies have arrived. It is fixed until the use is released.

        On a GPU, the current stream waits for copies, so call this just before the experts' products are queued. In backward,
        replica gradients are then zero. Calls `prepare` if the caller has not, and raises the same errors.
        """
        self.prepare(micro_step, layer, phase)
        assert self._open is not None
        with self._step():
            self._carrier.landing.wait()
            self._returns.renew()
        return self._open

    def fall_back(self, micro_step: int, layer: int) -> None:
        """Makes this row run at home, in forward and backward. All ranks must have agreed to do so."""
        plan, _ = self._turn(micro_step, layer, Phase.FORWARD)
        self._fell_back[micro_step, layer] = None
        self._in_flight.discard((micro_step, layer))
        self._open = self._resident(plan, micro_step, layer, Phase.FORWARD)

    def gradients(self, micro_step: int, layer: int) -> None:
        """Marks the backward pass of the row's experts as done on this rank, so that `launch` can exchange replica gradients."""
        _, position = self._turn(micro_step, layer, Phase.BACKWARD)
        if self._open is None or self._returned:
            raise InputError(f"call gradients once for micro-step {micro_step}, layer {layer}, between weights and release.")
        self._returned = True
        self._in_flight.discard((micro_step, layer))
        if (micro_step, layer) not in self._fell_back:
            self._departures.hold_gradients(micro_step, position)

    def settle(self, layer: int | None = None) -> None:
        """Waits until the gradients of all finished rows are at home. See ``Departures.settle``. All ranks call it together."""
        self._running()
        with self._step():
            self._departures.settle(layer)

    def release(self, micro_step: int, layer: int, phase: int) -> None:
        """Ends the use on this rank and frees its buffers, so that `launch` may fill them again."""
        _, position = self._turn(micro_step, layer, phase)
        if self._open is None:
            raise InputError(f"{use_text(micro_step, layer, phase)} is released before its weights were requested.")
        if phase == Phase.BACKWARD and not self._returned:
            lost = f"gradients({micro_step}, {layer}), which would lose those of replicas"
            raise InputError(f"{use_text(micro_step, layer, phase)} is released before {lost}; call it first.")
        self._departures.hold_buffers(position)
        self._open, self._next, self._returned = None, position + 1, False

    def launch(self) -> None:
        """Starts the transfers that were held back during a use: first gradients to their homes, then copies for later uses.

        Call it when the use's last exchange, for which all ranks wait, is queued. Otherwise the next `prepare` starts them.
        """
        self._running()
        with self._step():
            self._departures.launch()

    def end(self, *, partial: bool = False) -> Timeline:
        """Ends the plan after all gradients have reached their homes and no transfer is in flight. Collective.

        Args:
            partial: True if the stage stops early. All ranks must stop after the same use.

        Raises:
            InputError: Some uses did not run and `partial` is not set.
            TransferError: A transfer failed on any rank.
        """
        self._running()
        num_uses = len(self._programme.uses)
        if (self._next < num_uses or self._open is not None) and not partial:
            raise InputError(f"{num_uses - self._next} of {num_uses} uses were not run; run them, or call end(partial=True).")
        failure = None
        try:
            self._departures.launch()
            self._departures.settle()
            self._carrier.finish()
            if self._watch is not None:
                self._watch.check()
            if self._contents is not None:
                self._contents.check_homes()
        except TransferError as error:
            failure = error
        self.sum_bytes = self._returns.most_sum_bytes  # most bytes of float32 sums for bf16 main gradients
        answers = self.group.gather(("" if failure is None else str(failure), self._backends.failed()))
        self._backends.give_up([failed for _, failed in answers])
        if failure is not None:
            self._fail(failure)
        if failures := {g: text for g, (text, _) in enumerate(answers) if text}:
            g = min(failures)
            self._fail(TransferError(f"the step was ended by another rank (rank {g}: {failures[g]})", tuple(failures)))
        self._plan, self._residencies.homes = None, {}
        return Timeline(
            rank=self.group.rank, begin_s=self._begin_s, wall_s=self._carrier.clock(),
            events=tuple(sorted([*self._carrier.log.events(), *self._returns.log.events()], key=lambda e: e.ready_s)),
            fell_back=tuple(self._fell_back), retired=tuple(self._backends.names[b] for b in sorted(self._backends.retired)),
        ).logged()  # fmt: skip

    def close(self) -> None:
        """Closes all backends. It may be called twice or in the middle of a plan."""
        self._plan, self._ended = None, self._ended or "it was closed"
        with contextlib.closing(self.group) if self._owns_group else contextlib.nullcontext():
            self._carrier.close()

    def _resident(self, plan: Plan, m: int, layer: int, phase: int) -> Residency:
        """Returns the residency of a use."""
        at_home = (m, layer) in self._fell_back
        use = self._residencies.of(m, layer, phase, at_home)
        buffer_of = self._slots.buffer_of
        busy = [buffer_of[layer, e] for e in use.expert_S[plan.B :] if (layer, e) in buffer_of]
        if self._contents is not None:
            self._carrier.landing.wait()
            for buffer in busy:
                self._contents.check(*self._slots.expert_of[buffer], self.buffers.slot(buffer))
        if phase == Phase.BACKWARD:
            self._returns.expect(busy)
        elif phase == Phase.FORWARD and not at_home and self._residencies.replicas_ML[m, layer]:
            if self._homes_only:
                return dataclasses.replace(use, complete=False)
            if plan.header.schedule.trains:
                self._in_flight.add((m, layer))
        return use

    def _agree(self, plan: Plan, position: int) -> None:
        """Handles a pass boundary. From here on, rows run at home if no backend is left to send gradients home."""
        lost = self._carrier.agree(position, self._returns.settle)
        if lost and plan.header.schedule.trains and self._backends.return_backend() < 0:
            if self._in_flight:
                rows = f"{len(self._in_flight)} rows that already ran on replicas"
                lack = f"no two-sided backend is left to send home the gradients of {rows}"
                cure = "end the job, because no rank may take this optimizer step, and add a second two-sided backend"
                raise TransferError(f"{', '.join(lost)} failed and {lack}; {cure}.")
            self._homes_only = True

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Ends the step on this rank if a transfer fails in the block, and on the other ranks after any other error."""
        try:
            with reporting(self.group):
                yield
        except TransferError as error:
            self._fail(error)

    def _turn(self, m: int, layer: int, phase: int) -> tuple[Plan, int]:
        """Returns the running plan and the position of a use, which must be the next one."""
        plan = self._running()
        self._programme.require_turn(self._next, m, layer, phase)
        return plan, self._next

    def _running(self) -> Plan:
        self._require_usable()
        if self._plan is None:
            raise InputError("no plan is running; call begin(plan) first.")
        return self._plan

    def _require_usable(self) -> None:
        if self._ended:
            raise InputError(f"this engine cannot be used any more: {self._ended}; make a new one.")

    def _fail(self, error: TransferError) -> NoReturn:
        """Ends the step on this rank and reports the reason to the other ranks."""
        self._ended = f"a transfer failed ({error})"
        self.group.report(str(error))
        raise error
