"""A strict reader of published figures and their settings from `published_rows.toml`."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foremoe.base import fields
from foremoe.base.errors import InputError

PATH = Path(__file__).with_name("published_rows.toml")
_LAYER = ("num_experts", "topk", "hidden_size")
# For each kind: keys that a setting must have, and keys that it may have.
SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "throughput": (
        (
            "ep", "tp", "pp", "vpp", "cp", "dp", "etp", "micro_batch_size", "global_batch_size", "sequence_length", "dispatcher",
            "routing", "recompute", "graphs", "overlap", "sharding",
        ),
        ("fused", "gflop_per_token", "layout", "mtp", "release"),
    ),
    "bandwidth": (
        ("collective", "kernel", "ranks_per_node", "counts", "level"),
        ("message_bytes", "tokens_per_rank", *_LAYER, "topk_nodes", "sms"),
    ),
    "copy": (
        (
            "what", "path", "ep", "ranks_per_node", "experts", "slots_per_rank", "copies_max", "copies_total", "skew_before",
            "tokens_per_rank", "topk", "expert_bytes",
        ),
        ("sms",),
    ),
    "ratio": (
        ("what", "system", "over", "ep", "ranks_per_node", "dispatcher"),
        (
            "slots_per_rank", "sequence_length", "micro_batch_size", "recompute", "skew_before", "skew_after", "tokens_per_rank",
            "hot_experts", "hot_share", *_LAYER, "ffn_size", "num_layers",
        ),
    ),
    "gemm": (("kernel", "layout", "groups", "rows_of_groups", "n", "k"), ()),
    "host": (("what", "ep", "micro_batch_size", "global_batch_size", "sequence_length", "dispatcher", "graphs"), ()),
}  # fmt: skip
UNITS = {
    "throughput": ("tokens/s/GPU", "TFLOP/s/GPU", "s/step"), "bandwidth": ("GB/s",), "copy": ("ms",), "ratio": ("ratio",),
    "gemm": ("TFLOP/s/GPU", "ms"), "host": ("launches/layer",),
}  # fmt: skip
ROLES = ("check", "fit")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published figure."""

    id: str
    kind: str
    role: str
    model: str
    gpu: str
    num_gpus: int
    precision: str
    setting: Mapping[str, Any]
    figure: float
    unit: str
    source: str
    where: str
    read: str
    missing: tuple[str, ...]
    constant: str = ""  # what a fit row determines
    weak: str = ""  # why a check row proves less than others
    note: str = ""
    seen: bool = False  # the simulator was run on it before the file existed


def read_rows(path: str | os.PathLike[str] = PATH) -> tuple[Row, ...]:
    """The rows of the file at `path`, in its order."""
    table = fields.read(path)
    parts = ("assumed", "sources", "row")
    fields.check_keys(table, parts, parts, "the file of published figures")
    for name, source in table["sources"].items():
        fields.check_keys(source, ("document", "version", "date"), ("document", "version"), f"source {name}")
        fields.text(source["document"], "document")
        fields.text(source["version"], "version")
        if not isinstance(source.get("date", datetime.date.min), datetime.date):
            raise InputError(f"source {name} has the date {fields.shown(source['date'])}; write it as 2026-08-22.")
    rows = tuple(_row(given, table) for given in table["row"])
    ids = [row.id for row in rows]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise InputError(f"the id {fields.shown(twice[0])} stands in {ids.count(twice[0])} rows; give each its own.")
    return rows


def _row(given: Mapping[str, Any], table: Mapping[str, Any]) -> Row:
    """The row of one table of the file."""
    where = f"row {fields.shown(given.get('id', '?'))}"
    known = dataclasses.fields(Row)
    fields.check_keys(given, [f.name for f in known], [f.name for f in known if f.default is dataclasses.MISSING], where)
    for key in ("id", "model", "gpu", "precision", "where", "read", *({"constant", "weak", "note"} & given.keys())):
        fields.text(given[key], f"{where}: {key}")
    for key, names in (("kind", SETTINGS), ("role", ROLES), ("source", table["sources"])):
        _one_of(given[key], names, f"{where}: {key}")
    _one_of(given["unit"], UNITS[given["kind"]], f"{where}: unit")
    for name in given["missing"]:
        _one_of(name, table["assumed"], f"{where}: missing")
    needed, allowed = SETTINGS[given["kind"]]
    fields.check_keys(given["setting"], (*needed, *allowed), needed, f"the setting of {where}")
    fields.whole(given["num_gpus"], f"{where}: num_gpus")
    fields.real(given["figure"], f"{where}: figure")
    fields.flag(given.get("seen", False), f"{where}: seen")
    if (given["role"] == "fit") != ("constant" in given):
        raise InputError(f"{where} is a {given['role']} row; a fit row names its constant, a check row has none.")
    if given["role"] == "check" and given.get("seen"):
        raise InputError(f"{where} was seen before the file existed; it cannot check.")
    if given["kind"] == "throughput":
        _check_run(given["setting"], given["num_gpus"], given["unit"], where)
    return Row(**{**given, "missing": tuple(given["missing"])})


def _one_of(value: object, names: Any, what: str) -> None:
    if value not in names:
        raise InputError(f"{what} is {fields.shown(value)}; choose one of {', '.join(names)}.")


def _check_run(setting: Mapping[str, Any], gpus: int, unit: str, where: str) -> None:
    """Raises InputError where the sizes of a run cannot go together."""
    tp, pp, cp, dp, ep = (fields.whole(setting[key], f"{where}: {key}") for key in ("tp", "pp", "cp", "dp", "ep"))
    if tp * pp * cp * dp != gpus:
        raise InputError(f"{where}: tp {tp} x pp {pp} x cp {cp} x dp {dp} is not its {gpus} GPUs.")
    if gpus // pp % (ep * fields.whole(setting["etp"], f"{where}: etp")):
        raise InputError(f"{where}: ep {ep} does not divide the {gpus // pp} GPUs of a pipeline stage.")
    batch, micro = (fields.whole(setting[key], f"{where}: {key}") for key in ("global_batch_size", "micro_batch_size"))
    if batch % (micro * dp):
        raise InputError(f"{where}: a batch of {batch} is no whole number of micro-steps of {micro} sequences on {dp} ranks.")
    if (unit == "TFLOP/s/GPU") != ("gflop_per_token" in setting):
        raise InputError(f"{where}: gflop_per_token belongs to figures in TFLOP/s/GPU and to no others.")
