"""Moving weights: transfer backends, one per file, and the engine that runs a plan's transfers over them. Needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foremoe.base.errors import InputError
from foremoe.base.lazy import lazy

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
    from foremoe.transfer.timeline import Timeline as Timeline

_NAMES = {
    "base": ("Buffers", "Copy", "Entry", "TransferBackend"),
    "engine": ("Engine",),
    "timeline": ("Timeline",),
}
__all__ = [
    "Buffers", "Copy", "Engine", "Entry", "Timeline", "TransferBackend",
]  # fmt: skip

__getattr__, __dir__ = lazy(__name__, _NAMES)
