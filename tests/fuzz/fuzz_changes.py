"""Changes of valid files that know their structure: values of a header, arrays and their layout, members, tables, bytes."""

from __future__ import annotations

import base64
import copy
import io
import json
import warnings
import zipfile
from random import Random
from typing import Any

import numpy as np
import tomli_w

from foremoe.base.tensor_file import digest

# Values of every type at the edges of what fields hold.
EDGES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 256, 2**15 - 1, 2**15, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**12,
    10**30, 10**400, 0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"),
    "", " ", "0", "1", "any", "node", "nodes", "pairs", "update", "time", "balance",
    "\x1b[31m\n", "\ud800", "\u00e9" * 9, "x" * 5000, "Evil(cmd='x')", "os:system",
    [], [0], [1, 2], [None], [[0]] * 3, ["a"], {}, {"a": 1}, {"kind": "plan"}, [[[[[[[[[]]]]]]]]],
]  # fmt: skip
DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
_NAMES = {"b1": "BOOL"} | {f"{kind}{size}": f"{kind.upper()}{8 * size}" for kind in "iuf" for size in (1, 2, 4, 8)}


def changed_tree(value: Any, rng: Random) -> Any:
    """A JSON value with one place changed: another value, a key lost, added, swapped or repeated."""
    value = copy.deepcopy(value)
    place, key = value, None
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or rng.random() < 0.3:
            break
        place = place[key]
    if not isinstance(place, dict | list) or key is None or not place:
        return rng.choice(EDGES)
    how = rng.randrange(6)
    if how == 0:
        del place[key]
    elif how == 1 and isinstance(place, dict):
        place[rng.choice(["a", "", "redundant", "data", "shape", "\x1b", "start"])] = rng.choice(EDGES)
    elif how == 2 and len(place) > 1:
        other = rng.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        place[key], place[other] = place[other], place[key]
    elif how == 3 and isinstance(place[key], int | float) and abs(place[key]) < 2**64:
        place[key] = place[key] + rng.choice([-1, 1, 2, 1000, 0.5])
    else:
        place[key] = rng.choice(EDGES)
    return value


def changed_array(array: np.ndarray, rng: Random) -> np.ndarray:
    """An array with other numbers, or of another dtype or shape."""
    array = np.array(array)
    how = rng.randrange(7)
    if how <= 2 and array.size:
        for _ in range(rng.choice([1, 1, 2, array.size])):
            array.flat[rng.randrange(array.size)] = _edge_of(array.dtype, rng)
    elif how == 3:
        with np.errstate(all="ignore"):
            array = array.astype(rng.choice(DTYPES))
    elif how == 4 and array.size:
        array = rng.choice([array.ravel(), array[None], array.T, array[..., None], np.atleast_1d(array)[:1]])
    elif how == 5:
        shape = [rng.choice([0, 1, 2, n, n + 1]) for n in array.shape] or [rng.choice([0, 1, 3])]
        array = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
    else:
        array = np.zeros(rng.choice([(), (0,), (1,), array.shape, (0, 3), (3, 0, 2)]), rng.choice(DTYPES))
    return array


def _edge_of(dtype: np.dtype, rng: Random) -> Any:
    if dtype.kind == "b":
        return rng.random() < 0.5
    if dtype.kind == "f":
        return rng.choice([0.0, -0.0, -1.0, 0.5, np.inf, -np.inf, np.nan, np.finfo(dtype).max, 1e-300])
    info = np.iinfo(dtype)
    number = rng.choice([info.min, info.max, -1, 0, 1, 2, 3, 7, 8, 9, 127, 128, 255, 256, 2**15 - 1, 2**20])
    return max(info.min, min(info.max, number))


def changed_arrays(arrays: dict[str, np.ndarray], rng: Random) -> dict[str, np.ndarray]:
    """Named arrays with one changed, lost, added, or two swapped."""
    arrays = dict(arrays)
    name, other = rng.choice(sorted(arrays)), rng.choice(sorted(arrays))
    how = rng.randrange(8)
    if how == 0:
        del arrays[name]
    elif how == 1:
        new = rng.choice(["a", "known_T", "schedule.chunk_L", "schedule.block_L", "\x1b"])
        arrays[new] = arrays[name]
    elif how == 2:
        arrays[name], arrays[other] = arrays[other], arrays[name]
    else:
        arrays[name] = changed_array(arrays[name], rng)
    return arrays


def changed_bytes(data: bytes, rng: Random) -> bytes:
    """Bytes flipped, cut, repeated, inserted, or a number of eight bytes written over."""
    data, how = bytearray(data), rng.randrange(6)
    at = rng.randrange(len(data) + 1)
    if how == 0:
        return bytes(data[:at])
    if how == 1:
        data[at:at] = data[at : at + rng.randrange(64)]
    elif how == 2:
        data[at : at + 8] = rng.choice([0, 1, 8, 2**31, 2**32 - 1, 2**62, 2**64 - 1]).to_bytes(8, "little")
    elif how == 3:
        data[at : at + rng.randrange(16)] = b""
    else:
        for _ in range(rng.choice([1, 1, 1, 4, 32])):
            if data:
                # Headers and directories stand at the ends.
                near = rng.randrange(min(len(data), 64))
                where = rng.choice([rng.randrange(len(data)), near, -1 - near])
                data[where] = rng.choice([rng.randrange(256), data[where] ^ (1 << rng.randrange(8)), 0, 255, 0x31, 0x22])
    return bytes(data)


def pack(metadata: dict[str, str], arrays: dict[str, np.ndarray], rng: Random | None = None) -> bytes:
    """A safetensors file, written without the library under test; with `rng`, its layout is changed."""
    table: dict[str, Any] = {"__metadata__": metadata}
    body = b""
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        kind = _NAMES[array.dtype.str[1:]]
        table[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    if rng is not None:
        name = rng.choice(sorted(table))
        table[name] = changed_tree(table[name], rng)
        if rng.random() < 0.3 and isinstance(table[name], dict):
            table[name]["dtype"] = rng.choice(["BF16", "F8_E4M3", "BOOL", "U8", "I64", "F4", "C64"])
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + body


def sealed(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The header with checksums that are right for these arrays."""
    header = {key: value for key, value in header.items() if key != "checksum"}
    if header.get("kind") != "trace":
        return {**header, "checksum": digest(header, arrays)}
    names = {"topk": "topk_TLK", "seq_len": "seq_len_Q", "moe_layer": "moe_layer_L", "known": "known_T"}
    held = {short: arrays[name] for short, name in names.items() if name in arrays}
    header["content"] = digest({"num_experts": header.get("num_experts")}, held)
    return {**header, "checksum": digest(header, {})}


def changed_tensors(header: dict[str, Any] | None, arrays: dict[str, np.ndarray], rng: Random) -> bytes:
    """A file of foremoe with header or arrays changed, nearly always under a right checksum; or its layout, or its bytes."""
    how = rng.randrange(10)
    for _ in range(rng.choice([1, 1, 2])):
        if how < 5 and header is not None:
            header = changed_tree(header, rng)
        elif how < 8:
            arrays = changed_arrays(arrays, rng) or arrays
    metadata = {}
    if header is not None:
        if isinstance(header, dict) and rng.random() < 0.95:
            header = sealed(header, arrays)
        metadata = {"foremoe": json.dumps(header)}
    data = pack(metadata, arrays, rng if how == 8 else None)
    return changed_bytes(data, rng) if how == 9 else data


def _npy(rng: Random, data: bytes) -> bytes:
    """An .npy file with a wild header."""
    shapes = ["()", "(1,)", "(0,)", "(-1,)", "(99999999999,)", "(2, 2**60)", "(4, 3, 2)", "(1" + ",1" * 40 + ")", "1", "("]
    shapes += ["(" + "1" * 60, "(" + "1," * 60, "(" + " " * 60, ")" * 9]
    kind = rng.choice("<>|=") + rng.choice(
        [*DTYPES, "O", "U0", "U5", "U99999999", "U536870912", "S4", "M8[s]", "c16", "V4", "f16", "[('a', 'i4')]"]
    )
    order = rng.choice(["False", "True", "0"])
    text = f"{{'descr': '{kind}', 'fortran_order': {order}, 'shape': {rng.choice(shapes)}, }}\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode() + data


def changed_npz(arrays: dict[str, np.ndarray], rng: Random) -> bytes:
    """An archive with arrays changed, or the bytes of a member, or its own."""
    how, out = rng.randrange(8), io.BytesIO()
    arrays = changed_arrays(arrays, rng) if how < 5 else arrays
    method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
    victim = rng.choice(sorted(arrays) or [""])
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method if how != 7 else zipfile.ZIP_STORED) as archive:
        warnings.simplefilter("ignore")  # of members twice
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array)
            data = member.getvalue()
            if name == victim and how == 5:
                data = changed_bytes(data, rng)
            elif name == victim and how == 6:
                data = _npy(rng, data[-32:])
            archive.writestr(f"{name}.npy" if rng.random() < 0.98 else name, data)
            if rng.random() < 0.02:
                archive.writestr(f"{name}.npy", data[:-1])
    data = out.getvalue()
    return changed_bytes(data, rng) if how == 7 else data


def changed_toml(table: dict[str, Any], rng: Random) -> bytes:
    """A table with values changed, or its text by lines and bytes."""
    how = rng.randrange(4)
    if how < 3:
        value = changed_tree(table, rng)
        try:
            text = tomli_w.dumps(value)
        except Exception:  # what TOML cannot hold, such as None
            text = tomli_w.dumps(table)
            how = 3
    else:
        text = tomli_w.dumps(table)
    lines = text.splitlines()
    if how >= 2 and lines:
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        values = ["nan", "-inf", "9" * 400, "0x" + "f" * 300, "1979-05-27", "{}", "[" * rng.choice([5, 3000])]
        keys = ["[a.b.c]", "[[x]]", "a" + ".a" * rng.choice([1, 20, 3000]) + " = 1", '"""', "#" * 99, "", lines[other]]
        lines[at] = rng.choice([*keys, f"{lines[at].partition('=')[0]}= {rng.choice(values)}"])
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return changed_bytes(data, rng) if rng.random() < 0.3 else data


def changed_payload(payload: Any, rng: Random) -> bytes:
    """JSON of an engine's response with a value changed, or what is encoded in one of its texts, or its bytes."""
    how = rng.randrange(6)
    if how < 3:
        for _ in range(rng.choice([1, 2])):
            payload = changed_tree(payload, rng)
    elif how < 5:
        payload = _recoded(copy.deepcopy(payload), rng)
    data = json.dumps(payload).encode()
    return changed_bytes(data, rng) if how == 5 else data


def _recoded(payload: Any, rng: Random) -> Any:
    if isinstance(payload, dict):
        return {key: _recoded(value, rng) for key, value in payload.items()}
    if isinstance(payload, list) and payload:
        return [_recoded(value, rng) for value in payload]
    if isinstance(payload, str) and len(payload) > 20:
        data = changed_bytes(base64.b64decode(payload), rng)
        if data[:6] == b"\x93NUMPY" and rng.random() < 0.5:
            data = _npy(rng, data[-96:])
        return base64.b64encode(data).decode()
    return payload
