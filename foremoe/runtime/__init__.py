"""Runtime that executes a plan in plain torch, with expert compute, dispatch, combine and gradients. Requires torch."""

from foremoe.base.errors import InputError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError:
    raise InputError("running a plan needs torch; pip install 'foremoe[torch]'.") from None

from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.experts import ExpertMath, SwiGLU
from foremoe.runtime.remap import remap
from foremoe.runtime.runtime import Runtime, StageSummary

__all__ = ["ExpertBank", "ExpertMath", "Runtime", "StageSummary", "SwiGLU", "remap"]
