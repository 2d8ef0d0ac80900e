"""A stopwatch that repeats work on all ranks and returns the median time. The time of a repeat is that of the slowest rank."""

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
    """Wraps `run` as a function with a single lap."""

    def timed(lap: Lap) -> None:
        run()
        lap()

    return timed


class Stopwatch:
    """Times functions on all ranks of a group. Every method is collective.

    On a GPU, laps are measured in device time. The device is kept busy before each lap, so that the host can launch ahead, as in
    a step that waits for the device. The stopwatch thus times work, not launches, unless launches take longer than the work.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device

    def laps(self, run: Callable[[Lap], None], budget_s: float) -> list[tuple[float, float]]:
        """Returns (median, spread) of every lap of `run`, measured with `repeats`."""
        low, middle, high = np.quantile(self.repeats(run, budget_s), (0.25, 0.5, 0.75), axis=0)
        return [(float(m), float((h - w) / m) if m > 0 else 0.0) for w, m, h in zip(low, middle, high, strict=True)]

    def repeats(self, run: Callable[[Lap], None], budget_s: float) -> Array:
        """Returns the seconds of the slowest rank, float64 [repeats, laps].

        There are as many repeats as the budget allows, but at least 3. `run` calls its argument at the end of every lap. The time
        between the last lap and the end does not count.
        """
        begin_s = time.perf_counter()
        self._once(run)  # to warm up
        first_s = max(self.group.gather(time.perf_counter() - begin_s))
        repeats = int(np.clip(budget_s / max(first_s, 1e-9) - 1, _FEWEST, _MOST))
        mine = [self._once(run) for _ in range(repeats)]
        return np.array(self.group.gather(mine)).max(axis=0)

    def second(self, run: Callable[[], object]) -> float:
        """Returns the seconds of the slowest rank in the second run."""
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
