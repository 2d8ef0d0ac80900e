"""Tables: which columns fit, what stands below, CSV, units, and what stands out."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foremoe.base.errors import InputError, did_you_mean
from foremoe.cli.tables import (
    BEST,
    BYTES,
    FAILING,
    SECONDS,
    Column,
    Look,
    Spread,
    Table,
    csv_text,
    number,
    render,
    seconds,
)
from foremoe.cli.terminal import wrapped
from foremoe.cli.tones import tones

NUMBERS = st.floats(-1e7, 1e7, allow_nan=False)


def texts(table: Table, look: Look = Look(), width: int | None = None) -> list[str]:  # noqa: B008
    return [line for line, _ in render(table, look, width)]


def columns(num: int) -> dict[str, Column]:
    return {"name": Column("name", left=True, rank=0)} | {
        f"c{i}": Column(f"column {i}", number(3), rank=i + 1) for i in range(num)
    }


@st.composite
def tables(draw: st.DrawFn) -> Table:
    num = draw(st.integers(1, 12))
    names = st.text("abc ()=,", min_size=1, max_size=60).filter(str.strip)
    rows = draw(st.lists(st.tuples(names, st.lists(NUMBERS, min_size=num, max_size=num)), min_size=1, max_size=4))
    return Table(columns(num), [{"name": name, **{f"c{i}": value for i, value in enumerate(values)}} for name, values in rows])


@given(tables(), st.integers(40, 200), st.sampled_from([Look(), Look(wide=True), Look(columns=("c0",))]))
def test_no_line_is_wider_than_the_terminal_and_no_number_breaks(table: Table, width: int, look: Look) -> None:
    lines = texts(table, look, width)
    assert all(len(line) <= width for line in lines)
    words = " ".join(lines).split()
    heads = " ".join(words)
    # Column 10 does not show column 1.
    shown = [name for name in table.columns if name != "name" and re.search(rf"column {name[1:]}(?!\d)", heads)]
    assert "c0" in shown
    for line in table.lines:
        for name in shown:
            assert f"{line[name]:,.3f}" in words
    if look.wide:
        assert shown == [name for name in table.columns if name != "name"]


def test_columns_are_chosen_by_weight_and_stand_in_the_table_order() -> None:
    table = Table(
        {"a": Column("a", left=True, rank=0), "b": Column("b", rank=3), "c": Column("c", rank=1), "d": Column("d", rank=2)},
        [{"a": "x", "b": 1, "c": 2, "d": 3}],
    )
    assert texts(table) == ["a  b  c  d", "x  1  2  3"]
    assert texts(table, width=7) == [
        "a  c  d",
        "x  2  3",
        "(1 more",
        "column:",
        "--wide,",
        "--columns",
        "NAME,NAME",
        "or",
        "--csv)",
    ]
    assert texts(table, Look(wide=True), width=7) == ["a  b  c", "x  1  2", "", "a  d", "x  3"]
    assert texts(table, Look(columns=("d", "b"))) == ["a  d  b", "x  3  1"]
    six = Table(columns(9), [{"name": "n", **{f"c{i}": float(i) for i in range(9)}}])
    assert texts(six, width=500)[0].split("  ") == ["name", *(f"column {i}" for i in range(5))]
    assert texts(six, Look(wide=True))[0].count("column") == 9


def test_a_column_without_figures_gives_way_and_meanings_are_of_what_is_shown() -> None:
    told = {"name": Column("name", left=True, rank=0)}
    told |= {f"c{i}": Column(f"column {i}", number(3), rank=i + 1, meaning=f"meaning {i}") for i in range(7)}
    table = Table(told, [{"name": "n", **{f"c{i}": None if i == 1 else 1.0 for i in range(7)}}])
    lines = texts(table)
    assert "column 1" not in lines[0] and "column 5" in lines[0]
    assert lines[-5:] == [f"column {i}: meaning {i}" for i in (0, 2, 3, 4, 5)] and lines[-6] == ""
    assert "column 1: meaning 1" in texts(table, Look(wide=True))


def test_long_names_go_on_behind_brackets_and_commas() -> None:
    columns = {"name": Column("name", left=True, rank=0), "x": Column("x", rank=1)}
    table = Table(columns, [{"name": "Planner(rank=(Exact(node_limit=1024,gap=0.0625),))", "x": 1}])
    assert texts(table, width=60) == [
        "name                   x",
        "Planner(rank=(Exact(   1",
        "  node_limit=1024,",
        "  gap=0.0625),))",
    ]
    assert "1024," in texts(table, width=40)[4]


def test_unknown_columns_are_refused_with_the_list() -> None:
    with pytest.raises(InputError, match=r"no 'colunm'; choose from name, c0, c1\.") as told:
        Look(columns=("colunm",)).require(columns(2))
    assert "did you mean" not in str(told.value)
    with pytest.raises(InputError, match="did you mean 'name'"):
        Look(columns=("nane",)).require(columns(2))
    Look(columns=("c1",)).require(columns(2))
    assert did_you_mean("quta", ["quota", "greedy"]) == "did you mean 'quota'? " and did_you_mean("x", ["quota"]) == ""
    assert did_you_mean("eplb", ["feplb", "eplb-step", "eplb-exact"]) == "did you mean 'eplb-step' or 'eplb-exact'? "
    assert did_you_mean("Step", ["feplb", "eplb-step"]) == "did you mean 'eplb-step'? "


def test_missing_values_and_missing_names() -> None:
    table = Table(columns(2), [{"name": "a", "c0": 1.0, "c1": None}, {"name": "  below"}])
    assert texts(table) == ["name     column 0  column 1", "a           1.000         -", "  below"]


def test_units_follow_the_largest_value_of_a_column() -> None:
    def headings(values: list[float], unit: object) -> str:
        return " ".join(texts(Table({"x": Column("x", unit, rank=0)}, [{"x": value} for value in values]))).strip()  # type: ignore[arg-type]

    assert headings([0.0177, 0.5], SECONDS).split() == ["x", "ms", "17.7", "500.0"]
    assert headings([0.0177, 173.7], SECONDS).split() == ["x", "s", "0.0", "173.7"]
    assert headings([13906.6e9], BYTES).split() == ["x", "TB", "13.9"]
    assert [seconds(value) for value in (0.0177, 1.234, 173.7)] == ["17.7 ms", "1.23 s", "174 s"]


def test_a_mean_has_its_spread() -> None:
    table = Table(
        {"x": Column("x", number(2), rank=0), "y": Column("y", SECONDS, rank=0)},
        [{"x": Spread(1.5, 0.25), "y": Spread(0.01, 0.001)}],
    )
    assert texts(table)[1] == "1.50 ± 0.25  10.0 ± 1.0"


def test_csv_has_plain_figures_under_jsons_names() -> None:
    rows = [
        {"solver": "a,b", "bytes": {"peer": 1.5e9, "rdma": 0.1}, "list": [1, 2], "note": None},
        {"solver": "none", "bytes": None, "more": True},
    ]
    read = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert list(read[0]) == ["solver", "bytes.peer", "bytes.rdma", "list", "note", "more"]
    assert float(read[0]["bytes.peer"]) == 1.5e9 and float(read[0]["bytes.rdma"]) == 0.1
    assert (read[0]["solver"], read[0]["list"], read[0]["note"]) == ("a,b", "[1, 2]", "")
    assert read[1]["bytes.peer"] == "" and read[1]["more"] == "True"
    assert csv_text(rows, ["solver", "bytes.rdma"]) == 'solver,bytes.rdma\n"a,b",0.1\nnone,\n'


def test_the_best_line_and_those_that_do_not_fit_stand_out() -> None:
    rows = [{"gain": 1.0, "fits": True}, {"gain": 3.0, "fits": False}, {"gain": 2.0, "fits": True}, {"gain": None}, {}]
    assert tones(rows, "gain") == [None, FAILING, BEST, None, None]
    assert tones(rows[:1], "gain") == [None]


@given(st.text("ab1.9 -", max_size=300), st.integers(20, 100))
def test_text_ends_at_words(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= max(width, max(map(len, line.split()), default=0) + 2) for line in lines)
    assert wrapped(text, None) == [text]
