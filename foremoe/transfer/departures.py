"""`Departures`: delays the transfers that a use makes possible until the exchange at the end of the use is queued."""

from foremoe.transfer.base import Buffers
from foremoe.transfer.carrier import Carrier
from foremoe.transfer.contents import spoil
from foremoe.transfer.residency import SlotContents
from foremoe.transfer.returns import Returns


class Departures:
    """Holds back the gradients of a use and the copies into the buffers that the use has freed.

    All ranks wait for the exchange, so no other transfer may occupy the links before it. The order is the same on all ranks: the
    gradients of a use come first, then the copies for later uses.
    """

    def __init__(self, carrier: Carrier, returns: Returns, buffers: Buffers, slots: SlotContents, *, debug: bool) -> None:
        self._carrier, self._returns, self._buffers, self._slots, self._debug = carrier, returns, buffers, slots, debug
        self._unsent: tuple[int, int] | None = None  # micro-step and position of the backward use whose gradients are held back
        self._freed: int | None = -1  # position of the use whose buffers are free, initially the one before all uses

    def hold_gradients(self, micro_step: int, position: int) -> None:
        """Allows `launch` to send the replica gradients of the use at `position`."""
        self._unsent = micro_step, position

    def hold_buffers(self, position: int) -> None:
        """Allows `launch` to start copies into the buffers of the use at `position`, which has ended."""
        self._freed = position

    def settle(self, layer: int | None = None) -> None:
        """Starts to send the gradients that are held back and waits until all gradients have reached their homes.

        Args:
            layer: Layer whose backward passes are all done. If main gradients are bf16, only this layer's sums are added to them.
        """
        self._send_gradients()
        self._returns.settle()
        self._returns.add_up(layer)

    def launch(self) -> None:
        """Starts all transfers that are held back."""
        self._send_gradients()
        position, self._freed = self._freed, None
        if position is None:
            return
        if self._debug:
            self._carrier.starts.follow()
            with self._carrier.starts.current():  # on which the next copies into these buffers start
                for buffer in self._carrier.programme.frees.get(position, ()):
                    spoil(self._buffers.slot(buffer))
        self._carrier.start(position + 1)

    def _send_gradients(self) -> None:
        if self._unsent is not None:
            (micro_step, position), self._unsent = self._unsent, None
            self._returns.send(micro_step, self._carrier.programme.returns.get(position, ()), self._slots.buffer_of)
