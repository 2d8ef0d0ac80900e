"""Imported by the process that ranks are forked from, after what those of Megatron-Core's tests need."""

import gc
import importlib

import loaded_once  # noqa: F401

for name in (
    "verl.utils.megatron.router_replay_patch", "verl.workers.engine.megatron.transformer_impl", "verl.workers.engine_workers",
    "verl.workers.utils.padding", "verl.utils.profiler", "verl.utils.metric",
):  # fmt: skip
    importlib.import_module(name)
gc.collect()
gc.freeze()
