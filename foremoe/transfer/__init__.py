"""Weight transfers: one backend per file, and the engine that runs a plan's transfers over these backends. Requires torch."""

from foremoe.base.errors import InputError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError:
    raise InputError("running a plan needs torch; pip install 'foremoe[torch]'.") from None

from foremoe.transfer.base import Buffers, Copy, Entry, TransferBackend
from foremoe.transfer.deepep import DeepEpEngine, StackedBuffers
from foremoe.transfer.engine import Engine
from foremoe.transfer.settings import EngineSettings
from foremoe.transfer.timeline import Timeline

__all__ = [
    "Buffers", "Copy", "DeepEpEngine", "Engine", "EngineSettings", "Entry", "StackedBuffers", "Timeline", "TransferBackend",
]  # fmt: skip
