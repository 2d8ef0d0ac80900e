"""The contract of plan files: docs/plan-format.md, the header's schema and the golden files say the same as what is written."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from complete_plan import complete_plan
from safetensors.numpy import load

import foremoe
from foremoe.base.errors import InputError
from foremoe.base.schema import faults
from foremoe.base.tensor_file import read_tensors, write_tensors
from foremoe.plan import files
from foremoe.plan.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plan-format.md").read_text()
SCHEMA = files.header_schema()
# A golden file is never written again: the digest says so.
GOLDEN = {"plan_v3": "4268bce96f03f085662991e4f56545eb98da9d3d5c35eb64b4557e152b8b15c0"}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    complete = complete_plan()
    plain = foremoe.Workload.from_counts(np.ones((1, 4, 4, 8), np.int32), num_topk=2, model="tiny")
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=4)
    problem = foremoe.Problem.of(plain, cluster, model=complete.header.model, redundant=1)
    return {"complete": complete, "plain": foremoe.Planner().plan(problem)[0]}


def written(plan: Plan, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    plan.save(path)
    return read_tensors(path, "plan", files.FORMAT_VERSION)


def lines_of(section: str) -> list[list[str]]:
    """The cells of a section's table, code marks removed."""
    table = re.search(r"\| --- .*\n((?:\|.*\n)+)", PAGE.split(f"### {section}\n")[1])
    assert table
    return [[cell.strip().strip("`") for cell in line.strip("|\n").split("|")] for line in table[1].splitlines()]


def flat_keys(header: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in header.items():
        if isinstance(value, dict):
            flat |= flat_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def test_the_page_lists_the_tensors_that_are_written(plans, tmp_path):
    listed = {name: (dtype, axes, meaning) for name, dtype, axes, meaning in lines_of("Tensors")}
    stored = {case: written(plan, tmp_path / case)[1] for case, plan in plans.items()}
    assert set(listed) == set(stored["complete"])
    assert set(stored["plain"]) == {name for name, (*_, meaning) in listed.items() if not meaning.startswith("optional")}
    for case, plan in plans.items():
        size = {"M": plan.M, "L": plan.L, "G": plan.G, "E": plan.E, "S": plan.S}
        size |= {"C": len(plan.transfers), "X": len(plan.header.schedule.phase_X)}
        for name, array in stored[case].items():
            dtype, axes, _ = listed[name]
            assert (array.dtype.name, array.shape) == (dtype, tuple(size[axis] for axis in re.findall(r"\w", axes))), name


def test_the_schema_that_the_page_shows_describes_the_header_keys_that_are_written(plans, tmp_path):
    described = {}

    def walk(schema: dict[str, Any], prefix: str) -> None:
        for key, part in schema["properties"].items():
            if part["type"] != "object":
                described[prefix + key] = part["description"]
                # What may be absent says so.
                assert part["description"].startswith("optional") <= (key not in schema["required"]), key
            if "properties" in part:
                walk(part, f"{prefix}{key}.")

    walk(SCHEMA, "")
    assert "{literalinclude} ../foremoe/plan/header.schema.json\n" in PAGE and all(described.values())
    headers = [written(plan, tmp_path / case)[0] for case, plan in plans.items()]
    assert set().union(*(flat_keys(header) for header in headers)) == set(described)


def test_the_page_lists_every_value_of_every_enumeration():
    values: list[type[enum.IntEnum]] = [foremoe.Link, foremoe.Phase, foremoe.Stop]
    expected = [[kind.__name__, str(item.value), item.name] for kind in values for item in kind]
    assert [line[:3] for line in lines_of("Values")] == expected


@pytest.mark.parametrize("case", ["complete", "plain"])
def test_written_headers_obey_the_schema(plans, tmp_path, case):
    header, _ = written(plans[case], tmp_path / "plan")
    assert list(faults(header, SCHEMA)) == []
    for key in header:
        assert list(faults({k: v for k, v in header.items() if k != key}, SCHEMA)), key
        assert list(faults({**header, key: 1.5}, SCHEMA)), key


def test_the_schema_has_no_keyword_that_is_not_checked():
    known = {"$schema", "title", "description", "type", "enum", "pattern", "minimum", "exclusiveMinimum", "maximum", "required"}
    parts = [SCHEMA]
    for part in parts:
        assert set(part) <= known | {"properties", "items", "oneOf"}
        parts += [*part.get("properties", {}).values(), *part.get("oneOf", []), *([part["items"]] if "items" in part else [])]
    assert len(parts) > 60


def test_the_tables_of_names_cover_every_field():
    for names, kind in (
        (files.TRANSFERS, foremoe.TransferList), (files.COST, foremoe.Cost), (files.KEY, foremoe.PlanKey),
        (files.COST_MODEL, foremoe.CostModel), (files.DEALT, foremoe.workload.Dealt), (files.MODEL, foremoe.Model),
        ({**files.SCHEDULE, **files.SCHEDULE_ARRAYS}, foremoe.Schedule),
    ):  # fmt: skip
        assert set(names.values()) == {field.name for field in dataclasses.fields(kind)}, kind


def golden(name: str) -> Path:
    return Path(__file__).parent / "golden" / f"{name}.safetensors"


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_load_and_check(name, tmp_path):
    path = golden(name)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN[name], "golden files are never written again"
    plan = Plan.load(path)
    plan.check()
    assert plan.executable and len(plan.transfers) == 84 and plan.header.slot_depth == 2
    assert plan.header.dealt is not None and plan.header.dealt.over_budget == (1, 4)
    plan.save(tmp_path / "again")
    assert Plan.load(tmp_path / "again").same_as(plan)


def test_every_format_that_is_read_has_a_golden_file():
    formats = SCHEMA["properties"]["format"]["enum"]
    assert {read_tensors(golden(name), "plan", files.FORMAT_VERSION)[0]["format"] for name in GOLDEN} == set(formats)
    assert sorted(path.stem for path in golden("plan_v3").parent.iterdir()) == sorted(GOLDEN)


@pytest.mark.parametrize(("number", "cure"), [(2, "write it again"), (4, "install a newer foremoe"), (3.0, "write it again")])
def test_another_format_is_refused_with_the_one_that_is_read(plans, tmp_path, number, cure):
    header, tensors = written(plans["plain"], tmp_path / "plan")
    write_tensors(tmp_path / "plan", "plan", number, {k: v for k, v in header.items() if k != "checksum"}, tensors)
    with pytest.raises(InputError, match=f"plan format {number}, this foremoe reads only format {files.FORMAT_VERSION}; {cure}"):
        Plan.load(tmp_path / "plan")


def test_page_schema_and_files_say_the_same_version(plans, tmp_path):
    assert f"The `format` is {files.FORMAT_VERSION}." in PAGE
    assert f"formats that foremoe reads: {files.FORMAT_VERSION}." in PAGE
    assert SCHEMA["properties"]["format"]["enum"] == [files.FORMAT_VERSION]
    assert SCHEMA["title"].endswith(f", format {files.FORMAT_VERSION}")
    header, _ = written(plans["plain"], tmp_path / "plan")
    assert header["format"] == files.FORMAT_VERSION and header["foremoe"] == foremoe.__version__
    assert Plan.load(golden("plan_v3")).header.foremoe == "0.1.0.dev0"


def test_unknown_tensors_and_keys_are_ignored(plans, tmp_path):
    header, tensors = written(plans["complete"], tmp_path / "plan")
    header = {key: value for key, value in header.items() if key != "checksum"}
    for part in (header, *(value for value in header.values() if isinstance(value, dict))):
        part["of_a_later_foremoe"] = [1, {"a": None}]
    later = {**tensors, "of_a_later_foremoe": np.zeros(3), "transfers.of_a_later_foremoe": np.zeros((2, 2), np.int64)}
    write_tensors(tmp_path / "later", "plan", files.FORMAT_VERSION, header, later)
    assert Plan.load(tmp_path / "later").same_as(plans["complete"])


def test_the_reader_on_the_page_opens_plans_without_foremoe(plans, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.split("### A reader without foremoe")[1], re.DOTALL)
    assert "foremoe" not in re.sub(r'"foremoe"', "", code) and len(code.splitlines()) <= 35
    space: dict[str, Any] = {}
    exec(code, space)
    for case, plan in plans.items():
        path = tmp_path / case
        header, tensors = written(plan, path)
        found, arrays = space["read_plan"](path)
        assert found == header and set(arrays) == set(tensors)
        assert all(
            np.array_equal(arrays[name], tensor) and arrays[name].dtype == tensor.dtype for name, tensor in tensors.items()
        )
        payload = bytearray(path.read_bytes())
        payload[-1] ^= 1
        path.write_bytes(payload)
        assert load(bytes(payload))
        with pytest.raises(ValueError, match="changed"):
            space["read_plan"](path)
