"""Ends a stage on all ranks before Megatron-Core reduces gradients, so that replica gradients are at home by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from foremoe.base.errors import InputError


def configs_of(chunks: Sequence[Any]) -> list[Any]:
    """Returns every config object in which Megatron's schedules may look for `finalize_model_grads_func`."""
    found: dict[int, Any] = {}
    for chunk in chunks:
        module = chunk
        while module is not None:
            if hasattr(module, "config") and hasattr(module.config, "finalize_model_grads_func"):
                found[id(module.config)] = module.config
            module = getattr(module, "module", None)
    return list(found.values())


def before_finalize(configs: Sequence[Any], end: Callable[[], InputError | None]) -> Callable[[], None]:
    """Makes Megatron call `end` before it reduces gradients. Returns a function that restores the configs.

    Until the configs are restored, they have no `grad_sync_func`. With this function, later pipeline ranks would reduce all
    gradients after the last backward pass but before `end`. Without it, they reduce gradients during the last backward pass, as
    the first pipeline rank does.

    Args:
        end: Function that returns the error that stops all ranks, or None if they may continue. It returns the same on all ranks.
    """
    own = [config.finalize_model_grads_func for config in configs]
    syncs = [getattr(config, "grad_sync_func", None) for config in configs]

    def end_first(config: Any, finalize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        error = end()
        if error is None:
            return finalize(*args, **kwargs)
        for chunk in args[0]:
            if _reduces_in_backward(chunk):
                chunk.finish_grad_sync()  # finishes reductions that backward started, on all ranks
        if getattr(config, "timers", None) is not None:
            config.timers("forward-backward").stop()  # as Megatron does, so that the timer can start in the next step
        raise error

    for config, finalize in zip(configs, own, strict=True):
        if finalize is not None:
            config.finalize_model_grads_func = partial(end_first, config, finalize)

    for config, sync in zip(configs, syncs, strict=True):
        if sync is not None:
            config.grad_sync_func = None

    def restore() -> None:
        for config, finalize, sync in zip(configs, own, syncs, strict=True):
            config.finalize_model_grads_func = finalize
            if sync is not None:
                config.grad_sync_func = sync

    return restore


def _reduces_in_backward(chunk: Any) -> bool:
    return bool(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False))
