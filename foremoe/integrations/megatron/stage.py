"""`MegatronStage`: gives the MoE layers their routing and their weights during one stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan
from foremoe.runtime.remap import DenseIntervals, remap_dense_planned
from foremoe.runtime.stage import PlannedStage
from foremoe.workload.skew import skew

if TYPE_CHECKING:
    from foremoe.integrations.megatron.known import KnownRouting
    from foremoe.integrations.megatron.known_rows import KnownRow, Served, SlottedRow
    from foremoe.transfer.engine import Engine

# Letters: T tokens of a source, E experts, P physical slots of all ranks, M micro-steps, L layers.


class MegatronStage(PlannedStage):
    """Planned stage for Megatron's routing, which has a boolean for every token and expert.

    Args:
        engine: Engine that has begun `plan`.
        split_MLP: Number of pairs that the plan sends from this source to each slot.
        device: Device of the routing.
        replay: Whether routers follow the plan's routing. If False, the routing is a hint, and the stage records how many pairs
            ranks serve.
        known: Known routing of each token.

    Attributes:
        load: Mapping from (micro-step, layer) to the number of pairs that each rank served, if recorded.
        known_served: Mapping from (micro-step, layer) to the pairs that this rank's slots served, for rows with known routes.
    """

    def __init__(
        self, engine: Engine, plan: Plan, split_MLP: Array, device: torch.device, replay: bool, known: KnownRouting | None = None
    ) -> None:  # fmt: skip
        super().__init__(engine, plan, split_MLP, device)
        self.known = known
        self.replay, self.load = replay, dict[tuple[int, int], torch.Tensor]()
        self.known_served: dict[tuple[int, int], Served] = {}
        self._has_replicas_ML: Array = np.any(plan.quota_MLGS[..., plan.B :] > 0, axis=(2, 3))

    def _intervals(self, split_MLP: torch.Tensor, expert_MLP: torch.Tensor) -> DenseIntervals:
        return DenseIntervals.of(split_MLP, expert_MLP, self._home_slot_LE)

    def known_row(self, micro_step: int, layer: int, routing_TE: torch.Tensor, complete: bool) -> KnownRow | SlottedRow | None:
        """Returns the route of a known row. `complete` is True if its replicas have arrived. See `KnownRouting.row`."""
        if self.known is None:
            return None
        return self.known.row(micro_step, layer, routing_TE, complete, self._home_slot_LE[layer])

    def route(self, micro_step: int, layer: int, routing_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the routing over slots that follows the plan, and the number of unplanned pairs."""
        return remap_dense_planned(routing_TE, self._planned_ML.row(micro_step, layer))

    def route_home(self, layer: int, routing_TE: torch.Tensor) -> torch.Tensor:
        """Returns the routing over slots that sends every pair to its expert's home."""
        routing_TP = routing_TE.new_zeros(len(routing_TE), self._plan.G * self._plan.S)
        return routing_TP.index_copy(1, self._home_slot_LE[layer], routing_TE)

    def spread(self, micro_step: int, layer: int, probs_TE: torch.Tensor, routing_TP: torch.Tensor) -> torch.Tensor:
        """Returns probabilities over slots. Differentiable."""
        probs_TP = probs_TE.index_select(1, self._planned_ML.expert_XP[micro_step, layer])
        return probs_TP * routing_TP

    def has_replicas(self, micro_step: int, layer: int) -> bool:
        """Returns True if the plan has a replica in this row on any rank."""
        return bool(self._has_replicas_ML[micro_step, layer])

    def counts(self) -> tuple[Array, Array]:
        self.served |= {row: served.counts() for row, served in self.known_served.items()}
        return super().counts()

    def served_skew(self) -> Array | None:
        """Returns the skew as served, float64 [M, L], or None if routers follow the plan. It is 1 for rows that did not run."""
        if self.replay:
            return None
        skew_ML = np.ones(self._has_replicas_ML.shape)
        if self.load:
            skew_ML[tuple(zip(*self.load, strict=True))] = skew(torch.stack([*self.load.values()]).cpu().numpy())
        return skew_ML

    def settle(self, layer: int) -> None:
        """Waits until all gradients sent so far are home. `layer` must not send any more gradients."""
        self._engine.settle(layer)

    @property
    def sum_bytes(self) -> int:
        """Peak size in bytes of the float32 sums of replica gradients if main gradients are bf16. Valid after the stage."""
        return self._engine.sum_bytes
