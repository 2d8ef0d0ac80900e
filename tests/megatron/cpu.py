"""Lets unmodified Megatron-Core train on CPU and gloo; no part of foremoe."""

import contextlib

import torch
from torch.overrides import TorchFunctionMode

_on_cpu = False


def run_on_cpu():
    """Patches what asks for a GPU in this process: devices, streams, generators. Does nothing where there is a GPU.

    Call it before the first layer is built. It stays for the life of the process.
    """
    global _on_cpu
    if torch.cuda.is_available() or _on_cpu:
        return
    _on_cpu = True
    _no_streams()
    _one_generator()
    _router_without_transformer_engine()
    _splits_on_host()
    _grouped_gemm()
    _NoCuda().__enter__()


class _NoCuda(TorchFunctionMode):
    """Wherever a CUDA device is asked for, the CPU is meant."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer tells dtypes apart by names such as torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        return func(*(_here(arg) for arg in args), **kwargs)


def _here(value):
    kind = value.type if isinstance(value, torch.device) else value
    return "cpu" if isinstance(kind, str) and kind.split(":")[0] == "cuda" else value


class _Stream:
    """A stream that does its work at once; also stands for the events it records."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self if name == "record_event" else None


def _no_streams():
    stream = _Stream()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: stream
    torch.cuda.stream = contextlib.nullcontext
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, lambda *_, **__: None)


def _one_generator():
    from megatron.core.tensor_parallel import random

    read, write = (lambda *_, **__: torch.get_rng_state()), (lambda state, *_, **__: torch.set_rng_state(state))
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = read, write
    random._get_cuda_rng_state, random._set_cuda_rng_state = read, write
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)


def _router_without_transformer_engine():
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # the router asks for this name anyway
        moe_utils.te_general_gemm = None


def _splits_on_host():
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    copy_to_host = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize

    def with_splits_on_host(self, point, tokens_per_expert=None):
        """Gloo takes no tensors as split sizes; those of a GPU have become numpy arrays at this point."""
        result = copy_to_host(self, point, tokens_per_expert)
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(getattr(self, name), torch.Tensor):
                setattr(self, name, getattr(self, name).numpy())
        return result

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = with_splits_on_host


def _grouped_gemm():
    """The grouped GEMM that `GroupedMLP` wants from a CUDA library, by torch."""
    from megatron.core.transformer.moe import grouped_gemm_util

    class Ops:
        @staticmethod
        def gmm(x, weights, num_rows, trans_b=False):
            weights = weights.transpose(1, 2) if trans_b else weights
            return torch.nn.functional.grouped_mm(x, weights, offs=num_rows.cumsum(0).to(torch.int32))

    grouped_gemm_util.ops = Ops
    grouped_gemm_util.grouped_gemm_is_available = lambda: True
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
