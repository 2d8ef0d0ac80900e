"""The moment before Megatron-Core reduces gradients: when a stage must have brought its own home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


def configs_of(chunks: Sequence[Any]) -> list[Any]:
    """Every config object on which the schedules may look for `finalize_model_grads_func`."""
    found: dict[int, Any] = {}
    for chunk in chunks:
        module = chunk
        while module is not None:
            if hasattr(module, "config") and hasattr(module.config, "finalize_model_grads_func"):
                found[id(module.config)] = module.config
            module = getattr(module, "module", None)
    return list(found.values())


def before_finalize(configs: Sequence[Any], end: Callable[[], None]) -> Callable[[], None]:
    """Calls `end` before Megatron reduces gradients; what is returned puts the configs back."""
    own = [config.finalize_model_grads_func for config in configs]

    def end_first(finalize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        end()
        return finalize(*args, **kwargs)

    for config, finalize in zip(configs, own, strict=True):
        if finalize is not None:
            config.finalize_model_grads_func = partial(end_first, finalize)

    def restore() -> None:
        for config, finalize in zip(configs, own, strict=True):
            config.finalize_model_grads_func = finalize

    return restore
