"""Tensors of a pretend GPU for layers: every operation, those of autograd too, is queued on the current stream."""

import torch
from pretend_gpu import gpu, raw
from torch.utils._pytree import tree_map_only

_POISON = {True: float("nan"), False: 7}


class LateTensor(torch.Tensor):
    """A tensor whose memory holds what nobody expects until the stream gets to the operation that writes it.

    Views are made at once. Who asks for values waits for the current stream.
    """

    is_cuda = True

    def __new__(cls, memory):
        options = {"strides": memory.stride(), "storage_offset": memory.storage_offset(), "dtype": memory.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, memory.shape, **options)

    def __init__(self, memory):
        self.memory = memory

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cpu:
            gpu.stream().synchronize()
            return raw(args[0]).clone()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        given, options = tree_map_only(LateTensor, raw, (args, kwargs or {}))
        returns, wraps = func._schema.returns, lambda result: tree_map_only(torch.Tensor, LateTensor, result)
        if func._schema.is_mutable:
            gpu.stream().put(lambda: func(*given, **options))
            return (kwargs or {}).get("out", args[0])
        if any(value.alias_info for value in returns):
            return wraps(func(*given, **options))
        if func is torch.ops.aten._local_scalar_dense.default:
            gpu.stream().synchronize()
            return func(*given, **options)
        results = tree_map_only(torch.Tensor, _poisoned, func(*tree_map_only(torch.Tensor, _meta, given), **_on_meta(options)))
        if "empty" not in func.__name__:
            gpu.stream().put(lambda: _fill(results, func(*given, **options)))
        return wraps(results)


def _meta(tensor):
    return tensor.to("meta")


def _on_meta(options):
    return tree_map_only(torch.Tensor, _meta, options) | ({"device": "meta"} if "device" in options else {})


def _poisoned(meta):
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype).fill_(_POISON[meta.is_floating_point()])


def _fill(results, found):
    for result, value in zip(_tensors(results), _tensors(found), strict=True):
        result.copy_(value)


def _tensors(results):
    return (results,) if isinstance(results, torch.Tensor) else results
