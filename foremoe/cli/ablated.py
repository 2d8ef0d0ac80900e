"""Output lines of ``foremoe ablate``. Each level that is left out has one line, with means over seeds."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foremoe.cli.compare import PLANNED
from foremoe.cli.simulate import notes
from foremoe.cli.tables import SECONDS, Column, Spread, Table, flat, number, plural
from foremoe.cli.tones import tones
from foremoe.planner.ablation import ALL
from foremoe.planner.planner import Planner

GAIN = "speedup_vs_static"
SAME = "= all"
COLUMNS = {
    "planner": Column("planner", left=True), "ranks_per_node": Column("node"), "levels": Column("levels", left=True, rank=0),
    "redundant": Column("R", left=True, rank=0), "foresight": Column("foresight", left=True, rank=0), **PLANNED,
    "simulated_stage_s": Column("stage", SECONDS, rank=2), GAIN: Column("speed-up", number(3), rank=1),
    "difference": Column("change", rank=1, meaning=f"of the speed-up if a level is left out; {SAME}: the same plan"),
}  # fmt: skip
# Fields whose values distinguish lines, in the order of the table. Lines that differ only in the seed are merged.
_WHERE, _WHAT = ("planner", "ranks_per_node"), ("levels", "redundant", "foresight")


def lines_of(rows: Sequence[Mapping[str, Any]], planners: Mapping[str, Planner]) -> tuple[Table, list[str]]:
    """Returns the table and the notes for the given rows. A row for which nothing was planned appears only in the notes."""
    by_case: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(tuple(row[key] for key in (*_WHERE, *_WHAT)), []).append(row)
    planned = {key: of for key, of in by_case.items() if all(row["n_solved"] for row in of)}
    lines: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    for where, keys in itertools.groupby(planned, key=lambda key: key[:2]):
        for named, levels in _blocks({key[2:]: planned[key] for key in keys}):
            whole = levels.get(ALL)
            for level, of in levels.items():
                line = named | dict(zip(_WHERE, where, strict=True)) | {"levels": level}
                if of[0]["plan"] is None:
                    line["levels"] += f" ({plural(of[0]['n_solved'], 'row')})"
                figures = _means(of)
                if whole is not None and of is not whole:
                    line["difference"] = _difference(figures, _means(whole), _plans(of) == _plans(whole) is not None)
                repeats = line.get("difference") == SAME
                lines.append(line if repeats else figures | line)
                sources.append({} if repeats else figures)
    several = [key for key in _WHERE if len({row[key] for row in rows}) > 1]
    columns = {key: column._replace(rank=0) if key in several else column for key, column in COLUMNS.items()}
    told = [{"note": row.get("note"), "name": _name(row, planners)} for row in rows]
    return Table(columns, lines, rows, tones(sources, GAIN)), notes(told, "name")


def _plans(rows: Sequence[Mapping[str, Any]]) -> tuple[Any, ...] | None:
    """Returns the plans of all seeds, or None if a plan does not cover all rows and equals no other plan."""
    plans = tuple(row["plan"] for row in rows)
    return None if None in plans else plans


def _blocks(
    cases: Mapping[tuple[Any, ...], list[Mapping[str, Any]]]
) -> Iterable[tuple[dict[str, Any], dict[str, list[Mapping[str, Any]]]]]:  # fmt: skip
    """Yields R and foresight as text, with the rows of each level. Joins cases whose levels all have the same plans."""
    of_pair: dict[tuple[Any, ...], dict[str, list[Mapping[str, Any]]]] = {}
    for (level, slots, view), of in cases.items():
        of_pair.setdefault((slots, view), {})[level] = of
    same: dict[Any, list[tuple[Any, ...]]] = {}
    for pair, levels in of_pair.items():
        plans = [_plans(of) for of in levels.values()]
        same.setdefault(pair if None in plans else (*levels, *plans), []).append(pair)
    for pairs in same.values():
        numbers, kinds = (", ".join(dict.fromkeys(map(str, values))) for values in zip(*pairs, strict=True))
        yield {"redundant": numbers, "foresight": kinds}, of_pair[pairs[0]]


def _difference(figures: Mapping[str, Any], whole: Mapping[str, Any], same: bool) -> str | None:
    """Returns the change of the speed-up if a level is left out."""
    if same:
        return SAME
    mine, all_gain = figures[GAIN], whole[GAIN]
    return None if mine is None or all_gain is None else f"{mine / all_gain - 1.0:+.1%}"


def _name(row: Mapping[str, Any], planners: Mapping[str, Planner]) -> str:
    """Returns the name of a row for use in a note. If nothing was planned for the row, the name includes R and foresight."""
    if row["n_solved"] and row["foresight"] == "previous":
        return "previous"
    name = row["levels"] if len(planners) == 1 else f"{row['planner']} {row['levels']}"
    return name if row["n_solved"] else f"{name} (R = {row['redundant']}, {row['foresight']})"


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a line. If there are several seeds, figures are means with standard deviations."""
    lines = [flat(row) for row in rows]
    out: dict[str, Any] = {}
    for name in COLUMNS:
        values = [line.get(name) for line in lines]
        if name in (*_WHERE, *_WHAT, "difference"):
            continue
        numbers = [value for value in values if value is not None]
        if len(numbers) < len(values):
            out[name] = None
        else:
            out[name] = numbers[0] if len(rows) == 1 else Spread(statistics.fmean(numbers), statistics.stdev(numbers))
    return out | {"fits": all(row["fits"] for row in rows)}
