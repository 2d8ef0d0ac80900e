"""Streams of the engine beside the model's, and what the model's stream has to wait for; on a CPU the host waits instead."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from foremoe.transfer.timeline import Wait

# The lowest of CUDA's priorities. Streams that backends and NCCL's private groups make for copies have it, too.
_LOWEST = 0


class SideStream:
    """Orders copies against the model's work without holding up the model's stream.

    Args:
        device: Of the model; on a CPU nothing here does anything.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=_LOWEST) if device.type == "cuda" else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes it the current stream within a block."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def follow(self, events: Iterable[torch.cuda.Event] = ()) -> None:
        """Waits for what the current stream has been given so far, and for events."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            for event in events:
                self._stream.wait_event(event)

    def mark(self) -> list[torch.cuda.Event]:
        """Records an event behind what it has been given so far; none on a CPU."""
        return [] if self._stream is None else [self._stream.record_event()]

    def synchronize(self) -> None:
        """The host waits for what it has been given so far."""
        if self._stream is not None:
            self._stream.synchronize()


class Landing:
    """Events behind copies that a use needs, until the model's stream waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events, self._waits = list[torch.cuda.Event](), list[Wait]()

    def add(self, events: Sequence[torch.cuda.Event], waits: list[Wait]) -> None:
        """Adds events of a copy; `waits` are those of its line in the log, the last of which gets the stream's."""
        self._events += events
        self._waits = waits

    def take(self) -> list[torch.cuda.Event]:
        """Returns the events; there are none left."""
        events, self._events = self._events, []
        return events

    def wait(self) -> None:
        """Makes the current stream wait; once."""
        if self._events:
            with Wait(self._device) as wait:
                for event in self.take():
                    torch.cuda.current_stream(self._device).wait_event(event)
            self._waits.append(wait)
