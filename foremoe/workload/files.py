"""Workload files: counts as safetensors with one JSON header."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.tensor_file import read_tensors, write_tensors
from foremoe.workload.workload import Dealt, Workload

FORMAT_VERSION = 1

_PLAIN = ("num_topk", "stage", "model", "trace_id")


def save_workload(work: Workload, path: str | os.PathLike[str]) -> None:
    """Writes `work`; the bytes are a function of the workload alone."""
    held = {name: getattr(work, name) for name in Workload.array_fields()}
    tensors: dict[str, Array] = {name: array for name, array in held.items() if array is not None}
    # Counts of one layer on one rank are small: the narrowest type halves most files.
    tensors["load_MLGE"] = work.load_MLGE.astype(np.min_scalar_type(int(work.load_MLGE.max())))
    header = {name: getattr(work, name) for name in _PLAIN}
    header["dealt"] = None if work.dealt is None else dataclasses.asdict(work.dealt)
    write_tensors(path, "workload", FORMAT_VERSION, header, tensors)


def load_workload(path: str | os.PathLike[str]) -> Workload:
    """Reads what `save_workload` wrote; every fault of the file is one InputError."""
    header, tensors = read_tensors(path, "workload", FORMAT_VERSION)
    try:
        dealt = header["dealt"]
        if dealt is not None:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in dealt.items()}
            dealt = Dealt(**fields)
        arrays: dict[str, Any] = {
            name: tensors.get(name) if field.optional else tensors[name] for name, field in Workload.array_fields().items()
        }
        return Workload(**arrays, **{name: header[name] for name in _PLAIN}, dealt=dealt)
    except InputError as error:
        raise InputError(f"{os.fspath(path)!r}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{os.fspath(path)!r} lacks or misnames a field of workload format {FORMAT_VERSION}: {error}.") from None
