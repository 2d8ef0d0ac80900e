"""Reads and writes trace files (`.npz` and `.safetensors`), with foremoe's own array names or those of public recordings."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, naming
from foremoe.base.files import write_file
from foremoe.base.stored import HEADER_KEY, open_stored
from foremoe.base.tensor_file import digest, json_header, require_format, tensor_bytes
from foremoe.machine.model import Model
from foremoe.routing.checks import known_model, preset_layers
from foremoe.routing.trace import RoutingTrace

FORMAT_VERSION = 1
SUFFIXES = (".npz", ".safetensors")

# Names that each field may have in a file. foremoe's own name comes first.
_NAMES = {
    "topk_TLK": ("topk_TLK", "topk_ids"), "seq_len_Q": ("seq_len_Q", "seq_len"), "known_T": ("known_T",),
    "moe_layer_L": ("moe_layer_L",), "num_experts": ("num_experts",),
}  # fmt: skip


class OtherExperts(InputError):
    """Raised if a file and the model have different numbers of experts."""

    def __init__(self, message: str = "", num_experts: int = 0) -> None:
        super().__init__(message)
        self.num_experts = num_experts


def save_trace(trace: RoutingTrace, path: str | os.PathLike[str]) -> None:
    """Writes `trace` to a file. Equal traces give equal bytes."""
    suffix = _suffix(Path(path))
    held = {name: getattr(trace, name) for name in ("topk_TLK", "seq_len_Q", "moe_layer_L", "known_T")}
    arrays: dict[str, Array] = {name: array for name, array in held.items() if array is not None}
    header: dict[str, Any] = {name: getattr(trace, name) for name in ("num_experts", "model", "source", "id")}
    header |= {"kind": "trace", "format": FORMAT_VERSION, "content": trace.content_hash()}
    header["checksum"] = digest(header, {})
    if suffix == ".safetensors":
        write_file(path, tensor_bytes(header, arrays))
        return
    buffer = io.BytesIO()
    named: dict[str, Any] = {**arrays, "num_experts": np.int64(trace.num_experts), HEADER_KEY: np.array(json.dumps(header))}
    np.savez(buffer, **named)
    write_file(path, buffer.getvalue())


def load_trace(
    path: str | os.PathLike[str], *, num_experts: int | None, model: str | Model | None, max_bytes: int | None
) -> RoutingTrace:
    """Reads a file written by `save_trace`, or a recording with public array names, as described in `RoutingTrace.load`."""
    source = Path(path)
    suffix = _suffix(source)
    with open_stored(source, f"a {suffix} file", archive=suffix == ".npz", max_bytes=max_bytes) as stored:
        header, names = _header(source, stored.header), stored.names
        found = {field: next((n for n in options if n in names), None) for field, options in _NAMES.items()}
        for field in ("topk_TLK", "seq_len_Q"):
            if found[field] is None:
                lack = f"lacks the array {' or '.join(_NAMES[field])}"
                raise InputError(f"{str(source)!r} {lack}; it has {', '.join(sorted(names)) or 'none'}.")
        arrays = {field: stored.read(name) for field, name in found.items() if name is not None}
    in_file = _file_experts(source, arrays.pop("num_experts", None), header)
    model = header.get("model") if model is None else model
    preset = known_model(model)
    counts = {"file": in_file, "argument num_experts": num_experts, "model": preset.num_experts if preset else None}
    given = {where: count for where, count in counts.items() if count is not None}
    if not given:
        raise InputError(f"{str(source)!r} does not state the number of experts; pass num_experts=.")
    if len(set(given.values())) > 1:
        stated = ", ".join(f"{where} {count}" for where, count in given.items())
        wrong = "num_experts" if num_experts is not None else f"model, {preset.name} here" if preset else "argument"
        what = f"the number of experts of {str(source)!r} is given twice and differs ({stated}); correct the {wrong}."
        raise OtherExperts(what, in_file or 0)
    experts = next(iter(given.values()))
    with naming(repr(str(source)), {field: name for field, name in found.items() if name is not None}):
        if preset is not None and arrays["topk_TLK"].ndim == 3:
            _, num_layers, num_topk = arrays["topk_TLK"].shape
            arrays.setdefault("moe_layer_L", preset_layers(preset, num_layers, experts, num_topk))
        _require_tokens_first(arrays, found)
        trace = RoutingTrace(
            **arrays, num_experts=experts, model=model.name if isinstance(model, Model) else model,
            source=_text(header, "source") or ("" if header else source.name), id=_text(header, "id"),
        )  # fmt: skip
    if header and not _unchanged(trace, header):
        raise InputError(f"{str(source)!r} was changed after it was written (checksum mismatch); write it again.")
    return trace


def holds_trace(path: str | os.PathLike[str]) -> bool:
    """Returns True if an ``.npz`` or ``.safetensors`` file has an array whose name says that it holds the experts of tokens."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        return False
    with open_stored(Path(path), f"a {suffix} file", archive=suffix == ".npz") as stored:
        return not stored.names.isdisjoint(_NAMES["topk_TLK"])


def _require_tokens_first(arrays: dict[str, Any], names: dict[str, str | None]) -> None:
    """Raises InputError if the first two axes are exchanged, that is, if the lengths fit the second axis only."""
    shape, lengths = arrays["topk_TLK"].shape, arrays["seq_len_Q"]
    total = int(lengths.sum()) if lengths.dtype.kind in "iu" else -1
    if len(shape) == 3 and shape[0] != total == shape[1]:
        what = f"{names['topk_TLK']} has shape {list(shape)}, and the sequences have {total} tokens"
        raise InputError(f"{what}; transpose it to [tokens, layers, top-k].")


def _unchanged(trace: RoutingTrace, header: dict[str, Any]) -> bool:
    """Returns True if arrays and header are those that were written."""
    fields = {key: value for key, value in header.items() if key != "checksum"}
    return header.get("content") == trace.content_hash() and header.get("checksum") == digest(fields, {})


def _header(source: Path, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    header = json_header(text)
    if header.get("kind") != "trace":
        cure = f"give a file that RoutingTrace.save wrote, or one without a {HEADER_KEY!r} header"
        raise InputError(f"{str(source)!r} is not a trace; {cure}.")
    require_format(source, header, FORMAT_VERSION)
    return header


def _file_experts(source: Path, array: Array | None, header: dict[str, Any]) -> int | None:
    if array is None:
        value = header.get("num_experts")
    elif array.size == 1 and array.dtype.kind in "iu":
        value = int(array.reshape(-1)[0])
    else:
        value = array
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        given = repr(value) if array is None else f"{array.dtype} of shape {list(array.shape)}"
        raise InputError(f"{str(source)!r} gives {given} for num_experts; it must be one whole number.")
    return value


def _text(header: dict[str, Any], key: str) -> str:
    value = header.get(key, "")
    return value if isinstance(value, str) else ""


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"a trace file must end in {' or '.join(SUFFIXES)}; got {path.name!r}.")
    return suffix
