"""The file of published figures is read strictly, names its sources, and keeps rows that check apart from rows that fit."""

import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from bench import overheads
from bench.published_rows import PATH, SETTINGS, read_rows
from foremoe.base.errors import InputError

ROWS = read_rows()
TABLE = tomllib.loads(PATH.read_text(encoding="utf-8"))


def of_kind(table: dict[str, Any], kind: str, role: str = "check") -> dict[str, Any]:
    """The first row of a kind and role in a parsed file."""
    return next(row for row in table["row"] if (row["kind"], row["role"]) == (kind, role))


def throughput(table: dict[str, Any]) -> dict[str, Any]:
    return of_kind(table, "throughput")


SLIPS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown part": (lambda t: t.update(rows=[]), "unknown key 'rows'"),
    "unknown key": (lambda t: throughput(t).update(gpus=8), "unknown key 'gpus'"),
    "lacking key": (lambda t: throughput(t).pop("read"), "lacks read"),
    "unknown setting": (lambda t: throughput(t)["setting"].update(mbs=1), "unknown key 'mbs'"),
    "lacking setting": (lambda t: throughput(t)["setting"].pop("dispatcher"), "lacks dispatcher"),
    "setting of another kind": (lambda t: of_kind(t, "gemm")["setting"].update(ep=8), "unknown key 'ep'"),
    "unknown kind": (lambda t: throughput(t).update(kind="latency"), "kind is 'latency'"),
    "unknown role": (lambda t: throughput(t).update(role="both"), "role is 'both'"),
    "unit of another kind": (lambda t: throughput(t).update(unit="GB/s"), "unit is 'GB/s'"),
    "unnamed source": (lambda t: throughput(t).update(source="hearsay"), "source is 'hearsay'"),
    "blank place": (lambda t: throughput(t).update(where=" "), "where must be"),
    "source without document": (lambda t: t["sources"]["bridge"].pop("document"), "lacks document"),
    "date as text": (lambda t: t["sources"]["bridge"].update(date="August"), "date 'August'"),
    "unnamed assumption": (lambda t: throughput(t)["missing"].append("weather"), "missing is 'weather'"),
    "same id": (lambda t: t["row"].append(t["row"][0]), "stands in 2 rows"),
    "no figure": (lambda t: throughput(t).update(figure="fast"), "figure must be a number"),
    "fit without constant": (lambda t: of_kind(t, "copy", "fit").pop("constant"), "names its constant"),
    "check with constant": (lambda t: throughput(t).update(constant="bf16_overheads"), "names its constant"),
    "check of a seen row": (lambda t: throughput(t).update(seen=True), "cannot check"),
    "GPUs that do not multiply": (lambda t: throughput(t)["setting"].update(dp=3), "is not its"),
    "EP that does not divide": (lambda t: throughput(t)["setting"].update(ep=7), "does not divide"),
    "broken micro-steps": (lambda t: throughput(t)["setting"].update(global_batch_size=17), "no whole number"),
    "TFLOP without a count": (lambda t: throughput(t).update(unit="TFLOP/s/GPU"), "gflop_per_token"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_are_refused(name: str, tmp_path: Path) -> None:
    slip, message = SLIPS[name]
    table = tomllib.loads(PATH.read_text(encoding="utf-8"))
    slip(table)
    (tmp_path / "rows.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_rows(tmp_path / "rows.toml")


def test_every_kind_checks_or_fits_and_most_rows_check() -> None:
    assert {row.kind for row in ROWS} == set(SETTINGS)
    roles = Counter(row.role for row in ROWS)
    assert roles["check"] >= 60 and roles["fit"] <= 30
    # Without the rows that prove less, each of the kinds that a stage's time is made of keeps some.
    strong = Counter(row.kind for row in ROWS if row.role == "check" and not row.weak)
    assert strong["throughput"] >= 20 and strong["bandwidth"] >= 10 and strong["gemm"] >= 5 and strong["copy"] >= 3


def test_sources_and_assumptions_are_named_and_used() -> None:
    assert {row.source for row in ROWS} == set(TABLE["sources"])
    assert {name for row in ROWS for name in row.missing} == set(TABLE["assumed"])


def test_no_constant_serves_one_row_alone() -> None:
    assert min(Counter(row.constant for row in ROWS if row.role == "fit").values()) >= 2


def test_older_runs_do_not_stand_here() -> None:
    known = {(row.model, row.figure) for row in overheads.OLDER}
    assert not {(row.model, row.figure) for row in ROWS if row.kind == "throughput"} & known


def test_settings_are_distinct() -> None:
    settings = Counter((row.kind, row.model, row.gpu, row.num_gpus, row.precision, repr(row.setting)) for row in ROWS)
    assert max(settings.values()) == 1
