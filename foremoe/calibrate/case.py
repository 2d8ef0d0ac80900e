"""Case: what a calibration measures: whose sizes, how many tokens, how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foremoe.base.errors import InputError
from foremoe.machine.model import Model

_MOST_BYTES = 1 << 30  # of one rank's expert weights and gradients in one layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured; constants hold near these sizes.

    Attributes:
        model: Sizes of experts and attention. Weights of 4 bytes are float32, of 2 bfloat16.
        num_ranks: Ranks of the EP group.
        tokens: Tokens of a rank and micro-step; the middle of the measured range.
        sequence_length: Tokens of every sequence; at most `tokens`.
        seconds: Approximate length of the measurement.
        math: Makes the `foremoe.runtime.ExpertMath`; None: `SwiGLU`.
        layer: A `foremoe.calibrate.layer.LayerMaker`; None: `PlainLayer`.
        seed: Seed of routing.

    Raises:
        InputError: Numbers out of range, or ranks that do not divide the experts.
    """

    model: Model
    num_ranks: int
    tokens: int
    sequence_length: int
    seconds: float
    math: Callable[[], Any] | None = None
    layer: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise InputError(f"links are measured between ranks; give at least 2, not {self.num_ranks}.")
        if self.model.num_experts % self.num_ranks:
            raise InputError(
                f"{self.model.num_experts} experts do not divide over {self.num_ranks} ranks; give ranks that divide them."
            )
        if self.tokens < 8 or not 1 <= self.sequence_length <= self.tokens:
            raise InputError(f"tokens must be at least 8 and sequences no longer; got {self.tokens} and {self.sequence_length}.")
        if self.model.bytes_per_weight not in (2.0, 4.0):
            raise InputError(f"weights of {self.model.bytes_per_weight:g} bytes cannot be measured; use a model with 2 or 4.")

    @property
    def num_experts(self) -> int:
        """Experts of the layers that are measured: the model's, or as many as memory allows; at least top-k."""
        per_rank = self.model.num_experts // self.num_ranks
        room = max(1, int(_MOST_BYTES // (self.model.expert_bytes + self.model.gradient_bytes)))
        least = -(-self.model.num_topk // self.num_ranks)
        return self.num_ranks * max(min(per_rank, room), least)
