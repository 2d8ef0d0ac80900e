"""StageSummary: what one stage did on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, array
from foremoe.transfer.timeline import Timeline

# Letters: M micro-steps, L layers, S slots of a rank.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSummary(ArrayValue):
    """One stage of one rank.

    Attributes:
        timeline: Timeline of the engine; None without a plan.
        drift_ML: int64, pairs of this rank that the plan did not know; they were served at home.
        served_MLS: int64, pairs that each of this rank's slots received.
        fell_back: (micro-step, layer) that ran at home placement because a replica could not be had.
        forward_cpu_s: CPU seconds of forward expert compute in the calling thread. With one intra-op thread that is all of it; on
            a GPU it is the launching alone.
        backward_cpu_s: The same of backward, with re-forward.
    """

    timeline: Timeline | None
    drift_ML: Array = array(np.int64)
    served_MLS: Array = array(np.int64)
    fell_back: tuple[tuple[int, int], ...]
    forward_cpu_s: float
    backward_cpu_s: float

    def to_dict(self) -> dict[str, Any]:
        """Totals, for metrics and JSON."""
        return {
            "drift": int(self.drift_ML.sum()),
            "served": int(self.served_MLS.sum()),
            "fell_back": len(self.fell_back),
            "forward_cpu_s": self.forward_cpu_s,
            "backward_cpu_s": self.backward_cpu_s,
            "timeline": None if self.timeline is None else self.timeline.to_dict(),
        }
