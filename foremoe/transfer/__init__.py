"""Moving weights: transfer backends, one per file, and the engine that runs a plan's transfers over them. Needs torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from foremoe.errors import InputError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError:
    raise InputError("running a plan needs torch; pip install 'foremoe[torch]'.") from None

if TYPE_CHECKING:
    from foremoe.transfer.base import Buffers as Buffers
    from foremoe.transfer.base import Copy as Copy
    from foremoe.transfer.base import Entry as Entry
    from foremoe.transfer.base import TransferBackend as TransferBackend
    from foremoe.transfer.engine import Engine as Engine
    from foremoe.transfer.group import Group as Group
    from foremoe.transfer.group import ThreadGroup as ThreadGroup
    from foremoe.transfer.group import TorchGroup as TorchGroup
    from foremoe.transfer.timeline import Timeline as Timeline

_HOME = {
    "Buffers": "base", "Copy": "base", "Engine": "engine", "Entry": "base", "Group": "group", "ThreadGroup": "group",
    "Timeline": "timeline", "TorchGroup": "group", "TransferBackend": "base",
}  # fmt: skip

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"foremoe.transfer.{_HOME[name]}"), name)
    raise AttributeError(f"module 'foremoe.transfer' has no attribute {name!r}")
