"""`Case`, which holds the sizes that a calibration measures, and a check that the requested time suffices."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foremoe.base.errors import InputError
from foremoe.machine.model import Model

SHARES = (0.125, 0.5, 1.0)  # shares of the case's tokens to measure, each with even and with heavy routing
FEW_PAIRS = (8, 48)  # numbers of pairs per slot, in all slots and in a quarter of them
NUM_LAYERS = 2
FEWEST_RUNS = 4  # one run to warm up and three timed runs
_LAYER_RUNS = 4  # at home and with a plan, two micro-steps each
_PASSES = 3.0  # time of forward and backward over time of forward
_SLACK, _SLACK_S = 2.0, 30.0  # tolerance, because the requested time is approximate
_MARGIN = 0.8
_MOST_BYTES = 1 << 30  # limit for one rank's expert weights and gradients in one layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes for which a calibration measures times. The fitted constants are valid near these sizes.

    Attributes:
        model: Model that gives the sizes of experts and attention. Weights of 4 bytes are measured as float32, and weights of 2
            bytes as bfloat16.
        num_ranks: Number of ranks in the EP group. With one rank, compute and the host store are measured, but links between
            ranks are not.
        tokens: Number of tokens per rank and micro-step, in the middle of the measured range.
        sequence_length: Length of every sequence in tokens, at most `tokens`.
        seconds: Approximate duration of the measurement.
        math: Function that creates the `foremoe.runtime.ExpertMath`. Defaults to `SwiGLU`.
        layer: Function of (model, num_experts, dtype, device) that creates the `foremoe.calibrate.layer.Layer`. Defaults to
            ``PlainLayer``.
        seed: Seed of weights and routing.

    Raises:
        InputError: A number is out of range, or the number of ranks does not divide the number of experts.
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
            raise InputError(f"a calibration needs a rank to run on; give at least 1 rank, not {self.num_ranks}.")
        if self.model.num_experts % self.num_ranks:
            sizes = f"{self.model.num_experts} experts do not divide over {self.num_ranks} ranks"
            raise InputError(f"{sizes}; give ranks that divide them.")
        if self.tokens < 8 or not 1 <= self.sequence_length <= self.tokens:
            raise InputError(f"tokens must be at least 8 and sequences no longer; got {self.tokens} and {self.sequence_length}.")
        if self.model.bytes_per_weight not in (2.0, 4.0):
            raise InputError(f"weights of {self.model.bytes_per_weight:g} bytes cannot be measured; use a model with 2 or 4.")

    @property
    def num_experts(self) -> int:
        """Number of experts in the measured layers: as many of the model's experts as fit into memory, but at least top-k."""
        per_rank = self.model.num_experts // self.num_ranks
        room = max(1, int(_MOST_BYTES // (self.model.expert_bytes + self.model.gradient_bytes)))
        least = -(-self.model.num_topk // self.num_ranks)
        return self.num_ranks * max(min(per_rank, room), least)


def least_seconds(case: Case, flops_per_s: float) -> tuple[float, float]:
    """Returns the time of the fewest possible runs in seconds: a fixed part, and a part that depends on the number of tokens."""
    model, tokens = case.model, case.tokens
    per_rank = case.num_experts // case.num_ranks
    runs = FEWEST_RUNS * _PASSES * NUM_LAYERS
    few = 1.25 * sum(FEW_PAIRS) * per_rank * model.flops_per_pair
    experts = tokens * model.num_topk * model.flops_per_pair
    layers = _LAYER_RUNS * float(model.attention_flops(tokens, tokens * case.sequence_length))
    return runs * few / flops_per_s, runs * ((2 * sum(SHARES) + 1) * experts + 2 * sum(SHARES) * layers) / flops_per_s


def require_time(case: Case, flops_per_s: float) -> None:
    """Raises InputError if even the smallest possible number of runs would take much longer than `case.seconds`."""
    fixed_s, by_tokens_s = least_seconds(case, flops_per_s)
    least_s, most_s = fixed_s + by_tokens_s, _SLACK * case.seconds + _SLACK_S
    if least_s <= most_s:
        return
    tokens = int(case.tokens * (_MARGIN * most_s - fixed_s) / by_tokens_s)
    fewer = f"--tokens {tokens}, " if tokens >= 8 else ""
    need = f"{least_s:.0f} s, at {flops_per_s / 1e9:.0f} GFLOP/s of a rank, not {case.seconds:g} s"
    cure = f"give {fewer}--seconds {math.ceil(least_s)}, or a smaller model"
    raise InputError(f"measuring {case.tokens} tokens of {case.model.name} takes about {need}; {cure}.")
