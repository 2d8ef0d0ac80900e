"""Groups of processes that plan together and exchange messages. Requires torch."""

from foremoe.base.errors import InputError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError:
    raise InputError("running on several ranks needs torch; pip install 'foremoe[torch]'.") from None

from foremoe.distributed.group import Group, ThreadGroup, TorchGroup

__all__ = ["Group", "ThreadGroup", "TorchGroup"]
