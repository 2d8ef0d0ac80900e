"""Functions that read regular files and write files atomically."""

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from foremoe.base.errors import InputError, did_you_mean, file_errors


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular, non-empty file for reading. Refuses a FIFO, device or directory without waiting for it."""
    name = os.fspath(path)
    with file_errors(path, "read", "check the path"):
        try:
            _require_regular(name, os.stat(path))
        except FileNotFoundError:
            raise InputError(f"there is no file {name!r}; {_near(name)}check the path.") from None
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # Another file may have taken the name in the meantime.
            _require_regular(name, os.fstat(descriptor))
        except InputError:
            os.close(descriptor)
            raise
    return os.fdopen(descriptor, "rb")


def _near(name: str | bytes) -> str:
    """Returns a hint that names a similarly named file in the same folder, or an empty string."""
    folder, last = os.path.split(os.fsdecode(name))
    with contextlib.suppress(OSError):
        return did_you_mean(last, sorted(os.listdir(folder or ".")))
    return ""


def file_bytes(file: BinaryIO) -> int:
    """Returns the size of an open file."""
    return os.fstat(file.fileno()).st_size


def read_file(path: str | os.PathLike[str], limit: int) -> bytes:
    """Returns the bytes of a regular file of at most `limit` bytes."""
    with open_regular(path) as file, file_errors(path, "read", "check the path"):
        if file_bytes(file) > limit:
            raise InputError(f"{os.fspath(path)!r} has {file_bytes(file)} bytes; files of this kind have at most {limit}.")
        return file.read(limit)


def write_file(path: str | os.PathLike[str], payload: bytes | str) -> None:
    """Writes a file atomically, with text as UTF-8. On failure, the old file remains.

    The bytes are written to a file with a random name in the same folder and synced to disk. The file is then renamed to `path`,
    so readers see either the old or the new content, and the last of several writers wins. A device or pipe is written directly.

    Raises:
        InputError: The file cannot be written, or the disk is full.
    """
    data = payload.encode() if isinstance(payload, str) else payload
    with file_errors(path, "write", "give another path"):
        target = Path(path)
        old = _status(target)
        if old is not None and not stat.S_ISREG(old.st_mode) and not stat.S_ISDIR(old.st_mode):
            target.write_bytes(data)
            return
        # The file is opened exclusively, so that an existing file or link is never written to.
        beside = target.with_name(f".foremoe-{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(beside, flags, 0o666)
        try:
            with open(descriptor, "wb") as file:
                if old is not None and stat.S_ISREG(old.st_mode):
                    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        _sync_folder(target.parent)


def _sync_folder(path: Path) -> None:
    # The file is complete. If the folder cannot be opened or synced, a power failure can undo the rename but nothing else.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _require_regular(name: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{name!r} is not a file; give the path of one file.")
    if found.st_size == 0:
        raise InputError(f"{name!r} is empty; write it again.")
