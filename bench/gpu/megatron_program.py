"""Runs one rank of examples/megatron_gpt.py with options that trainers set, given as JSON. `bench.gpu.megatron` starts it.

The keys are `overlap`, `recompute`, `bf16` and `unknown`. With `overlap`, no_sync and grad_sync functions reduce gradients during
the backward pass. If `overlap` is 2, they also gather parameters. With `recompute`, the forward pass of all layers runs again.
`unknown` is the number of tokens at the end of each rank's micro-steps that no plan knows. Without a GPU, Megatron-Core runs on
the CPU as in this repository's tests.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foremoe.base.arrays import Array

ROOT = Path(__file__).resolve().parents[2]


def with_options(example: Any, options: dict[str, Any]) -> None:
    """Replaces what the example builds by what trainers build."""
    names = ["TransformerConfig", "GPTModel", "DistributedDataParallelConfig", "DistributedDataParallel", "OptimizerConfig"]
    built = {name: getattr(example, name) for name in names}
    overlap, dtype = options.get("overlap", 0), torch.bfloat16 if options.get("bf16") else torch.float32
    extra: dict[str, Any] = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": bool(options.get("bf16"))}
    if options.get("recompute"):
        extra |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    reduction = {
        "overlap_grad_reduce": overlap > 0,
        "overlap_param_gather": overlap > 1,
        "bucket_size": 20000 if overlap else None,
    }

    def wrapped(config: Any, *args: Any, **kwargs: Any) -> Any:
        ddp = built["DistributedDataParallel"](config, *args, **kwargs)
        if overlap:
            config.no_sync_func, config.grad_sync_func = ddp.no_sync, ddp.start_grad_sync
        return ddp

    example.TransformerConfig = lambda **given: built["TransformerConfig"](**given | extra)
    example.GPTModel = lambda *args, **kwargs: built["GPTModel"](*args, **kwargs).to(dtype)
    example.DistributedDataParallelConfig = lambda **given: built["DistributedDataParallelConfig"](**given | reduction)
    example.DistributedDataParallel = wrapped
    example.OptimizerConfig = lambda **given: built["OptimizerConfig"](
        **given | {"bf16": bool(options.get("bf16")), "params_dtype": dtype, "overlap_param_gather": overlap > 1}
    )
    if options.get("unknown"):
        _hide(example.foremoe.integrations.megatron, options["unknown"])


def _hide(megatron: Any, unknown: int) -> None:
    """Hides the last tokens from stages, and prints at the end how many rows were known."""
    attach = megatron.attach

    def attached(*args: Any, **kwargs: Any) -> Any:
        moe = attach(*args, **kwargs)
        stage, detach = moe.stage, moe.detach

        def told(topks: Sequence[Array], name: str) -> Any:
            topks = [np.array(topk_TLK) for topk_TLK in topks]
            for topk_TLK in topks:
                topk_TLK[-unknown:] = -1
            return stage(topks, name)

        def end() -> None:
            print(f"known rows {moe.report.known_rows}", flush=True)
            detach()

        moe.stage, moe.detach = told, end
        return moe

    megatron.attach = attached


def main() -> None:
    """Runs the example."""
    options = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        from megatron.core.transformer.moe import moe_utils

        # Megatron-Core 0.16.1 asks for this name on GPUs, and defines it only where Transformer Engine is installed.
        vars(moe_utils).setdefault("te_general_gemm", None)
    else:
        sys.path.insert(0, str(ROOT / "tests" / "megatron"))
        import cpu  # type: ignore[import-not-found]

        torch.set_num_threads(1)
        cpu.run_on_cpu()
    sys.path.insert(0, str(ROOT / "examples"))
    import megatron_gpt  # type: ignore[import-not-found]

    import foremoe.integrations.megatron  # noqa: F401

    with_options(megatron_gpt, options)
    megatron_gpt.main(sys.argv[2:])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
