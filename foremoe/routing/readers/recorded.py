"""Reads answers, chosen experts and counts from JSON, parquet, ``.pt``, ``.npz`` and safetensors files of engines and recorders.

Code in a file is never run. A ``.pt`` file may contain only tensors and plain values. Sizes that a file states are checked
against the size of the file.
"""

import contextlib
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.budget import require_budget
from foremoe.base.errors import InputError, first_line, naming
from foremoe.base.files import file_bytes, open_regular, read_file
from foremoe.base.schema import MAX_JSON_BYTES, parse_json
from foremoe.base.stored import open_stored
from foremoe.machine.model import Model
from foremoe.routing.checks import checked_lengths
from foremoe.routing.readers import sglang, vllm
from foremoe.routing.readers.answers import get
from foremoe.routing.readers.sequences import Routed
from foremoe.routing.readers.tables import COUNTS, counts_of, routed_of, table_columns

# Letters: S recorded steps, L layers, E experts, T tokens.

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".pt", ".pth", ".npz", ".safetensors")
_TRACES = ("topk_ids", "topk_TLK")
_PER_SEQUENCE = ("routed_experts", "rollout_routed_experts", *_TRACES, "selected_experts", "expert_ids", "experts")
_EXPANSION = 16  # largest ratio of decompressed to compressed size, as for .npz


class Recorded(NamedTuple):
    """Content of a file, which is either the routing of sequences or counts. A part that the file does not have is None."""

    payloads: Any = None  # payloads for `from_routed_experts`
    lengths: Array | None = None  # number of tokens of each payload
    load_SLE: Array | None = None  # int64, pairs of each recorded step, layer and expert
    layer_L: Array | None = None  # numbers of the layers
    rank: int | None = None  # rank that counted
    num_experts: int | None = None
    num_topk: int | None = None
    model: str | None = None  # name of a preset


def read_recorded(path: str, model: Model | None = None) -> Recorded:
    """Reads one file. If its contents could be counts or chosen experts, the number of experts of `model` decides.

    Raises:
        InputError: The format is not known, or the contents are not routing. The message suggests a remedy.
    """
    source, experts = Path(path), None if model is None else model.num_experts
    suffix = source.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{source.name!r} is of no known kind; routing is read from {', '.join(SUFFIXES)}.")
    if suffix in (".npz", ".safetensors"):
        with open_stored(source, f"a {suffix} file", archive=suffix == ".npz") as stored, naming(repr(path)):
            return _of_arrays(stored.names, stored.read, experts, source)
    with open_regular(source) as file:
        size = file_bytes(file)
    with naming(repr(path)):
        if suffix == ".parquet":
            return _of_rows(_parquet(path, size), size)
        return _of_value(_torch(path) if suffix in (".pt", ".pth") else _json(path), experts, size, source)


def _json(path: str) -> Any:
    """Returns the value of a JSON file, or the list of the values on its lines."""
    with open_regular(path) as file:
        data = file.read()
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError("it has only blank lines; write it again.")
    try:
        values = []
        for _, line in lines:
            values.append(parse_json(line, len(line)))
        return values[0] if len(values) == 1 else values
    except ValueError as error:
        fault = f"line {lines[len(values)][0]} is not JSON ({first_line(error)})"
    try:
        return parse_json(data, len(data))
    except ValueError:
        raise InputError(f"{fault}; give one JSON value, or one on each line.") from None


def _torch(path: str) -> Any:
    """Returns the value that `torch.save` wrote. Raises InputError unless it holds only tensors and plain values."""
    if find_spec("torch") is None:
        raise InputError("a .pt file is read by torch, which is not installed; install it, or save the counts as .npz.")
    import torch

    members, damaged = [], "it is not what torch.save writes, truncated or damaged; write it again."
    with open_regular(path) as file, contextlib.suppress(zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        members, size = zipfile.ZipFile(file).infolist(), file_bytes(file)
    # torch writes no compressed members, and a compressed member may expand to any size.
    if not members or any(m.compress_type for m in members) or sum(m.file_size for m in members) > size:
        raise InputError(damaged)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        cure = "save tensors and plain values alone, or read it yourself as docs/recording.md shows"
        raise InputError(f"it holds objects that only running code would make; {cure}.") from None
    except Exception:  # a damaged file may fail in any way
        raise InputError(damaged) from None


def _parquet(path: str, size: int) -> list[Any]:
    """Returns the rows of a parquet file, with only the columns that are known."""
    if find_spec("pyarrow") is None:
        raise InputError("a parquet file is read by pyarrow, which is not installed; install it, or write JSON lines.")
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        claimed = sum(group.total_byte_size for group in groups)
        if claimed > max(MAX_JSON_BYTES, _EXPANSION * size):
            raise InputError(f"it would become {claimed} bytes of {size}; write it again with less compression.")
        names = file.schema_arrow.names
        wanted = [name for name in names if name in {*_PER_SEQUENCE, *table_columns(names).values()}]
        if not wanted:
            raise InputError(f"it has the columns {', '.join(names)[:200]}, none of which is routing; {_READ}.")
        return list(file.read(columns=wanted).to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"it is not a parquet file, or is truncated or damaged ({first_line(error)}); write it again.") from None


_READ = (
    "give answers of vLLM or SGLang, chosen experts [tokens][layers][top-k] of each sequence as routed_experts, a table of "
    "layer, token_idx and experts or of layer, expert and count, or counts [layers, experts] as logical_count"
)


def _of_value(value: Any, experts: int | None, size: int, source: Path) -> Recorded:
    if isinstance(value, Mapping) and "records" in value:
        raise InputError(
            "it is SGLang's record of single passes; record with --expert-distribution-recorder-mode stat, or routed experts."
        )
    if layout := get(value, "logical_count_layout"):
        raise InputError(f"its counts are laid out as {str(layout)[:40]!r}, not by step, layer and expert; give such counts.")
    if isinstance(value, Mapping) and isinstance(value.get("samples"), list):
        value = value["samples"]
    is_rows = isinstance(value, list) and value and all(isinstance(x, Mapping) or _is_turns(x) for x in value)
    if is_rows or _is_answer(value) or (isinstance(value, Mapping) and _is_row(value)):
        return _of_rows(value if is_rows else [value], size)
    named = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {"one array": value}
    arrays = {name: x for name, x in named.items() if isinstance(x, list) or hasattr(x, "dtype")}
    return _of_arrays(arrays, lambda name: _array(arrays[name], size), experts, source)


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_answer, value))


def _is_row(value: Mapping[str, Any]) -> bool:
    return "layer" in table_columns(value) or ("seq_len" not in value and any(name in value for name in _PER_SEQUENCE))


def _is_answer(value: Any) -> bool:
    kinds = {"choices": list, "outputs": list, "meta_info": Mapping, "response": Mapping}
    return isinstance(value, Mapping) and any(isinstance(value.get(name), kind) for name, kind in kinds.items())


def _array(value: Any, size: int) -> Array:
    """Returns nested lists or a tensor as an array. A tensor may not be much larger than its bytes in the file."""
    if hasattr(value, "is_floating_point"):
        # A tensor that is a view may repeat its bytes any number of times.
        require_budget(8 * value.numel(), f"a tensor of shape {list(value.shape)}", "save it without views", size)
        value = value.double() if value.is_floating_point() else value
    try:
        # If a list mixes text and numbers, numpy would convert all entries to text of the length of the longest.
        array = np.asarray(value, np.float64) if isinstance(value, list) else np.asarray(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise InputError(f"it holds lists or a tensor that make no array ({first_line(error)[:200]}); {_READ}.") from None
    is_whole = array.dtype.kind == "f" and (np.abs(array) < 2**53).all() and (array % 1 == 0).all()
    return array.astype(np.int64) if is_whole else array


def _of_arrays(names: Collection[str], read: Callable[[str], Array], experts: int | None, source: Path) -> Recorded:
    steps = [name for name in names if re.fullmatch(r"\d{1,9}_\d{1,9}", name)]
    if steps and len(steps) == len(names):
        return _statistics(steps, read, source)
    topk = next((name for name in _TRACES if name in names), None)
    lengths = next((name for name in ("seq_len", "seq_len_Q") if name in names), None)
    if topk is not None and lengths is not None:
        ids_TLK = read(topk)
        seq_len_Q = checked_lengths(read(lengths), len(ids_TLK) if ids_TLK.ndim else 0)
        told = read("num_experts").reshape(-1) if "num_experts" in names else np.zeros(0, int)
        num_experts = int(told[0]) if told.size == 1 and told.dtype.kind in "iu" else None
        return Recorded(np.split(ids_TLK, np.cumsum(seq_len_Q)[:-1]), seq_len_Q, num_experts=num_experts)
    if topk is not None or COUNTS in names:
        names = [COUNTS] if COUNTS in names else [str(topk)]
    if experts is None:
        raise InputError("counts do not tell top-k; give model, the one that was recorded.")
    found = {name: array for name, array in ((name, read(name)) for name in sorted(names)) if array.ndim in (2, 3)}
    counts = [array for array in found.values() if array.shape[-1] == experts]
    if not counts:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in found.items()) or ", ".join(sorted(names))
        raise InputError(f"it has {shapes[:300] or 'nothing'}, but no counts [layers, {experts} experts]; {_READ}.")
    if len({array.shape[-2] for array in counts}) > 1:
        raise InputError(f"it has counts of {' and '.join(str(list(a.shape)) for a in counts[:4])}; give one model's.")
    return Recorded(load_SLE=np.concatenate([_whole(array).reshape(-1, *array.shape[-2:]) for array in counts]))


def _whole(array: Array) -> Array:
    """Returns counts as int64. Raises InputError unless they are whole numbers from 0 to 2**53 - 1."""
    array = array.astype(np.float64) if array.dtype.kind == "f" else array
    if array.dtype.kind not in "iuf" or not ((array >= 0) & (array < 2**53)).all() or (array % 1 != 0).any():
        raise InputError(f"its counts are not all whole numbers from 0 to {2**53 - 1:,}; give counts of pairs, not shares.")
    return array.astype(np.int64)


def _statistics(names: list[str], read: Callable[[str], Array], source: Path) -> Recorded:
    """Reads counts of TensorRT-LLM: an array [experts] per ITERATION_LAYER, with `meta_info.json` next to the files."""
    arrays = {tuple(map(int, name.split("_"))): _whole(read(name)) for name in names}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise InputError(f"it has arrays of the shapes {sorted(map(list, shapes))[:4]}; TensorRT-LLM writes [experts] alone.")
    steps, layers = (sorted({key[i] for key in arrays}) for i in (0, 1))
    shape, bytes_ = (len(steps), len(layers), *next(iter(shapes))), sum(array.nbytes for array in arrays.values())
    require_budget(8 * int(np.prod(shape, dtype=object)), f"counts of shape {list(shape)}", "correct the file", bytes_)
    load_SLE = np.zeros(shape, np.int64)
    for (step, layer), load_E in arrays.items():
        load_SLE[steps.index(step), layers.index(layer)] = load_E
    beside = source.with_name("meta_info.json")
    meta = {}
    if beside.is_file():
        with naming(repr(str(beside))):
            try:
                meta = parse_json(read_file(beside, MAX_JSON_BYTES))
            except ValueError as error:
                raise InputError(f"is not JSON ({first_line(error)}); correct it.") from None
    topk, rank = get(meta, "num_experts_per_token"), re.fullmatch(r"rank(\d{1,6})", source.stem)
    return Recorded(
        load_SLE=load_SLE, layer_L=np.array(layers), rank=int(rank[1]) if rank else None, num_experts=shape[2],
        num_topk=topk if type(topk) is int else None,
    )  # fmt: skip


def _of_rows(rows: list[Any], size: int) -> Recorded:
    first = rows[0] if rows else {}
    if isinstance(first, list) or _is_answer(first):
        return _of_answers([_unwrapped(row) for row in rows])
    columns = table_columns(first)
    if {"layer", "expert", "count"} <= columns.keys():
        load_SLE, layer_L = counts_of(rows, columns, size)
        return Recorded(load_SLE=load_SLE, layer_L=layer_L)
    if {"layer", "experts", "token"} <= columns.keys():
        payloads, layer_L = routed_of(rows, columns, size)
        return Recorded(payloads, layer_L=layer_L)
    name = next((n for n in _PER_SEQUENCE if n in first), None)
    if name is None:
        raise InputError(f"its first row has {', '.join(map(str, first))[:200] or 'nothing'}, which is not routing; {_READ}.")
    if name == "routed_experts":
        return Recorded(rows)
    lengths = [len(row["tokens"]) for row in rows if isinstance(get(row, "tokens"), list)]
    return Recorded([Routed(data=get(row, name)) for row in rows], np.array(lengths) if len(lengths) == len(rows) else None)


def _unwrapped(row: Any) -> Any:
    """Returns the answer in a line of a batch run, or the line itself."""
    body = get(get(row, "response"), "body")
    return row if body is None else body


def _of_answers(answers: list[Any]) -> Recorded:
    flat = [x for answer in answers for x in (answer if isinstance(answer, list) else [answer])]
    is_sglang = any("meta_info" in x or x.get("sglext") or _has_meta(x) for x in flat if isinstance(x, Mapping))
    names = {str(get(x, "model") or "") for x in flat}
    payloads = (sglang if is_sglang else vllm).payloads(answers)
    return Recorded(payloads, model=Model.preset_of(names.pop()) if len(names) == 1 else None)


def _has_meta(answer: Mapping[str, Any]) -> bool:
    choices = answer.get("choices")
    return isinstance(choices, list) and any(get(choice, "meta_info") for choice in choices)
