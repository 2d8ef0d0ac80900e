"""Case: the sizes that a calibration measures, and whether the requested time can suffice."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foremoe.base.errors import InputError
from foremoe.machine.model import Model

SHARES = (0.125, 0.5, 1.0)  # of the case's tokens that are measured, evenly and heavily
FEW_PAIRS = (8, 48)  # pairs in all slots and in a quarter of them
NUM_LAYERS = 2
FEWEST_RUNS = 4  # one warms up, three are timed
_LAYER_RUNS = 4  # at home and by a plan, two micro-steps each
_PASSES = 3.0  # forward and backward, over forward
_SLACK, _SLACK_S = 2.0, 30.0  # "about"
_MARGIN = 0.8
_MOST_BYTES = 1 << 30  # of one rank's expert weights and gradients in one layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The sizes to measure; the fitted constants are valid near them.

    Attributes:
        model: Sizes of experts and attention. Weights of 4 bytes are float32, of 2 bfloat16.
        num_ranks: Ranks of the EP group. One rank measures compute and the host store, and no links.
        tokens: Tokens per rank and micro-step; the middle of the measured range.
        sequence_length: Tokens of every sequence; at most `tokens`.
        seconds: Approximate duration of the measurement.
        math: Makes the `foremoe.runtime.ExpertMath`; None: `SwiGLU`.
        layer: Makes the `foremoe.calibrate.layer.Layer` of (model, num_experts, dtype, device); None: ``PlainLayer``.

    Raises:
        InputError: Numbers are out of range, or ranks do not divide the experts.
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
        if self.num_ranks < 1:
            raise InputError(f"something must run; give at least 1 rank, not {self.num_ranks}.")
        if self.model.num_experts % self.num_ranks:
            sizes = f"{self.model.num_experts} experts do not divide over {self.num_ranks} ranks"
            raise InputError(f"{sizes}; give ranks that divide them.")
        if self.tokens < 8 or not 1 <= self.sequence_length <= self.tokens:
            raise InputError(f"tokens must be at least 8 and sequences no longer; got {self.tokens} and {self.sequence_length}.")
        if self.model.bytes_per_weight not in (2.0, 4.0):
            raise InputError(f"weights of {self.model.bytes_per_weight:g} bytes cannot be measured; use a model with 2 or 4.")

    @property
    def num_experts(self) -> int:
        """Experts of the measured layers: the model's, or as many as memory allows; at least top-k."""
        per_rank = self.model.num_experts // self.num_ranks
        room = max(1, int(_MOST_BYTES // (self.model.expert_bytes + self.model.gradient_bytes)))
        least = -(-self.model.num_topk // self.num_ranks)
        return self.num_ranks * max(min(per_rank, room), least)


def least_seconds(case: Case, flops_per_s: float) -> tuple[float, float]:
    """Seconds of the fewest runs of expert compute and layers: (independent of the number of tokens, for `case.tokens`)."""
    model, tokens = case.model, case.tokens
    per_rank = case.num_experts // case.num_ranks
    runs = FEWEST_RUNS * _PASSES * NUM_LAYERS
    few = 1.25 * sum(FEW_PAIRS) * per_rank * model.flops_per_pair
    experts = tokens * model.num_topk * model.flops_per_pair
    layers = _LAYER_RUNS * float(model.attention_flops(tokens, tokens * case.sequence_length))
    return runs * few / flops_per_s, runs * ((2 * sum(SHARES) + 1) * experts + 2 * sum(SHARES) * layers) / flops_per_s


def require_time(case: Case, flops_per_s: float) -> None:
    """Raises InputError if even the fewest runs take far longer than `case.seconds`."""
    fixed_s, by_tokens_s = least_seconds(case, flops_per_s)
    least_s, most_s = fixed_s + by_tokens_s, _SLACK * case.seconds + _SLACK_S
    if least_s <= most_s:
        return
    tokens = int(case.tokens * (_MARGIN * most_s - fixed_s) / by_tokens_s)
    fewer = f"--tokens {tokens}, " if tokens >= 8 else ""
    need = f"{least_s:.0f} s, at {flops_per_s / 1e9:.0f} GFLOP/s of a rank, not {case.seconds:g} s"
    cure = f"give {fewer}--seconds {math.ceil(least_s)}, or a smaller model"
    raise InputError(f"measuring {case.tokens} tokens of {case.model.name} takes about {need}; {cure}.")
