"""The routing that veRL will replay on this rank, micro-batch by micro-batch, before any of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foremoe.base.arrays import Array

# Letters: T tokens of this rank (after packing, padding, context and sequence parallelism), L MoE layers of this rank, K top-k.


def routing_of(engine: Any, micro_batches: Sequence[Any]) -> list[Array]:
    """int16 [T, L, K] per micro-batch, in the order of the rank's MoE layers; -1 where veRL lets the router choose.

    veRL's own code lays the routes out: it sets the targets of every micro-batch as it will before the forward, they are read,
    and cleared again. So packing, padding and every kind of parallelism are veRL's by construction.
    """
    from verl.utils.megatron import router_replay_utils as replay
    from verl.utils.megatron.router_replay_patch import RouterReplay
    from verl.utils.megatron_utils import unwrap_model

    chunks = [unwrap_model(chunk) for chunk in engine.module]
    # Found once: it is a walk over all modules, of which there are as many as experts.
    find = replay.iter_model_routers
    routers = {id(chunk): list(find(chunk)) for chunk in chunks}
    rollout_routes = engine.engine_config.router_replay.mode == "R3"
    found = []
    replay.iter_model_routers = lambda chunk: routers[id(chunk)]
    try:
        for batch in micro_batches:
            routes, input_ids, mask = batch["routed_experts"], batch["input_ids"], None
            if rollout_routes:
                routes = replay.align_r3_router_replay_data(routes, input_ids)
                mask = replay.build_r3_replay_mask(input_ids, batch["response_mask"])
            layers = []
            for chunk in chunks:
                replay.set_router_replay_data(
                    routes, batch.get("attention_mask", None), engine.tf_config, getattr(chunk, "vp_stage", None) or 0,
                    replay_mask=mask, model=chunk,
                )  # fmt: skip
                layers += [_target(router) for _, router in routers[id(chunk)]]
            # A quarter of what veRL holds leaves the GPU, in one copy.
            found.append(torch.stack(layers, dim=1).cpu().numpy())
    finally:
        replay.iter_model_routers = find
        RouterReplay.clear_global_indices()
    return found


def _target(router: Any) -> torch.Tensor:
    """int16 [T, K]: what one layer's router will replay."""
    topk_TK: torch.Tensor = router.target_topk_idx.to(torch.int16)
    if router.target_replay_mask is not None:
        topk_TK = topk_TK.masked_fill(~router.target_replay_mask.bool().view(-1, 1), -1)
    return topk_TK
