"""A reader of arrays in ``.safetensors`` and ``.npz`` files, which checks every size that a file states."""

import contextlib
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, first_line
from foremoe.base.files import file_bytes, open_regular
from foremoe.base.schema import MAX_JSON_BYTES, parse_json

# A single metadata key, because safetensors does not keep the order of several keys, and the bytes must not vary.
HEADER_KEY = "foremoe"
NPY = b"\x93NUMPY"
_DTYPES = {
    "BOOL": "?", "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
_NPY_DTYPES = {
    *(f"{order}{kind}{size}" for order in ("", *"<>=|") for kind in "iu" for size in (1, 2, 4, 8)),
    *(f"{order}f{size}" for order in ("", *"<>=") for size in (2, 4, 8)), "|b1",
}  # fmt: skip
_MAX_AXES, _MAX_EMPTY = 32, 2**20
# Default limit of decompressed data: the larger of `_FREE_BYTES` and `_EXPANSION` times the size of the file.
_FREE_BYTES, _EXPANSION = 64 * 2**20, 16
# Exceptions that parsers, zipfile and zlib raise on a damaged file.
_FAULTS = (ValueError, KeyError, OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


class Stored(NamedTuple):
    """An open file of arrays."""

    names: frozenset[str]
    read: Callable[[str], Array]  # reads one array by its name
    header: str | None  # text of foremoe's own header


def array_of(data: bytes | memoryview, dtype: np.dtype[Any], shape: Sequence[int], *, fortran: bool = False) -> Array:
    """Returns a view of `data` as an array. Raises InputError if the sizes do not match."""
    claimed = math.prod(shape) * dtype.itemsize if len(shape) <= _MAX_AXES else -1
    # If one axis is empty, the other axes may state any length without taking any bytes.
    if claimed != len(data) or (not claimed and math.prod(max(n, 1) for n in shape) > _MAX_EMPTY):
        claim = f"claims {dtype} of shape {list(shape[:_MAX_AXES])}, {claimed} bytes"
        raise InputError(f"its header {claim}, but {len(data)} follow it; send the whole file.")
    flat = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
    if dtype.kind == "b" and len(data) and flat.view(np.uint8).max() > 1:
        raise InputError("it holds bytes that are neither true nor false; write 0 or 1.")
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def npy_array(blob: memoryview) -> Array:
    """Returns the array in the bytes of an ``.npy`` file, without a copy. It holds either numbers or a single string.

    numpy's own reader is not used, because it evaluates the header as Python, and its errors and warnings are unpredictable.
    """
    width = {1: 2, 2: 4, 3: 4}.get(blob[6] if len(blob) > 6 and blob[:6] == NPY else 0, 0)
    at = 8 + width + int.from_bytes(blob[8 : 8 + width], "little")
    header = bytes(blob[8 + width : min(at, 1 << 16)]).decode("latin1")
    name, order = _npy_value(header, "descr", "'", "'"), _npy_value(header, "fortran_order", "", ",")
    shape = _npy_shape(_npy_value(header, "shape", "(", ")"))
    if not width or at > len(blob) or name is None or order not in ("True", "False") or shape is None:
        raise InputError(f"{len(blob)} bytes begin like an .npy file but have no readable header; send the whole file.")
    # numpy converts exactly these names to a dtype without a warning. Strings that are empty or too long are excluded.
    if name not in _NPY_DTYPES and not (_is_text(name) and shape == ()):
        objects = ": Python objects are never unpickled" if "O" in name else ""
        raise InputError(f"an .npy file must hold plain numbers; its header says {name[:20]} of shape {list(shape)}{objects}.")
    return array_of(blob[at:], np.dtype(name), shape, fortran=order == "True")


def _is_text(name: str) -> bool:
    """Returns True for a dtype such as ``<U7``, with 1 to `MAX_JSON_BYTES` characters, in numpy's notation."""
    digits = name[2:]
    is_number = digits.isascii() and digits.isdigit() and digits[0] != "0" and len(digits) <= len(str(MAX_JSON_BYTES))
    return name[:1] in "<>=" and name[1:2] == "U" and is_number and int(digits) <= MAX_JSON_BYTES


def _npy_value(header: str, key: str, begin: str, end: str) -> str | None:
    """Returns the text after a key of an ``.npy`` header, between the marks `begin` and `end`."""
    _, _, rest = header.partition(f"'{key}':")
    rest = rest.lstrip(" ")
    value, closed, _ = rest[len(begin) :].partition(end)
    return value.strip() if closed and rest.startswith(begin) else None


def _npy_shape(axes: str | None) -> tuple[int, ...] | None:
    parts = [] if axes is None else [part.strip() for part in axes.removesuffix(",").split(",")]
    if axes is None or any(not (part.isascii() and part.isdigit() and len(part) < 20) for part in parts if axes):
        return None
    return tuple(map(int, parts)) if axes else ()


@contextlib.contextmanager
def open_stored(source: Path, what: str, *, archive: bool = False, max_bytes: int | None = None) -> Iterator[Stored]:
    """Opens a file of arrays for reading.

    Args:
        what: Expected kind of file, for messages, such as ``"a plan file"``.
        archive: Whether the file is ``.npz`` instead of safetensors.
        max_bytes: Limit of the decompressed arrays in bytes. Defaults to 64 MiB, or 16 times the file size if that is more.

    Raises:
        InputError: The file does not exist, has no arrays, or is truncated or damaged.
    """
    with open_regular(source) as file:
        try:
            if archive:
                with _open_zip(file, source, max_bytes) as members:
                    yield members
            else:
                yield _open_safetensors(file, source)
        except InputError:
            raise
        except _FAULTS as error:
            raise InputError(
                f"{str(source)!r} is not {what}, truncated or damaged ({first_line(error)}); write it again."
            ) from None


def _open_safetensors(file: BinaryIO, source: Path) -> Stored:
    size = file_bytes(file)
    head = file.read(8)
    if head.startswith(b"PK"):
        raise ValueError("it is a zip archive, as .npz files are")
    length = int.from_bytes(head, "little")
    data = 8 + length
    if not 2 <= length <= size - 8:
        raise ValueError(f"{size} bytes cannot hold a header of {length}")
    if length > MAX_JSON_BYTES:
        raise ValueError(f"a header of {length} bytes, more than {MAX_JSON_BYTES}")
    table = parse_json(file.read(length))
    if not isinstance(table, dict):
        raise ValueError("the header is not a table")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata is not text")
    ends = sorted(_extent(name, entry) for name, entry in table.items())
    begin = 0
    for low, high in ends:
        if low != begin:
            raise ValueError("its tensors overlap or leave gaps")
        begin = high
    if begin != size - data:
        raise ValueError(f"its tensors take {begin} bytes, but {size - data} follow the header")

    def read(name: str) -> Array:
        entry = table[name]
        if entry["dtype"] not in _DTYPES:
            cure = "store it as float16, float32 or whole numbers"
            raise InputError(f"{str(source)!r} stores {name} as {entry['dtype']}, which numpy does not have; {cure}.")
        low, high = entry["data_offsets"]
        file.seek(data + low)
        return _named(source, name, file.read(high - low), np.dtype(_DTYPES[entry["dtype"]]), entry["shape"])

    return Stored(frozenset(table), read, metadata.get(HEADER_KEY))


def _extent(name: str, entry: Any) -> tuple[int, int]:
    """Checks the header's entry for a tensor and returns its byte range."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise ValueError(f"{name} has no dtype")
    for key in ("shape", "data_offsets"):
        numbers = entry.get(key)
        if (
            not isinstance(numbers, list)
            or len(numbers) > _MAX_AXES
            or not all(type(n) is int and 0 <= n < 2**63 for n in numbers)
        ):
            raise ValueError(f"{name} has no {key}")
    offsets, itemsize = entry["data_offsets"], np.dtype(_DTYPES.get(entry["dtype"], "V0")).itemsize
    if len(offsets) != 2 or offsets[0] > offsets[1] or (itemsize and math.prod(entry["shape"]) * itemsize != np.diff(offsets)):
        raise ValueError(f"{name} is {entry['dtype']} of shape {entry['shape']}, which does not match its bytes")
    return offsets[0], offsets[1]


@contextlib.contextmanager
def _open_zip(file: BinaryIO, source: Path, max_bytes: int | None) -> Iterator[Stored]:
    left = max(_FREE_BYTES, _EXPANSION * file_bytes(file)) if max_bytes is None else max_bytes
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not a zip archive of arrays")
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

        def read(name: str) -> Array:
            nonlocal left
            info = members[name]
            # Other methods may decompress far more at once than requested.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise InputError(f"{str(source)!r} compresses {name} in an unknown way; write it with numpy.savez.")
            left -= info.file_size
            if left < 0:
                allowed = (
                    f"{name} would be {info.file_size} bytes, {-left} more than a file of {file_bytes(file)} bytes may become"
                )
                raise InputError(
                    f"{str(source)!r}: {allowed}; store it uncompressed (numpy.savez), or pass max_bytes= to trust it."
                )
            with archive.open(info) as member:
                data = member.read(info.file_size)
                # Data after the stated size would make that size wrong. Reading to the end also verifies the checksum.
                if member.read(1):
                    raise ValueError(f"{name} is longer than it says")
            try:
                return npy_array(memoryview(data))
            except InputError as error:
                raise InputError(f"{str(source)!r}, {name}: {error}") from None

        text = None
        if HEADER_KEY in members:
            array = read(HEADER_KEY)
            text = str(array.item()) if array.dtype.kind == "U" and array.nbytes <= 4 * MAX_JSON_BYTES else ""
        yield Stored(frozenset(members) - {HEADER_KEY}, read, text)


def _named(source: Path, name: str, data: bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    try:
        return array_of(data, dtype, shape)
    except InputError as error:
        raise InputError(f"{str(source)!r}, {name}: {error}") from None
