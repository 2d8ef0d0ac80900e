"""Lets unmodified Megatron-Core run a MoELayer, its checkpointing and its DDP on CPU and gloo; no part of foremoe."""

import contextlib

import torch


def run_on_cpu():
    """Patches what asks for a GPU in this process: device numbers, streams, generators. Does nothing where there is a GPU.

    Call it before the first layer is built.
    """
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda *_: _STREAM
    torch.cuda.stream = contextlib.nullcontext

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    # Checkpointing saves and restores the accelerator's generator.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # The router asks for this name without Transformer Engine, too.
    moe_utils.te_general_gemm = None

    copy_to_host = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize

    def with_splits_on_host(self, point, tokens_per_expert=None):
        """Gloo takes no tensors as split sizes; those of a GPU have become numpy arrays at this point."""
        result = copy_to_host(self, point, tokens_per_expert)
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(getattr(self, name), torch.Tensor):
                setattr(self, name, getattr(self, name).numpy())
        return result

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = with_splits_on_host


class _Stream:
    """A stream that does its work at once; also stands for the event it records."""

    def __init__(self, *_, **__):
        pass

    def record_event(self, *_):
        return self

    def wait_stream(self, _):
        pass

    def synchronize(self):
        pass


_STREAM = _Stream()
