"""Module that ``import verl`` loads in every process, through the entry point group ``verl.plugins``.

The module must cost nothing if no Megatron engine is created. It therefore replaces the engine only when veRL's engine module is
imported or reloaded. The new engine plans only if the config has `foremoe` (see `EngineConfig`). ``FOREMOE=0`` disables the
plugin. If anything fails here, veRL is not changed, and a warning is logged.
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
    """Registers the engine, either now or when veRL's engine module is imported. A second call has no effect."""
    if os.environ.get("FOREMOE", "1").strip().lower() in ("0", "off", "false", "no"):
        return
    # After a reload of this module, a finder of the earlier class with the same name may exist.
    if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())
    if ENGINE_MODULE in sys.modules:
        _register(sys.modules[ENGINE_MODULE])


def _register(module: ModuleType) -> None:
    try:
        from foremoe.integrations.verl.engine import register

        register(module)
    except (Exception, SystemExit) as error:
        # Logged instead of a Python warning, which would be an exception under -W error and stop the import.
        _logger.warning(
            "foremoe could not be added to veRL's Megatron engine, which runs without it: %s: %s",
            type(error).__name__,
            error,
            exc_info=True,
        )


class _Waiting(importlib.abc.MetaPathFinder):
    """Finder that delegates the search for veRL's engine module and calls `_register` after the module has run.

    It remains installed, because a search may not lead to an import, a failed import may be repeated, and modules are reloaded.
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
    """Wrapper of veRL's own loader that differs only in `exec_module`, because runpy, pdb and inspect use the other methods."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy looks these up before the loader is set
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        _register(module)


install()
