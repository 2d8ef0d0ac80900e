"""A stopwatch that repeats work on all ranks and returns the median time. The slowest rank determines the time of a repeat."""

import time
from collections.abc import Callable

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.distributed.group import Group

_FEWEST, _MOST = 3, 40
AHEAD_CYCLES = 12_000_000  # cycles of a GPU's clock, about six milliseconds, in which two layers can be launched

Lap = Callable[[], None]


def one_lap(run: Callable[[], object]) -> Callable[[Lap], None]:
    """Returns a function that calls `run` and then ends its only lap."""

    def timed(lap: Lap) -> None:
        run()
        lap()

    return timed


class Stopwatch:
    """A stopwatch for functions that run on all ranks of a group. Every method is collective.

    On a GPU, laps are measured in device time. The device is kept busy before each lap, so that the host can launch kernels
    ahead, as in a training step that waits for the device. The stopwatch therefore measures the work and not the launches, unless
    the launches take longer than the work.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device

    def laps(self, run: Callable[[Lap], None], budget_s: float) -> list[tuple[float, float]]:
        """Returns (median, spread) of every lap of `run`, measured with `repeats`."""
        low, middle, high = np.quantile(self.repeats(run, budget_s), (0.25, 0.5, 0.75), axis=0)
        return [(float(m), float((h - w) / m) if m > 0 else 0.0) for w, m, h in zip(low, middle, high, strict=True)]

    def repeats(self, run: Callable[[Lap], None], budget_s: float) -> Array:
        """Returns the times of all laps on the slowest rank in seconds, float64 [repeats, laps].

        The number of repeats is as large as the budget allows, but at least 3. `run` must call its argument at the end of every
        lap. The time after the last lap is not counted.
        """
        begin_s = time.perf_counter()
        self._once(run)  # to warm up
        first_s = max(self.group.gather(time.perf_counter() - begin_s))
        repeats = int(np.clip(budget_s / max(first_s, 1e-9) - 1, _FEWEST, _MOST))
        mine = [self._once(run) for _ in range(repeats)]
        return np.array(self.group.gather(mine)).max(axis=0)

    def second(self, run: Callable[[], object]) -> float:
        """Calls `run` twice and returns the time of the second call in seconds, on the slowest rank."""
        return max(self.group.gather([self._once(one_lap(run))[0] for _ in range(2)][1]))

    def _once(self, run: Callable[[Lap], None]) -> list[float]:
        self.group.barrier()
        if self.device.type == "cuda":
            return self._once_on_gpu(run)
        found: list[float] = []
        begin_s = time.perf_counter()

        def lap() -> None:
            nonlocal begin_s
            now_s = time.perf_counter()
            found.append(now_s - begin_s)
            begin_s = now_s

        run(lap)
        return found

    def _once_on_gpu(self, run: Callable[[Lap], None]) -> list[float]:
        stream = torch.cuda.current_stream(self.device)
        mark = lambda: stream.record_event(torch.cuda.Event(enable_timing=True))  # noqa: E731
        stream.synchronize()

        def ahead() -> torch.cuda.Event:
            torch.cuda._sleep(AHEAD_CYCLES)
            return mark()

        ends: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        begin = ahead()

        def lap() -> None:
            nonlocal begin
            ends.append((begin, mark()))
            begin = ahead()

        run(lap)
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in ends]
