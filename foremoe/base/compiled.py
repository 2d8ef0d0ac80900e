"""`kernel`, which is numba's ``njit`` with a disk cache that detects edits in other files and needs no home folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import os
import pickle
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numba
from numba import njit
from numba.core import event
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    _CacheLocator,
    _SourceFileBackedLocatorMixin,
)
from numba.extending import is_jitted

_logger = logging.getLogger(__name__)
_DIGEST_BYTES = 32
COMPILING = "compiling kernels that are not cached yet; `foremoe warm-up` compiles only the default planner's in advance"


def inner_kernel(function: Callable[..., Any]) -> Any:
    """Compiles functions that allocate nothing and are called by kernels. Called from Python, they run uncompiled.

    Allocation is a compile error, and so is ``a[:] = b``. numba does not count references in these functions, because counting
    those to arrays in tuples takes longer than the work of a small function. The functions have no entry point for Python,
    because it would take a tenth of the compile time.
    """
    dispatcher: Any = kernel(function, _nrt=False, forceinline=True, no_cpython_wrapper=True)
    jitted = is_jitted(dispatcher)
    if jitted:
        # Otherwise Python would call address 0.
        dispatcher._insert, dispatcher._compile_for_args = lambda *_: None, lambda *_, **__: function
    return dispatcher


def inlined_kernel(function: Callable[..., Any]) -> Any:
    """Compiles functions with a single caller as a part of this caller."""
    return kernel(function, inline="always")


def kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Compiles a function like ``njit(nogil=True, cache=True)``, and recompiles it if any of its source files changes.

    numba alone checks only the file of the function itself, and would keep running outdated callees. If neither the installation
    nor the home folder is writable, the cache is in the temporary folder. If that is not possible, the cache is disabled.
    """
    options |= {"nogil": True, "no_cfunc_wrapper": True}  # nothing calls kernels from C
    dispatcher: Any = njit(**options)(function)
    disabled = not is_jitted(dispatcher)  # NUMBA_DISABLE_JIT is set
    if disabled:
        return dispatcher
    _digest(function.__code__.co_filename)  # digest of the code that was read, in case the file changes before the first call
    try:
        dispatcher._cache = _Cache(function)
        if isinstance(dispatcher._cache._impl.locator, _TemporaryFolder):
            _warn(f"{_NO_FOLDER}, so compiled code is cached in {_own_folder()}")
    except RuntimeError:  # no locator, so the dispatcher works without a cache
        _warn(f"{_NO_FOLDER}, so every process compiles again")
    return dispatcher


class _Clock(event.Listener):  # type: ignore[misc]
    """Time that the process has spent compiling, in wall seconds and in CPU seconds per thread. Callers include callees."""

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = 0.0, dict[int, float]()
        self.watchers: list[Callable[[str], None]] = []
        self.begun: list[tuple[float, float]] = []
        self.told = False

    # numba compiles one function at a time, under a lock.
    def on_start(self, event: Any) -> None:
        if not self.told and isinstance(getattr(event.data["dispatcher"], "_cache", None), _Cache):
            self.told = True
            # A watcher shows it in its own way, and the ranks of a machine share a cache.
            if not self.watchers and os.environ.get("LOCAL_RANK", "0") == "0":
                _logger.warning("foremoe: %s", COMPILING)
        self.begun.append((time.perf_counter(), time.thread_time()))

    def on_end(self, event: Any) -> None:
        wall_s, cpu_s = self.begun[-1]
        if len(self.begun) == 1:
            thread = threading.get_ident()
            self.wall_s += time.perf_counter() - wall_s
            self.cpu_s[thread] = self.cpu_s.get(thread, 0.0) + time.thread_time() - cpu_s
        self.begun.pop()  # last, so that concurrent readers may over-count but never under-count
        for watcher in self.watchers:
            watcher(event.data["dispatcher"].py_func.__name__)


_CLOCK = _Clock()
event.register("numba:compile", _CLOCK)


def compile_seconds() -> tuple[float, float]:
    """Returns the process's wall time of all compilations and this thread's CPU time of finished compilations, in seconds."""
    under_way = sum(time.perf_counter() - wall_s for wall_s, _ in _CLOCK.begun[:1])
    return _CLOCK.wall_s + under_way, _CLOCK.cpu_s.get(threading.get_ident(), 0.0)


@contextlib.contextmanager
def watch_compilation(compiled: Callable[[str], None] | None) -> Iterator[None]:
    """Calls `compiled` with the name of every function that is compiled in the block. Functions loaded from disk do not count."""
    if compiled is None:
        yield
        return
    _CLOCK.watchers.append(compiled)
    try:
        yield
    finally:
        _CLOCK.watchers.remove(compiled)


class _TemporaryFolder(_SourceFileBackedLocatorMixin, _CacheLocator):  # type: ignore[misc]
    """Cache locator for machines where numba finds no writable folder."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        self._py_file, self._lineno = py_file, py_func.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(Path(str(_own_folder()), self.get_suitable_cache_subpath(self._py_file)))

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        return super().from_function(py_func, py_file) if _own_folder() else None


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [*CompileResultCacheImpl._locator_classes, _TemporaryFolder]  # noqa: RUF012 (as numba declares it)


class _CheckedFile(IndexDataCacheFile):  # type: ignore[misc]
    """Index and data files that begin with a checksum. A data file also names its version and signature.

    A power failure, a full disk or a copied image can leave files that are empty, truncated, zeroed or older than their index. A
    process that runs machine code from such a file crashes. A damaged file therefore counts as absent, and is replaced.
    """

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (self._version, key, data))

    def load(self, key: Any) -> Any:
        found = super().load(key)
        return found[2] if found is not None and found[:2] == (self._version, key) else None

    def _load_index(self) -> dict[Any, str]:
        try:
            stream = io.BytesIO(_checked(self._index_path))
            # The rest of a file of another version is not read, because its classes may no longer exist.
            return pickle.load(stream)[1] if pickle.load(stream) == self._version else {}
        except Exception:
            return {}

    def _load_data(self, name: str) -> Any:
        return pickle.loads(_checked(self._data_path(name)))

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[io.BytesIO]:
        whole = io.BytesIO()
        yield whole
        data = whole.getvalue()
        with super()._open_for_write(filepath) as file:  # renames, so that readers see the old file or this one
            file.write(hashlib.sha256(data).digest() + data)


def _checked(path: str) -> bytes:
    """Returns the bytes after a file's checksum."""
    whole = Path(path).read_bytes()
    digest, data = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"{path} is damaged")
    return data


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _CacheImpl

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)
        self._cache_file = _CheckedFile(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Computed at the first call, because a callee may be defined below its caller.
        own, files = self._impl.locator.get_source_stamp(), {f"{kind} {_file_digest(kind)}" for kind in _tuple_classes(sig)}
        stamp = (own, *sorted(files.union(_sources(self._py_func, set()))))
        self._cache_file._source_stamp = stamp
        # Compared before signatures are read, because their classes may no longer exist.
        self._cache_file._version = (numba.__version__, stamp)
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # pickle and LLVM raise any exception on unreadable data
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            _warn_unsaved(reason, self._cache_path)


@functools.cache
def _own_folder() -> Path | None:
    """Returns this user's kernel folder in the temporary folder if nobody else can write there, as cached files are executed."""
    if not hasattr(os, "getuid"):
        return None
    try:
        parent = Path(tempfile.gettempdir())
        folder = parent / f"foremoe-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        above, mine = parent.stat(), folder.lstat()
    except OSError:
        return None
    # A user who may rename the folder could replace it.
    others_rename = (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX) or above.st_uid not in (0, os.getuid())
    private = stat.S_ISDIR(mine.st_mode) and mine.st_uid == os.getuid() and not mine.st_mode & 0o077
    return folder if private and not others_rename else None


_NO_FOLDER = "neither foremoe's folder nor the cache in the home folder can be written"
_unsaved: list[str] = []


def _warn_unsaved(reason: str, folder: str) -> None:
    """Warns once for all kernels and reasons, because a full disk affects all of them."""
    if not _unsaved:
        _unsaved.append(reason)
        _warn(f"compiled code cannot be saved in {folder} ({reason}), so the next process compiles it again")


@functools.cache
def _warn(what: str) -> None:
    _logger.warning("%s; set NUMBA_CACHE_DIR to a folder of your own.", what)


def _sources(function: Any, seen: set[Any]) -> Iterator[str]:
    """Yields the sources of a kernel: the files of all kernels and classes that it uses, recursively, and its constants."""
    if function in seen:
        return
    seen.add(function)
    yield _digest(function.__code__.co_filename)
    names, modules = set(_names(function.__code__)), set()
    named = [(name, function.__globals__[name]) for name in names & function.__globals__.keys()]
    while named:
        name, value = named.pop()
        if is_jitted(value):
            yield from _sources(value.py_func, seen)
        elif isinstance(value, ModuleType) and value not in modules:
            modules.add(value)
            named += [(name, vars(value)[name]) for name in names & vars(value).keys()]
        elif isinstance(value, type):
            yield _file_digest(value)
        elif isinstance(value, (int, float, str, tuple)):
            yield f"{function.__qualname__}: {name} = {value!r}"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _tuple_classes(types: Any) -> Iterator[type]:
    """Yields the named tuples among the types of a signature."""
    for one in types:
        if hasattr(one, "instance_class"):
            yield one.instance_class
        yield from _tuple_classes(getattr(one, "types", ()))


def _file_digest(kind: type) -> str:
    return _digest(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


@functools.cache
def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:  # the file is in an archive, whose time stamp numba checks
        return ""
