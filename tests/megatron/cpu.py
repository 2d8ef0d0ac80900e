"""Lets unmodified Megatron-Core train on CPU and gloo; no part of foremoe."""

import contextlib
import gc
from unittest.mock import patch

import torch
import torch._dynamo
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
    torch._dynamo.config.disable = True  # a compiler for each process and shape would take most of the time
    _no_streams()
    _one_generator()
    _router_without_transformer_engine()
    _splits_on_host()
    _grouped_gemm()
    _NoCuda().__enter__()
    # Saving a checkpoint collects garbage; what was imported need not be looked at each time.
    gc.collect()
    gc.freeze()


class _NoCuda(TorchFunctionMode):
    """Wherever a CUDA device is asked for, the CPU is meant."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer tells dtypes apart by names such as torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs = kwargs | {"device": _here(kwargs["device"])}
        if "pin_memory" in kwargs:
            kwargs = kwargs | {"pin_memory": False}
        for arg in args:
            if arg.__class__ is str or arg.__class__ is torch.device:  # most calls have neither
                args = tuple(map(_here, args))
                break
        return func(*args, **kwargs)


def _here(value):
    kind = value.type if isinstance(value, torch.device) else value
    return "cpu" if isinstance(kind, str) and kind.split(":")[0] == "cuda" else value


@contextlib.contextmanager
def steady_rows():
    """Within, a row of a product of matrices does not depend on which other rows are multiplied with it.

    BLAS chooses the order of a dot product by the shape of the whole product, so a token's output would depend, in the last
    bits, on how many tokens its expert serves on this rank. Without that, a model that only moves tokens to copies of their
    experts differs in nothing but the order in which weight gradients are summed.
    """
    matmul = torch.matmul

    def steady(a, b):
        return _Product.apply(a, b) if a.dim() == b.dim() == 2 else matmul(a, b)

    # Not a mode, as above: backward passes run without modes.
    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "matmul"), (torch.Tensor, "matmul"), (torch.Tensor, "__matmul__")):
            stack.enter_context(patch.object(owner, name, steady))
        yield


class _Product(torch.autograd.Function):
    """a @ b, dot product by dot product, with sums in float32."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _product(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return _product(grad, b.t()), _product(a.t(), grad)


def _product(a, b):
    # In memory, too, the last dimension is the one that is summed up; else the order of the sum depends on the others.
    return (a.float().contiguous().unsqueeze(1) * b.float().t().contiguous()).sum(-1).to(a.dtype)


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


class GroupedGemm:
    """The grouped GEMM that `GroupedMLP` wants from a CUDA library, by torch.

    Attributes:
        watch: called with the input, the weights [experts, in, out], the rows of each expert and the output.
    """

    watch = None

    @classmethod
    def gmm(cls, x, weights, num_rows, trans_b=False):
        weights = weights.transpose(1, 2) if trans_b else weights
        # One product at a time: `steady_rows` sees it, and the watched weights keep their place in memory.
        output = torch.cat([part @ weight for part, weight in zip(x.split(num_rows.tolist()), weights, strict=True)])
        if cls.watch is not None:
            cls.watch(x, weights, num_rows.tolist(), output)
        return output


def _grouped_gemm():
    try:
        from megatron.core.transformer.moe import grouped_gemm_util
    except ImportError:  # gone with `GroupedMLP` after 0.16
        return

    grouped_gemm_util.ops = GroupedGemm
    grouped_gemm_util.grouped_gemm_is_available = lambda: True
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
