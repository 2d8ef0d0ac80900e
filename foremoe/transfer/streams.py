"""The engine's side streams, and the events for which the model's stream must wait. On a CPU, the host waits instead."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from foremoe.transfer.timeline import Wait

# CUDA's lowest priority, which streams of backends and of NCCL's private groups also have.
_LOWEST = 0


class SideStream:
    """Stream that orders copy operations relative to the model's work without delaying the model's stream.

    Args:
        device: Device of the model. On a CPU, the methods do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=_LOWEST) if device.type == "cuda" else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes this stream the current one within a block."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def follow(self, events: Iterable[torch.cuda.Event] = ()) -> None:
        """Makes this stream wait for the work that is already queued on the current stream, and for events."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            for event in events:
                self._stream.wait_event(event)

    def mark(self) -> list[torch.cuda.Event]:
        """Records an event after the work that is queued on this stream. Returns an empty list on a CPU."""
        return [] if self._stream is None else [self._stream.record_event()]

    def synchronize(self) -> None:
        """Makes the host wait for all work that is queued on this stream."""
        if self._stream is not None:
            self._stream.synchronize()


class Landing:
    """Events that mark the end of copies that a use needs. They are kept until the model's stream waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events, self._waits = list[torch.cuda.Event](), list[Wait]()

    def add(self, events: Sequence[torch.cuda.Event], waits: list[Wait]) -> None:
        """Adds the events of a copy. `waits` belong to the copy's log entry. The stream's wait is stored in the last of them."""
        self._events += events
        self._waits = waits

    def take(self) -> list[torch.cuda.Event]:
        """Removes all events and returns them."""
        events, self._events = self._events, []
        return events

    def wait(self) -> None:
        """Makes the current stream wait for all events, and removes them."""
        if self._events:
            with Wait(self._device) as wait:
                for event in self.take():
                    torch.cuda.current_stream(self._device).wait_event(event)
            self._waits.append(wait)
