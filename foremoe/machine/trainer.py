"""Trainer: the optimizer state, the groups that train together, and the time of a training step outside its stages."""

from dataclasses import dataclass
from functools import partial

from foremoe.base import fields
from foremoe.base.errors import InputError

_CHECKS = (
    (partial(fields.real, high=1024.0, open_low=False), ("optimizer_bytes",)),
    (partial(fields.whole, high=2**20), ("data_parallel",)),
    (partial(fields.real, high=0.999, open_low=False), ("rollout_share",)),
    (partial(fields.real, open_low=False), ("rollout_s",)),
)

# Shares of a step outside the stages for which the gain is shown if the user did not give the share. The first is for rollout
# that shares the GPUs and takes as long as training. The other shares are those of published GRPO steps (docs/simulator.md).
OUTSIDE_PERCENT = (50, 85, 95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The training around a stage, which takes memory and adds time to a training step.

    Attributes:
        optimizer_bytes: Bytes of optimizer state per parameter. Adam in mixed precision has 12 (arXiv 1910.02054, section 3.1):
            an fp32 master weight and two moments. Use 0 if the state is in host memory during the stage.
        data_parallel: Number of EP groups that train together. The groups sum their gradients, and each group keeps its share of
            the optimizer state, as in Megatron-LM's distributed optimizer and ZeRO.
        rollout_share: Share of a training step with static placement that is spent outside the stages, on rollout, rewards and
            moving weights. If it is None and `rollout_s` is None too, the gain of a whole step is unknown.
        rollout_s: Time in seconds of a training step outside the stages. It overrides `rollout_share`.
        micro_steps: Number of micro-steps in all stages of a training step, for example 16 if recompute and update have 8 each.
            Homes move once per step, and each stage bears a share of that cost in proportion to its micro-steps. If None, the
            stage bears all of it.

    Raises:
        InputError: A value has the wrong type or is out of range.
    """

    optimizer_bytes: float = 12.0
    data_parallel: int = 1
    rollout_share: float | None = None
    rollout_s: float | None = None
    micro_steps: int | None = None

    def __post_init__(self) -> None:
        fields.check_fields(self, _CHECKS)
        if self.micro_steps is not None:
            fields.whole(self.micro_steps, "micro_steps of Trainer", 1, 2**31 - 1)

    def share_of_step(self, micro_steps: int) -> float:
        """Returns the share that a stage of `micro_steps` bears of the costs that arise once per training step.

        Raises:
            InputError: The stage has more micro-steps than the step.
        """
        if self.micro_steps is None:
            return 1.0
        if micro_steps > self.micro_steps:
            stage = f"a stage of {micro_steps} micro-steps is longer than the training step of {self.micro_steps}"
            raise InputError(f"{stage}; count the micro-steps of all its stages in micro_steps of Trainer.")
        return micro_steps / self.micro_steps

    def outside_s(self, static_s: float) -> float | None:
        """Returns the seconds of a step outside its stages, or None if unknown. With static placement, stages take `static_s`."""
        if self.rollout_s is not None:
            return self.rollout_s
        return None if self.rollout_share is None else self.rollout_share / (1.0 - self.rollout_share) * static_s

    def step_speedup(self, stage_s: float, static_s: float) -> float | None:
        """Returns the speed-up of a whole step over static placement, or None if unknown. Planned stages take `stage_s`."""
        outside_s = self.outside_s(static_s)
        return None if outside_s is None else (outside_s + static_s) / (outside_s + stage_s)


def step_speedups(stage_s: float, static_s: float) -> dict[str, float]:
    """Returns the speed-up of a whole step for each percentage of time outside the stages in `OUTSIDE_PERCENT`."""
    shares = {str(percent): percent / 100 for percent in OUTSIDE_PERCENT}
    return {name: 1.0 / (share + (1.0 - share) * stage_s / static_s) for name, share in shares.items()}
