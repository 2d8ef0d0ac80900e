"""`Carrier`: sends a plan's weight copies over several backends and replaces backends that fail."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, StaleWeights
from foremoe.distributed.group import Group
from foremoe.plan.links import choose_links
from foremoe.plan.plan import Plan
from foremoe.plan.programme import Programme
from foremoe.plan.transfers import Link, TransferList
from foremoe.transfer.backends import NONE, BackendSet
from foremoe.transfer.base import HOST, Buffers, Copy
from foremoe.transfer.host_fill import FillError, agreed
from foremoe.transfer.streams import Landing, SideStream
from foremoe.transfer.timeline import Event, Log, Wait

# Letters: C copies of the whole plan.

_LAST_CALL_S = 0.05  # timeout for a backend that has already failed


@dataclass(slots=True, eq=False)
class Batch:
    """Copies that were started together on one backend."""

    backend: int
    copies: tuple[int, ...]
    handle: Any
    start_s: float
    done: bool = False
    error: Exception | None = None
    landed: Sequence[torch.cuda.Event] = ()  # on a GPU, recorded after the wait for the batch


class Carrier:
    """Sends and receives the weight copies of one rank.

    Each copy uses the first backend in the given order that serves its link, and all ranks choose the same one (`route_C`). If a
    one-sided pull fails, this rank repeats it at once over the other one-sided backends, without involving other ranks. If a
    two-sided backend fails on any rank, all ranks retire it at the next pass boundary, and its remaining copies get new links.

    On a GPU, one side stream starts copies and another one waits for them, so the model's stream waits only in `landing`.
    """

    def __init__(self, backends: BackendSet, buffers: Buffers, group: Group, timeout_s: float) -> None:
        self.backends, self.buffers, self.group, self.timeout_s = backends, buffers, group, timeout_s
        self._batches: list[Batch] = []
        self._batch_C: dict[int, Batch] = {}
        self.device = buffers.slot(0)[0].device if buffers.num_buffers else torch.device("cpu")
        self.starts, self._arrivals = SideStream(self.device), SideStream(self.device)
        self.landing = Landing(self.device)  # events of copies that `arrive` waited for

    def begin(self, plan: Plan, prefetch: int, version: int) -> None:
        """Starts a plan. Collective."""
        self.plan, self.version, self.zero_s = plan, version, time.perf_counter()
        self.log = Log()
        self.backends.forgive_pulls()  # two-sided backends remain retired
        self._batches, self._batch_C = [], {}
        backend_P = self.backends.by_link()
        chosen = plan.transfers if (backend_P[plan.transfers.link_C] != NONE).all() else self._rescheduled(backend_P)
        self.programme = Programme.of(plan, self.group.rank, prefetch, chosen)
        self.link_C = chosen.link_C
        self.route_C = backend_P[self.link_C]
        # After a backend was retired, rows with copies that no backend can send run at home.
        if (self.route_C == NONE).any() and not self.backends.retired:
            lost, num = Link(int(self.link_C[np.argmin(self.route_C)])), int((self.route_C == NONE).sum())
            lack = f"link, which none of {', '.join(self.backends.names)} serves"
            raise InputError(f"{num} copies of the plan need the {lost.name.lower()} {lack}; add a backend for it.")
        self.backends.publish(plan, self.programme, self.route_C, 0, version)

    def clock(self) -> float:
        """Returns the seconds that have passed since the plan began to run, at `zero_s`."""
        return time.perf_counter() - self.zero_s

    def start(self, position: int) -> None:
        """Starts the copies of a position after the work that is already queued on the current stream.

        Waits until this rank has published the weights that this use needs.
        """
        for backend in self.backends.backends:
            backend.advance(position)
        self.starts.follow(self.landing.take())  # unread copies must not land on top of the next ones
        self._launch(self.programme.starts.get(position, ()))

    def arrive(self, position: int) -> list[int]:
        """Waits for the copies that this rank needs at `position`, on a GPU through `landing`. Returns those that are missing."""
        missing = []
        for c in self.programme.arrivals.get(position, ()):
            batch = self._batch_C.pop(c, None)
            with Wait(self.device) as wait:
                if batch is not None and self._wait(batch, self._arrivals):
                    delivered, landed = batch.backend, batch.landed
                else:
                    delivered, landed = self._pull_elsewhere(c, batch)
            waits = [wait]
            self.landing.add(landed, waits)
            outcome = "missing" if delivered == NONE else "done" if delivered == self.route_C[c] else "failed over"
            if delivered == NONE:
                missing.append(c)
            self._record(c, batch, delivered, waits, outcome)
        return missing

    def agree(self, position: int, settle: Callable[[], None]) -> list[str]:
        """Retires the two-sided backends that have failed on any rank since the last pass boundary. Collective at each boundary.

        If no other backend could take over, the ranks do not communicate here, because they agree later to run rows with missing
        replicas at home. `position` is the position of the next use. `settle` is a function that waits for gradient returns,
        because they must not be lost with their backend. Returns the names of the newly retired backends, whose copies get other
        links.

        Raises:
            TransferError: Gradients were lost on any rank.
        """
        self._reap(position)
        if not self.backends.replaceable():
            return []
        lost = self.backends.give_up(self.group.gather(self.backends.failed()))
        if lost:
            agreed(self.group, settle, task="")
            self._reroute(lost, position)
        return [self.backends.names[b] for b in lost]

    def close(self) -> None:
        """Closes all backends, in any state."""
        self._batches, self._batch_C = [], {}
        self.backends.close()

    def _reroute(self, lost: Sequence[int], position: int) -> None:
        """Chooses other links for copies of lost backends that are needed from `position` on, and restarts those in flight."""
        again_C = np.isin(self.route_C, lost) & (self.programme.need_C >= position) & (self.programme.start_C <= position)
        # Copies of the lost backend must not land later, in a buffer that another copy has filled by then.
        for batch in self._batches:
            if batch.backend in lost:
                self._wait(batch)
        later_C, backend_P = self.programme.need_C >= position, self.backends.by_link()
        self.link_C = np.where(later_C, self._rescheduled(backend_P).link_C, self.link_C)
        self.route_C = np.where(later_C, backend_P[self.link_C], self.route_C)
        self.backends.publish(self.plan, self.programme, self.route_C, position, self.version)
        for start in range(position + 1):
            self._launch([c for c in self.programme.starts.get(start, ()) if again_C[c]])

    def _rescheduled(self, backend_P: Array) -> TransferList:
        """Returns the plan's copies, distributed again over the links that have a backend. `backend_P` is by `Link`."""
        head, allowed = self.plan.header, [link for link in Link if backend_P[link] != NONE]
        return choose_links(self.plan.transfers, self.plan.home_LE, head.cluster, head.model.expert_bytes, allowed)

    def finish(self) -> None:
        """Waits for all transfers that are still in flight, so that the weights may change afterwards."""
        self._reap(len(self.programme.uses))
        # Pulls read homes of other ranks, whose optimizers may step after all ranks have reached this point.
        self.starts.synchronize()
        self._arrivals.synchronize()
        for backend in self.backends.backends:
            backend.finish()

    def _launch(self, copies: Sequence[int]) -> None:
        """Starts copies in one batch per use and backend. Both ends form the same batches in the same order."""
        t, me, batches = self.plan.transfers, self.group.rank, dict[tuple[int, int], list[int]]()
        for c in copies:
            b = int(self.route_C[c])
            one_sided = self.backends.one_sided(b)
            if t.dst_C[c] != me and (one_sided or self.programme.home_C[c] != me):
                continue
            if one_sided and b in self.backends.sick:
                b = next(iter(self.backends.other_pulls(b)), NONE)
            if b != NONE:
                batches.setdefault((int(self.programme.need_C[c]), b), []).append(c)
        for (_, b), members in batches.items():
            self._start(b, members)

    def _start(self, b: int, members: list[int]) -> None:
        batch = Batch(b, tuple(members), None, self.clock())
        try:
            if b in self.backends.sick and not self.backends[b].one_sided:
                raise RuntimeError(f"{self.backends.names[b]} failed on this rank before")
            with self.starts.current():
                batch.handle = self.backends[b].start([self._copy(c, b) for c in members])
        except (FillError, StaleWeights):
            raise
        except Exception as error:
            self._failed(batch, error)
        self._batches.append(batch)
        for c in members:
            if self.plan.transfers.dst_C[c] == self.group.rank:
                self._batch_C[c] = batch

    def _copy(self, c: int, b: int) -> Copy:
        t, me, backend = self.plan.transfers, self.group.rank, self.backends[b]
        layer, expert, dst = int(t.layer_C[c]), int(t.expert_C[c]), int(t.dst_C[c])
        rank = int(self.programme.home_C[c])
        src = self.buffers.home(layer, expert) if rank == me and not backend.one_sided else None
        into = self.buffers.slot(int(t.buffer_C[c])) if dst == me else None
        return Copy(c, layer, expert, HOST if backend.links == {Link.HOST} else rank, dst, src, into)

    def _wait(self, batch: Batch, stream: SideStream | None = None) -> bool:
        """Waits for a batch on a side stream, by default the one that starts copies. Returns whether the copies are done."""
        if not batch.done and batch.error is None:
            try:
                timeout_s = _LAST_CALL_S if batch.backend in self.backends.sick else self.timeout_s
                with (stream or self.starts).current():
                    self.backends[batch.backend].wait(batch.handle, timeout_s)
                batch.done, batch.landed = True, (stream or self.starts).mark()
            except (FillError, StaleWeights):
                raise
            except Exception as error:
                self._failed(batch, error)
        return batch.done

    def _failed(self, batch: Batch, error: Exception) -> None:
        batch.error, batch.handle = error, None
        self.backends.failed_here(batch.backend, error)

    def _pull_elsewhere(self, c: int, failed: Batch | None) -> tuple[int, Sequence[torch.cuda.Event]]:
        """Pulls one copy at once over another one-sided backend. Returns the backend, or `NONE`, and the event after the copy."""
        self.starts.follow()
        for b in self.backends.other_pulls(failed.backend if failed is not None else NONE):
            try:
                with self.starts.current():
                    self.backends[b].wait(self.backends[b].start([self._copy(c, b)]), self.timeout_s)
            except Exception:  # not published there, outdated, or broken as well, so try the next one, then home placement
                continue
            return b, self.starts.mark()
        return NONE, ()

    def _reap(self, position: int) -> None:
        """Waits for batches whose use is over, because batches that this rank only sends have not been awaited before."""
        rest = []
        for batch in self._batches:
            if batch.error is None and self.programme.need_C[batch.copies[0]] >= position:
                rest.append(batch)
            else:
                self._wait(batch)
        self._batches = rest

    def _record(self, c: int, batch: Batch | None, delivered: int, waits: list[Wait], outcome: str) -> None:
        t, ready_s = self.plan.transfers, self.clock()
        from_host = self.backends.one_sided(delivered) and self.backends[delivered].links == {Link.HOST}
        rank = HOST if from_host else int(self.programme.home_C[c])
        num_bytes = sum(x.nbytes for x in self.buffers.slot(int(t.buffer_C[c])))
        self.log.add(
            Event(
                "weights", int(t.micro_step_C[c]), int(t.layer_C[c]), int(t.expert_C[c]), rank,
                "" if delivered == NONE else self.backends.names[delivered], num_bytes,
                ready_s if batch is None else batch.start_s, ready_s, 0.0, outcome,
            ),
            waits,
        )  # fmt: skip
