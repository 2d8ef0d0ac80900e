"""Known routing of this rank's tokens in each micro-batch, from rollout or from a recording pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foremoe.base.arrays import Array
from foremoe.integrations.megatron.forward_backward import on_host
from foremoe.integrations.megatron.layout import Place

# Letters: T tokens of this rank (after packing, padding, context and sequence parallelism), L MoE layers of this rank, K top-k.


class _Target:
    """Replacement of a layer's `RouterReplay` that stores the routing that veRL would replay."""

    def set_target_indices(self, topk_TK: torch.Tensor, replay_mask: torch.Tensor | None = None) -> None:
        self.topk_TK = topk_TK.to(torch.int16)
        if replay_mask is not None:
            self.topk_TK = self.topk_TK.masked_fill(~replay_mask.bool().view(-1, 1), -1)


def routing_of(engine: Any, places: Sequence[Place], micro_batches: Sequence[Any]) -> list[Array]:
    """Returns the experts of each micro-batch, int16 [T, L, K], with -1 for unknown routing.

    `places` are the rank's MoE layers. veRL's own code arranges the recorded routes, for objects that stand in for its routers.
    Packing, padding and every kind of parallelism therefore match veRL's, whether the routers replay or not.
    """
    from verl.utils.megatron import router_replay_utils as replay

    targets = {id(chunk): dict[int, _Target]() for chunk in engine.module}
    for place in places:
        targets[id(engine.module[place.chunk])][place.number + 1] = _Target()
    find = replay.iter_model_routers
    found = []
    replay.iter_model_routers = lambda chunk: iter(targets[id(chunk)].items())
    try:
        for batch in micro_batches:
            routes, input_ids, mask = batch["routed_experts"], batch["input_ids"], None
            if engine.engine_config.router_replay.mode != "R2":  # routes of rollout, which end before the last token
                routes = replay.align_r3_router_replay_data(routes, input_ids)
                mask = replay.build_r3_replay_mask(input_ids, batch["response_mask"])
            for chunk in engine.module:
                if targets[id(chunk)]:
                    replay.set_router_replay_data(
                        routes, batch.get("attention_mask", None), engine.tf_config, replay_mask=mask, model=chunk
                    )
            layers = [targets[id(engine.module[place.chunk])][place.number + 1].topk_TK for place in places]
            found.append(on_host(layers))
    finally:
        replay.iter_model_routers = find
    return found
