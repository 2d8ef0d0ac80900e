"""Budget: can what is measured be done in about the seconds that were asked for? Found out before it is tried."""

from __future__ import annotations

import math

from foremoe.base.errors import InputError
from foremoe.calibrate.case import Case

SHARES = (0.125, 0.5, 1.0)  # of the case's tokens that are measured, evenly and heavily
FEW_PAIRS = (8, 48)  # pairs in all slots and in a quarter of them
NUM_LAYERS = 2
FEWEST_RUNS = 4  # one warms up, three are timed
_LAYER_RUNS = 4  # at home and by a plan, two micro-steps each
_PASSES = 3.0  # forward and backward, over forward
_SLACK, _SLACK_S = 2.0, 30.0  # "about"
_MARGIN = 0.8


def least_seconds(case: Case, flops_per_s: float) -> tuple[float, float]:
    """Seconds of expert compute and layers over the fewest runs: (what no number of tokens changes, what `case.tokens` take).

    Args:
        flops_per_s: Rate of a rank on small expert compute.
    """
    model, tokens = case.model, case.tokens
    per_rank = case.num_experts // case.num_ranks
    runs = FEWEST_RUNS * _PASSES * NUM_LAYERS
    few = 1.25 * sum(FEW_PAIRS) * per_rank * model.flops_per_pair
    experts = tokens * model.num_topk * model.flops_per_pair
    layers = _LAYER_RUNS * float(model.attention_flops(tokens, tokens * case.sequence_length))
    return runs * few / flops_per_s, runs * 2 * sum(SHARES) * (experts + layers) / flops_per_s


def require_time(case: Case, flops_per_s: float) -> None:
    """Raises InputError where even the fewest runs take far longer than `case.seconds`."""
    fixed_s, by_tokens_s = least_seconds(case, flops_per_s)
    least_s, most_s = fixed_s + by_tokens_s, _SLACK * case.seconds + _SLACK_S
    if least_s <= most_s:
        return
    tokens = int(case.tokens * (_MARGIN * most_s - fixed_s) / by_tokens_s)
    fewer = f"--tokens {tokens}, " if tokens >= 8 else ""
    raise InputError(
        f"measuring {case.tokens} tokens of {case.model.name} takes about {least_s:.0f} s, at {flops_per_s / 1e9:.0f} GFLOP/s"
        f" of a rank, not {case.seconds:g} s; give {fewer}--seconds {math.ceil(least_s)}, or a smaller model."
    )
