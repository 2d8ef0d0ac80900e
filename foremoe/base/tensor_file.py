"""Files of named arrays: safetensors with one JSON header and a checksum over everything."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, file_errors, first_line, naming

# One metadata key: safetensors keeps no order among several, and the bytes must not vary.
HEADER_KEY = "foremoe"


def digest(header: dict[str, Any], tensors: dict[str, Array]) -> str:
    """32 hex digits over a JSON header and the names, dtypes, shapes and bytes of arrays."""
    state = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        state.update(f"{name} {array.dtype.str} {array.shape}".encode())
        state.update(array.data)
    return state.hexdigest()


def tensor_bytes(header: dict[str, Any], tensors: dict[str, Array]) -> bytes:
    """The bytes of a safetensors file; a function of header and arrays alone."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return bytes(save(arrays, {HEADER_KEY: json.dumps(header, sort_keys=True)}))


def write_file(path: str | os.PathLike[str], payload: bytes) -> None:
    """Writes a whole file or, on a fault, none of it."""
    with file_errors(path, "write", "give another path"):
        target = Path(path)
        partial = target.with_name(target.name + ".part")
        partial.write_bytes(payload)
        partial.replace(target)


def existing_file(path: str | os.PathLike[str]) -> Path:
    """`path` if it is a file that is not empty."""
    source = Path(path)
    with file_errors(path, "read", "check the path"):
        if not source.exists():
            raise InputError(f"there is no file {str(source)!r}; check the path.")
        if not source.is_file():
            raise InputError(f"{str(source)!r} is not a file; give the path of one file.")
        if source.stat().st_size == 0:
            raise InputError(f"{str(source)!r} is empty; write it again.")
    return source


def write_tensors(
    path: str | os.PathLike[str], kind: str, version: int, header: dict[str, Any], tensors: dict[str, Array]
) -> None:
    """Writes arrays with a header of plain JSON values, a kind such as ``"workload"``, a format version and a checksum."""
    full = {**header, "kind": kind, "format": version}
    full["checksum"] = digest(full, tensors)
    write_file(path, tensor_bytes(full, tensors))


def read_tensors(path: str | os.PathLike[str], kind: str, version: int) -> tuple[dict[str, Any], dict[str, Array]]:
    """Header and arrays that `write_tensors` wrote; refuses other kinds, newer formats, and truncated or changed files."""
    source = existing_file(path)
    with file_errors(path, "read", "check the path"):
        payload = source.read_bytes()
    header = _header(payload)
    if header is None or header.get("kind") != kind:
        raise InputError(f"{str(source)!r} is not a {kind} file, or truncated ({len(payload)} bytes); write it again.")
    require_format(source, header, version)
    try:
        tensors = load(payload)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{str(source)!r} is truncated or damaged ({first_line(error)}); write it again.") from None
    if digest({k: v for k, v in header.items() if k != "checksum"}, tensors) != header.get("checksum"):
        raise InputError(f"{str(source)!r} was changed after it was written (checksum mismatch); write it again.")
    return header, tensors


@contextlib.contextmanager
def naming_fields(path: str | os.PathLike[str], header: dict[str, Any]) -> Iterator[None]:
    """Names the file in errors of the block, which makes a value of what `read_tensors` read."""
    try:
        with naming(repr(os.fspath(path))):
            yield
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{header['kind']} format {header['format']}"
        raise InputError(f"{os.fspath(path)!r} lacks or misnames a field of {what}: {error}.") from None


def require_format(source: Path, header: dict[str, Any], version: int) -> None:
    """Raises InputError when a file is of a newer format than `version`."""
    found = header.get("format")
    if not isinstance(found, int) or found > version:
        kind = f"{header['kind']} format {found}"
        raise InputError(f"{str(source)!r} has {kind}, this foremoe reads up to {version}; install a newer foremoe.")


def _header(payload: bytes) -> dict[str, Any] | None:
    length = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or length > len(payload) - 8:
        return None
    try:
        header = json.loads(json.loads(payload[8 : 8 + length])["__metadata__"][HEADER_KEY])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return header if isinstance(header, dict) else None
