"""`Returns`: sends the gradients of replicas to their homes, where they are added in a fixed order."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foremoe.base.errors import TransferError
from foremoe.plan.programme import Return
from foremoe.transfer.base import Buffers, Copy, Tensors
from foremoe.transfer.carrier import Carrier
from foremoe.transfer.settings import EngineSettings
from foremoe.transfer.timeline import Event, Log, Wait


@dataclass(slots=True, eq=False)
class _Sent:
    """Gradient returns of one row that this rank sends or receives."""

    micro_step: int
    backend: int
    handle: Any
    start_s: float
    added: list[tuple[Return, Tensors]]  # arriving gradients, in key order
    buffers: set[int] = field(default_factory=set)  # buffers of this rank whose gradients are being read


class Returns:
    """The gradient returns of one rank.

    The gradient returns of a row start after the last exchange of its backward pass. They are added to `main_grad` at the first
    of four points: `prefetch` more rows have sent their gradients, a gradient buffer is needed again, more than `return_bytes`
    would be staged, or the plan ends. These points depend on the plan and not on timing, so the sums are the same in every run.
    An expert's gradients are added row by row, and within a row in the order of the replicas' ranks.

    If main gradients are bf16, the gradients returned to an expert are summed in float32 and added once, by `add_up` or at the
    end. Regardless of the number of replicas, a main gradient is then rounded only once more than without replicas. The sums take
    four bytes for each weight of the experts that receive gradients.

    If a home would have to stage more than the limit for one row, the gradients of this row are returned in rounds. Each round
    starts when the home has added the gradients of the previous round. Rounds are numbered over all ranks, and a rank waits only
    for earlier rounds, so there are no deadlocks.
    """

    def __init__(self, carrier: Carrier, buffers: Buffers, rank: int, settings: EngineSettings) -> None:
        self._carrier, self._buffers, self._rank = carrier, buffers, rank
        self._window, self._debug = max(settings.prefetch, 1), settings.debug
        self._limit_bytes, self.staged_bytes, self.most_staged_bytes = settings.return_bytes, 0, 0
        self._under_way: deque[_Sent] = deque()
        self._stale = list[int]()  # buffers whose gradients belong to an earlier use
        self._sums: dict[tuple[int, int], Tensors] = {}  # (layer, expert) -> sums to add to bf16 main gradients
        self.most_sum_bytes = 0
        self.log = Log()

    def send(self, micro_step: int, returns: Sequence[Return], buffer_of: Mapping[tuple[int, int], int]) -> None:
        """Starts the gradient returns of a row. `buffer_of` maps (layer, expert) to the buffer of its replica on this rank."""
        if not returns:
            return
        per_round = max(self._limit_bytes // self._gradient_bytes(returns[0], buffer_of), 1)
        for number in range(1 + max(one.turn for one in returns) // per_round):
            self._send_round(micro_step, [one for one in returns if one.turn // per_round == number], buffer_of)

    def _gradient_bytes(self, one: Return, buffer_of: Mapping[tuple[int, int], int]) -> int:
        """Returns the size of one gradient in bytes, which is the same for all experts."""
        away = one.src_rank == self._rank
        of = self._buffers.slot_grad(buffer_of[one.layer, one.expert]) if away else self._buffers.main_grad(one.layer, one.expert)
        return max(sum(grad.numel() * _wide(grad).itemsize for grad in of), 1)

    def _send_round(self, micro_step: int, returns: Sequence[Return], buffer_of: Mapping[tuple[int, int], int]) -> None:
        """Starts one round of a row's gradient returns, after adding earlier ones if the staged bytes would exceed the limit."""
        if not returns:
            return
        arriving_bytes = sum(self._gradient_bytes(one, buffer_of) for one in returns if one.dst_rank == self._rank)
        while self._under_way and arriving_bytes and self.staged_bytes + arriving_bytes > self._limit_bytes:
            self._settle_oldest()
        backend = self._carrier.backends.return_backend()
        assert backend >= 0, "rows run at home if no backend can send gradients home"
        sent = _Sent(micro_step, backend, None, self._carrier.clock(), [])
        copies = []
        for one in returns:
            ends: tuple[Tensors | None, Tensors | None]
            if one.src_rank == self._rank:
                buffer = buffer_of[one.layer, one.expert]
                sent.buffers.add(buffer)
                ends = self._buffers.slot_grad(buffer), None
            else:
                totals = self._buffers.main_grad(one.layer, one.expert)
                arriving = [torch.empty_like(grad, dtype=_wide(grad)) for grad in totals]
                sent.added.append((one, arriving))
                ends = None, arriving
            copies.append(Copy(*one[:5], *ends))
        try:
            self._carrier.starts.follow()
            with self._carrier.starts.current():
                sent.handle = self._carrier.backends[backend].start(copies)
        except Exception as error:
            raise self._lost(sent, error) from error
        self._under_way.append(sent)
        self.staged_bytes += arriving_bytes
        self.most_staged_bytes = max(self.most_staged_bytes, self.staged_bytes)
        while len(self._under_way) > self._window:
            self._settle_oldest()

    def settle(self, buffer: int | None = None) -> None:
        """Adds gradient returns in flight, either all of them or only up to the row that still reads the gradient of `buffer`."""
        while self._under_way and (buffer is None or any(buffer in sent.buffers for sent in self._under_way)):
            self._settle_oldest()

    def expect(self, buffers: Iterable[int]) -> None:
        """Announces that the current use will add to the gradients in these buffers."""
        self._stale = list(buffers)

    def renew(self) -> None:
        """Zeroes the gradients in announced buffers, once per announcement, after gradient returns that still read them."""
        while self._stale:
            buffer = self._stale.pop()
            self.settle(buffer)
            with torch.no_grad():
                for grad in self._buffers.slot_grad(buffer):
                    grad.zero_()

    def _settle_oldest(self) -> None:
        sent = self._under_way.popleft()
        try:
            with Wait(self._carrier.device) as wait:
                self._carrier.backends[sent.backend].wait(sent.handle, self._carrier.timeout_s)
        except Exception as error:
            raise self._lost(sent, error) from error
        waits, ready_s = [wait], self._carrier.clock()
        for one, arrived in sent.added:
            self._add(one, arrived)
            name, size = self._carrier.backends.names[sent.backend], sum(x.nbytes for x in arrived)
            src = sent.micro_step, one.layer, one.expert, one.src_rank
            self.log.add(Event("gradient", *src, name, size, sent.start_s, ready_s, 0.0, "done"), waits)
            waits = []  # the row was awaited only once
            self.staged_bytes -= size
        if self._debug:
            for buffer in sent.buffers:
                for grad in self._buffers.slot_grad(buffer):
                    grad.fill_(float("nan"))

    def add_up(self, layer: int | None = None) -> None:
        """Adds the float32 sums to bf16 main gradients, either for all layers or for one that will not receive more gradients."""
        for key in [key for key in self._sums if layer in (None, key[0])]:
            for total, part in zip(self._buffers.main_grad(*key), self._sums.pop(key), strict=True):
                total.add_(part)

    def _add(self, one: Return, arrived: Tensors) -> None:
        totals, key = self._buffers.main_grad(one.layer, one.expert), (one.layer, one.expert)
        if totals[0].dtype == torch.bfloat16:
            if key not in self._sums:
                self._sums[key] = arrived
                sum_bytes = sum(part.nbytes for sums in self._sums.values() for part in sums)
                self.most_sum_bytes = max(self.most_sum_bytes, sum_bytes)
                return
            totals = self._sums[key]
        for total, part in zip(totals, arrived, strict=True):
            total.add_(part)

    def _lost(self, sent: _Sent, error: Exception) -> TransferError:
        ranks = error.ranks if isinstance(error, TransferError) else ()
        lost = f"gradients of micro-step {sent.micro_step} did not arrive over {self._carrier.backends.names[sent.backend]}"
        cure = "end the job, because no rank may take this optimizer step"
        return TransferError(f"{lost} ({error}); {cure}.", ranks or (self._rank,))


def _wide(grad: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which gradients are sent and summed."""
    return torch.float32 if grad.dtype == torch.bfloat16 else grad.dtype
