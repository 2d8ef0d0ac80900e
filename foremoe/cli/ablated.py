"""Output lines of ``foremoe ablate``. Each distinct plan has one line, with the names of its planners and means over seeds."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from foremoe.cli.compare import PLANNED
from foremoe.cli.simulate import notes
from foremoe.cli.tables import SECONDS, Column, Spread, Table, flat, number, plural
from foremoe.cli.tones import tones
from foremoe.planner.planner import Planner

GAIN = "speedup_vs_static"
COLUMNS = {
    "planner": Column("planner", left=True), "ranks_per_node": Column("node"), "levels": Column("levels", left=True, rank=0),
    "redundant": Column("R", left=True, rank=0), "foresight": Column("foresight", left=True, rank=0), **PLANNED,
    "simulated_stage_s": Column("stage", SECONDS, rank=2), GAIN: Column("speed-up", number(3), rank=1),
}  # fmt: skip
# Fields whose values distinguish lines, in the order of the table. Lines that differ only in the seed are merged.
_WHERE, _WHAT = ("planner", "ranks_per_node"), ("levels", "redundant", "foresight")
_ANY = "any"


class Bar(NamedTuple):
    """One bar of the chart, with the name of a plan, its gain, and the spread of the gain over seeds."""

    label: str
    gain: float
    spread: float


class Lines(NamedTuple):
    """The table, bars and notes that `lines_of` returns."""

    table: Table
    bars: list[Bar]
    notes: list[str]


def lines_of(rows: Sequence[Mapping[str, Any]], planners: Mapping[str, Planner]) -> Lines:
    """Returns the table, bars and notes for the given rows. A row for which nothing was planned appears only in the notes."""
    by_case: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(tuple(row[key] for key in (*_WHERE, *_WHAT)), []).append(row)
    planned = {key: of for key, of in by_case.items() if all(row["n_solved"] for row in of)}
    lines: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    bars = []
    for where, keys in itertools.groupby(planned, key=lambda key: key[:2]):
        everything = [list(dict.fromkeys(row[key] for row in rows if row["planner"] == where[0])) for key in _WHAT]
        for of in _of_one_plan({key[2:]: planned[key] for key in keys}):
            figures = _means(of.figures) | dict(zip(_WHERE, where, strict=True))
            for i, block in enumerate(of.blocks):
                named = {key: _named(values, all_of) for key, values, all_of in zip(_WHAT, block, everything, strict=True)}
                if i == 0 and of.figures[0]["plan"] is None:
                    named["levels"] += f" ({plural(of.figures[0]['n_solved'], 'row')})"
                lines.append(figures | named if i == 0 else named)
                sources.append(figures if i == 0 else {})
                if i == 0 and figures[GAIN] is not None:
                    label = f"{named['levels']}, R = {named['redundant']}, {named['foresight']}"
                    more = [] if len(planners) == 1 else [str(where[0])]
                    bars.append(Bar(", ".join([*more, label]), figures[GAIN], getattr(figures[GAIN], "spread", 0.0)))
    several = [key for key in _WHERE if len({row[key] for row in rows}) > 1]
    columns = {key: column._replace(rank=0) if key in several else column for key, column in COLUMNS.items()}
    told = [{"note": row.get("note"), "name": _name(row, planners)} for row in rows]
    return Lines(Table(columns, lines, rows, tones(sources, GAIN)), bars, notes(told, "name"))


class _Same(NamedTuple):
    """Cases that have the same plans, as products of values of `_WHAT`, and the first case's rows, one for each seed."""

    blocks: list[tuple[list[Any], ...]]
    figures: list[Mapping[str, Any]]


def _of_one_plan(cases: Mapping[tuple[Any, ...], list[Mapping[str, Any]]]) -> Iterable[_Same]:
    groups: dict[Any, list[tuple[Any, ...]]] = {}
    for key, of in cases.items():
        plans = tuple(row["plan"] for row in of)
        groups.setdefault(key if None in plans else plans, []).append(key)
    for keys in groups.values():
        yield _Same(_blocks(keys), cases[keys[0]])


def _blocks(keys: Sequence[tuple[Any, ...]]) -> list[tuple[list[Any], ...]]:
    """Groups (levels, R, foresight) into few products: first levels that share (R, foresight), then foresights that share R."""
    pairs_of: dict[Any, list[tuple[Any, ...]]] = {}
    for levels, *pair in keys:
        pairs_of.setdefault(levels, []).append(tuple(pair))
    blocks: list[tuple[list[Any], ...]] = []
    for pairs, levels in _merged(pairs_of):
        slots_of: dict[Any, list[Any]] = {}
        for slots, view in pairs:
            slots_of.setdefault(view, []).append(slots)
        blocks += [(levels, list(slots), views) for slots, views in _merged(slots_of)]
    return blocks


def _merged(found: Mapping[Any, list[Any]]) -> list[tuple[tuple[Any, ...], list[Any]]]:
    """Returns the distinct lists of values. With each list are the keys that have it."""
    by_values: dict[tuple[Any, ...], list[Any]] = {}
    for key, values in found.items():
        by_values.setdefault(tuple(values), []).append(key)
    return list(by_values.items())


def _named(values: Sequence[Any], everything: Sequence[Any]) -> str:
    return _ANY if 1 < len(values) == len(everything) else ", ".join(map(str, values))


def _name(row: Mapping[str, Any], planners: Mapping[str, Planner]) -> str:
    """Returns the name of a row for use in a note. If nothing was planned for the row, the name includes R and foresight."""
    name = row["levels"] if len(planners) == 1 else f"{row['planner']} {row['levels']}"
    return name if row["n_solved"] else f"{name} (R = {row['redundant']}, {row['foresight']})"


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a line. If there are several seeds, figures are means with standard deviations."""
    lines = [flat(row) for row in rows]
    out: dict[str, Any] = {}
    for name in COLUMNS:
        values = [line.get(name) for line in lines]
        if name in (*_WHERE, *_WHAT):
            continue
        numbers = [value for value in values if value is not None]
        if len(numbers) < len(values):
            out[name] = None
        else:
            out[name] = numbers[0] if len(rows) == 1 else Spread(statistics.fmean(numbers), statistics.stdev(numbers))
    return out | {"fits": all(row["fits"] for row in rows)}
