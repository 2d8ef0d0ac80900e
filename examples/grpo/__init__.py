"""The demo: a small MoE language model learns by GRPO on processes of this machine, with and without foremoe. Needs torch."""

from foremoe.base.errors import InputError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError:
    raise InputError("the demo needs torch; pip install 'foremoe[torch]'.") from None
