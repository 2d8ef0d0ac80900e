"""foremoe's own file format for arrays: safetensors with a JSON header and a checksum of the whole content."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, naming
from foremoe.base.files import open_regular, write_file
from foremoe.base.schema import parse_json
from foremoe.base.stored import HEADER_KEY, open_stored

_KINDS = ("plan", "trace", "workload")


def digest(header: dict[str, Any], tensors: dict[str, Array]) -> str:
    """Returns a checksum of a JSON header and of the names, dtypes, shapes and bytes of arrays, as 32 hex digits."""
    state = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        state.update(f"{name} {array.dtype.str} {array.shape}".encode(errors="surrogatepass"))
        state.update(array.data)
    return state.hexdigest()


def tensor_bytes(header: dict[str, Any], tensors: dict[str, Array]) -> bytes:
    """Returns the bytes of a safetensors file, which depend only on the header and the arrays."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return bytes(save(arrays, {HEADER_KEY: json.dumps(header, sort_keys=True)}))


def write_tensors(
    path: str | os.PathLike[str], kind: str, version: int, header: dict[str, Any], tensors: dict[str, Array]
) -> None:
    """Writes a file with arrays, a header of JSON values, a kind such as ``"workload"``, a format version and a checksum."""
    full = {**header, "kind": kind, "format": version}
    full["checksum"] = digest(full, tensors)
    write_file(path, tensor_bytes(full, tensors))


def read_tensors(path: str | os.PathLike[str], kind: str, version: int) -> tuple[dict[str, Any], dict[str, Array]]:
    """Reads header and arrays that `write_tensors` wrote. Refuses files of another kind or another format, and damaged files."""
    source = Path(path)
    with open_stored(source, f"a {kind} file") as stored:
        header = json_header(stored.header)
        if header.get("kind") != kind:
            found = header.get("kind")
            known = f", but a {found} file; `foremoe inspect` shows it" if found in _KINDS else "; give one that foremoe wrote"
            raise InputError(f"{str(source)!r} is not a {kind} file{known}.")
        require_format(source, header, version)
        tensors = {name: stored.read(name) for name in stored.names}
    if digest({k: v for k, v in header.items() if k != "checksum"}, tensors) != header.get("checksum"):
        raise InputError(f"{str(source)!r} was changed after it was written (checksum mismatch); write it again.")
    return header, tensors


def header_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the header of a foremoe file without checking it, or an empty dict if the file has no header."""
    open_regular(path).close()
    try:
        archive = os.fspath(path).lower().endswith(".npz")
        with open_stored(Path(path), "a file of foremoe", archive=archive) as stored:
            return json_header(stored.header)
    except InputError:
        return {}


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Returns the kind that a file's header states, such as ``"plan"``, or None if the file has no header."""
    kind = header_of(path).get("kind")
    return kind if isinstance(kind, str) else None


def json_header(text: str | None) -> dict[str, Any]:
    """Returns the table in a header's JSON text, or an empty dict if the text is not a table."""
    try:
        header = parse_json(text or "")
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


@contextlib.contextmanager
def naming_fields(path: str | os.PathLike[str], header: dict[str, Any]) -> Iterator[None]:
    """Adds the file's name to errors in the block. Use it where a value is made from the result of `read_tensors`."""
    try:
        with naming(repr(os.fspath(path))):
            yield
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{header['kind']} format {header['format']}"
        raise InputError(f"{os.fspath(path)!r} lacks or misnames a field of {what}: {error}.") from None


def require_format(source: Path, header: dict[str, Any], version: int) -> None:
    """Raises InputError if the format of a file is not `version`."""
    found = header.get("format")
    if type(found) is not int or found != version:
        kind, cure = header["kind"], "install a newer foremoe" if type(found) is int and found > version else "write it again"
        raise InputError(f"{str(source)!r} has {kind} format {found}, this foremoe reads only format {version}; {cure}.")
