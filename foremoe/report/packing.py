"""Packs the numbers of the page into one compressed block of bytes with a table of contents."""

import base64
import zlib
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError

# Types that the browser's typed arrays also have. 64-bit integers are narrowed if they fit.
DTYPES = ("uint8", "uint16", "int16", "int32", "float32")
LEVEL = 7  # higher levels take three to six times as long and save only 1 % of the size


class Packer:
    """A collection of named arrays. Bytes are grouped by significance, because the high bytes of counts compress well."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        # dtype and shape of every array, its place in the decompressed bytes, and whether it holds differences.
        self.contents: dict[str, dict[str, Any]] = {}
        self._size = 0

    def add(self, name: str, array: Array, dtype: str, *, differences: bool = False) -> None:
        """Adds `array` as `dtype`. If `differences` is True, it stores the int32 differences between neighbours."""
        assert dtype in DTYPES and name not in self.contents and (not differences or dtype == "int32")
        flat = np.asarray(array).ravel()
        if dtype != "float32" and flat.size:
            low, high, info = int(flat.min()), int(flat.max()), np.iinfo(dtype)
            if low < info.min or high > info.max:
                raise InputError(f"the report cannot hold {name} from {low} to {high}; give fewer micro-steps or ranks.")
        values = flat.astype(np.dtype(dtype).newbyteorder("<"))
        if differences:
            values = np.diff(values, prepend=values.dtype.type(0))  # overflows at 32 bits, like the sum in the reader
        block = values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()
        self.contents[name] = {
            "dtype": dtype, "shape": list(np.shape(array)), "offset": self._size, "bytes": len(block), "differences": differences,
        }  # fmt: skip
        self._blocks.append(block)
        self._size += len(block)

    def text(self) -> str:
        """Returns all blocks, compressed with zlib, as base64."""
        return base64.b64encode(zlib.compress(b"".join(self._blocks), LEVEL)).decode("ascii")
