"""Metrics of a stage over all ranks of a model copy: every pipeline stage and every rank of its EP group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foremoe.integrations.megatron.summary import MegatronSummary

# What all ranks wait for, or must have room for.
_LARGEST = ("unplanned", "begin_exposed_s", "plan_s", "share_s", "pack_s", "begin_s", "exposed_s", "slot_bytes")
# Of a plan, which the ranks of an EP group share.
_OF_PLAN = ("replicas", "fell_back")
_MEANS = ("skew_before", "skew_after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One rank's part.

    Attributes:
        first: Whether the rank is the first of its EP group.
        num_rows: Rows of its plan; 0: it ran without one.
        values: `MegatronSummary.metrics` and what the session adds.
    """

    first: bool
    num_rows: int
    values: dict[str, float]

    @staticmethod
    def of(first: bool, report: MegatronSummary | None, **more: float) -> Figures:
        """From the report of the stage, None if there was no plan; `more`: seconds and flags of the session."""
        if report is None:
            return Figures(first=first, num_rows=0, values=more)
        return Figures(first=first, num_rows=report.plan.N, values=report.metrics() | more)


def join_figures(parts: Sequence[Figures]) -> dict[str, float]:
    """Of all ranks: the largest of times and memory, means over rows of skews, sums of everything else."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.values):
        having = [part for part in parts if name in part.values]
        if name in _LARGEST:
            out[name] = max(part.values[name] for part in having)
            continue
        if name in _OF_PLAN or name in _MEANS:
            having = [part for part in having if part.first]
        if name in _MEANS:
            num_rows = sum(part.num_rows for part in having)
            out[name] = sum(part.num_rows * part.values[name] for part in having) / num_rows
        else:
            out[name] = sum(part.values[name] for part in having)
    return out
