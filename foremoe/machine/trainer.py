"""Trainer: what lies around a stage: state of the optimizer, groups that train together, and the rest of a training step."""

from dataclasses import dataclass
from functools import partial

from foremoe.base import fields

_CHECKS = (
    (partial(fields.real, high=1024.0, open_low=False), ("optimizer_bytes",)),
    (partial(fields.whole, high=2**20), ("data_parallel",)),
    (partial(fields.real, high=0.999, open_low=False), ("rollout_share",)),
    (partial(fields.real, open_low=False), ("rollout_s",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The trainer around a stage.

    Attributes:
        optimizer_bytes: Bytes of optimizer state per parameter. Adam in mixed precision (arXiv 1910.02054, section 3.1) has 12:
            fp32 master weight, first and second moment. 0 where they lie in host memory during the stage.
        data_parallel: EP groups that train together. They add up gradients, and each keeps its share of the optimizer's state, as
            Megatron-LM's distributed optimizer and ZeRO do.
        rollout_share: Share of a training step outside the stages with static placement: rollout, rewards, moving weights.
        rollout_s: Seconds outside the stages; overrules the share.

    Raises:
        InputError: A figure is of the wrong type or out of range.
    """

    optimizer_bytes: float = 12.0
    data_parallel: int = 1
    rollout_share: float = 0.5
    rollout_s: float | None = None

    def __post_init__(self) -> None:
        fields.check_fields(self, _CHECKS)

    def outside_s(self, static_s: float) -> float:
        """Seconds of a step outside the stages, which take `static_s` with static placement."""
        return self.rollout_share / (1.0 - self.rollout_share) * static_s if self.rollout_s is None else self.rollout_s

    def step_speedup(self, stage_s: float, static_s: float) -> float:
        """A whole step's time with static placement over that with stages of `stage_s`."""
        outside_s = self.outside_s(static_s)
        return (outside_s + static_s) / (outside_s + stage_s)
