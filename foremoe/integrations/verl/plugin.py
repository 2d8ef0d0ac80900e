"""The module that ``import verl`` loads in every process, through the entry point group ``verl.plugins``.

It must cost nothing if no Megatron engine is made: it waits for veRL's engine module and replaces that engine whenever the module
is imported or reloaded. The engine plans only if the config says so (`EngineConfig`). ``FOREMOE=0`` disables everything. If
anything fails here, veRL stays unchanged, and a warning is logged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from foremoe.integrations.verl import ENGINE_MODULE

_logger = logging.getLogger(__name__)


def install() -> None:
    """Registers the engine now, or once veRL's own has been imported; a second call has no effect."""
    if os.environ.get("FOREMOE", "1").strip().lower() in ("0", "off", "false", "no"):
        return
    # Of a reload of this module there may be one of a class that was called the same.
    if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())
    if ENGINE_MODULE in sys.modules:
        _register(sys.modules[ENGINE_MODULE])


def _register(module: ModuleType) -> None:
    try:
        from foremoe.integrations.verl.engine import register

        register(module)
    except (Exception, SystemExit) as error:
        # A log entry, as veRL's own: a Python warning is an exception under -W error, and would stop the import.
        _logger.warning(
            "foremoe could not be added to veRL's Megatron engine, which runs without it: %s: %s",
            type(error).__name__,
            error,
            exc_info=True,
        )


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds nothing itself; lets veRL's engine module be found as ever and calls `_register` after it has run.

    It stays: code that looks for a module need not import it, an import may fail and be tried again, and modules are reloaded.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != ENGINE_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)  # type: ignore[assignment]  # it has all that a loader has
        return spec


class _ThenRegister:
    """veRL's own loader in everything but `exec_module`: runpy, pdb and inspect ask it for code and source."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying asks before there is a loader
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        _register(module)


install()
