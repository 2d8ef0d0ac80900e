"""The table of strategies, made from rows of `compare` or `simulate_systems`, with units. Empty columns are left out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """One column of the table: the path to its value in a row, heading, unit, conversion factor, and number of decimals."""

    path: tuple[str, ...]
    heading: str
    unit: str = ""
    factor: float = 1.0
    digits: int = 3


COLUMNS = (
    Figure(("skew_mean",), "skew", "mean"),
    Figure(("skew_p99",), "skew", "p99"),
    Figure(("skew_max",), "skew", "max"),
    Figure(("gap_mean",), "load gap", "%", 100.0, 2),
    Figure(("replicas_per_layer",), "replicas", "per row", 1.0, 1),
    Figure(("moves_per_layer",), "moves", "per row", 1.0, 1),
    Figure(("max_fanout",), "fan-out", "copies", 1.0, 0),
    Figure(("bytes_by_link", "peer"), "peer", "MB per row", 1e-6, 1),
    Figure(("bytes_by_link", "rdma"), "RDMA", "MB per row", 1e-6, 1),
    Figure(("bytes_by_link", "host"), "host", "MB per row", 1e-6, 1),
    Figure(("simulated_stage_s",), "stage", "s"),
    Figure(("speedup_vs_static",), "speed-up", "stage"),
    Figure(("step_speedup",), "speed-up", "whole step"),
    Figure(("share_of_balanced",), "balanced", "% of it", 100.0, 1),
    Figure(("slots_per_rank",), "slots", "per rank", 1.0, 0),
    Figure(("peak_bytes",), "memory", "GB", 1e-9, 1),
    Figure(("host_bytes",), "host store", "GB a node", 1e-9, 1),
    Figure(("plan_us_per_layer",), "planning", "µs per row", 1.0, 1),
)


def strategy_table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns columns, cells and notes of the table. It has the columns in which any row has a number other than 0.

    A cell that is None is blank.
    """
    shown = [figure for figure in COLUMNS if any(_value(row, figure) for row in rows)]
    longest_s = max((_value(row, f) or 0.0 for row in rows for f in shown if f.unit == "s"), default=0.0)
    if longest_s < 10.0:
        shown = [f._replace(unit="ms", factor=1e3, digits=2) if f.unit == "s" else f for f in shown]
    return {
        "columns": [{"heading": f.heading, "unit": f.unit, "digits": f.digits} for f in shown],
        "rows": [
            {"name": str(row["solver"]), "cells": [_value(row, figure) for figure in shown], "note": str(row.get("note") or "")}
            for row in rows
        ],
    }


def _value(row: Mapping[str, Any], figure: Figure) -> float | None:
    value: Any = row
    for key in figure.path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None or isinstance(value, bool) or value != value:
        return None
    return float(value) * figure.factor
