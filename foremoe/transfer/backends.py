"""The transfer backends by name: ours in one table, those of other packages by entry point."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from foremoe.base.errors import InputError
from foremoe.base.extensions import entry_point_names, load_entry_point
from foremoe.transfer.base import TransferBackend

ENTRY_POINTS = "foremoe.backends"
BACKENDS = {
    "collective": "foremoe.transfer.collective:Collective",
    "cupy_peer": "foremoe.transfer.cupy_peer:CupyPeer",
    "local": "foremoe.transfer.local:Local",
    "pinned_host": "foremoe.transfer.pinned_host:PinnedHost",
}
_PACKAGE_OF = {"cupy": "'foremoe[cupy]'"}  # where it is not the module's name


def backend_names() -> list[str]:
    """All names that `resolve_backend` knows: ours, then those of other packages. Imports none of them."""
    return [*BACKENDS, *(name for name in entry_point_names(ENTRY_POINTS) if name not in BACKENDS)]


def resolve_backend(backend: str | TransferBackend) -> TransferBackend:
    """An instance itself, or a new one of the class that a name of `backend_names` stands for.

    Raises:
        InputError: An unknown name, something that is not a backend, or a module that it `requires` is missing.
    """
    if isinstance(backend, str):
        if backend in BACKENDS:
            module_name, _, name = BACKENDS[backend].partition(":")
            found = getattr(importlib.import_module(module_name), name)
        elif backend in entry_point_names(ENTRY_POINTS):
            found = load_entry_point(ENTRY_POINTS, backend)
        else:
            known = ", ".join(backend_names())
            raise InputError(f"there is no transfer backend {backend!r}; choose from {known}, or give an instance.")
        backend = found() if isinstance(found, type) else found
    if not isinstance(backend, TransferBackend):
        raise InputError(f"{backend!r} is not a transfer backend; give an instance of a TransferBackend, or its name.")
    lacking = [name for name in backend.requires if find_spec(name) is None]
    if lacking:
        packages = " ".join(_PACKAGE_OF.get(name, name) for name in lacking)
        raise InputError(f"{type(backend).__name__} needs {', '.join(lacking)}; pip install {packages}.")
    return backend
