"""Metrics, combined over all ranks of a model copy (the EP groups of its pipeline ranks) and over the stages of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.utils.metric import Metric

from foremoe.integrations.megatron.known import COUNTED
from foremoe.integrations.megatron.summary import MegatronSummary
from foremoe.integrations.megatron.virtual import VirtualSummary
from foremoe.integrations.megatron.watch import Watched

# All ranks wait for the slowest one, and stages follow each other, so the largest values over ranks are summed.
_LARGEST_OF_RANKS = ("unplanned", "begin_exposed_s", "plan_s", "share_s", "pack_s", "begin_s", "exposed_s")
_LARGEST = ("slot_bytes", "route_bytes", "retired", "capacity_factor")
_MEANS = ("skew_before", "skew_after", "skew_served", "skew_at_1", "skew_at_2", "hottest", "unknown")
# Values of a plan, which are the same on all ranks of an EP group.
_OF_PLAN = (*_MEANS, "replicas", "fell_back", "known_rows", *(f"counted/{why}" for why in COUNTED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Metrics of one rank in a stage.

    Attributes:
        first: Whether the rank is the first of its EP group.
        num_rows: Number of rows of the plan, or 0 without a plan.
        values: The result of `MegatronSummary.metrics`, and values that the session adds.
    """

    first: bool
    num_rows: int
    values: dict[str, float]

    @staticmethod
    def of(first: bool, report: MegatronSummary | VirtualSummary | Watched | None, **more: float) -> Figures:
        """Returns the figures of a stage from its report, which is None without a plan, and from the session's values `more`."""
        if report is None:
            return Figures(first=first, num_rows=0, values=more)
        return Figures(first=first, num_rows=report.plan.N, values=report.metrics() | more)


class Totals:
    """Figures of all stages of one kind, accumulated since the last `take`."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._num_rows = 0

    def add(self, parts: Sequence[Figures]) -> None:
        """Adds a stage, given the figures of all ranks."""
        for name in dict.fromkeys(name for part in parts for name in part.values):
            having = [part for part in parts if name in part.values and (part.first or name not in _OF_PLAN)]
            so_far, values = self._values.get(name, 0.0), [part.values[name] for part in having]
            if name in _LARGEST:
                self._values[name] = max(so_far, *values)
            elif name in _LARGEST_OF_RANKS:
                self._values[name] = so_far + max(values)
            elif name in _MEANS:
                self._values[name] = so_far + sum(part.num_rows * value for part, value in zip(having, values, strict=True))
            else:
                self._values[name] = so_far + sum(values)
        self._num_rows += sum(part.num_rows for part in parts if part.first)

    def take(self) -> dict[str, Metric]:
        """Returns values by name and resets them. Their type tells veRL whether to take the maximum or mean over its ranks."""
        out = {}
        for name, value in self._values.items():
            if name in _MEANS:
                out[name] = Metric("mean", value / self._num_rows)
            else:
                # veRL's "sum" adds the values of a rank and averages over ranks.
                out[name] = Metric("max" if name in (*_LARGEST_OF_RANKS, *_LARGEST) else "sum", value)
        self._values, self._num_rows = {}, 0
        return out
