"""Synthetic routing of individual tokens, in sequences of several domains, with distinct experts per token.

Two regimes are fitted to recorded routing, which is packed in file order into micro-steps of 4096 tokens. The regime
``gpt-oss-like`` is fitted to 703 responses of gpt-oss-20b to prompts of 11 data sets, with 306 tokens on average. The regime
``esft-like`` is fitted to four tasks of DeepSeek-V2-Lite, one after another, with 213 sequences of 156 tokens. The table shows
recorded / generated statistics (see `foremoe.workload.skew`). Generated figures are means over seeds 10 to 21, which the fit did
not use:

==================  ==============  ==============  ==============  ==============
statistic           gpt-oss, G = 8  gpt-oss, G = 16 ESFT, G = 8     ESFT, G = 16
==================  ==============  ==============  ==============  ==============
skew_mean           1.618 / 1.609   2.311 / 2.154   1.470 / 1.502   1.898 / 1.986
skew_p99            2.447 / 2.575   4.015 / 3.638   2.239 / 2.111   3.085 / 3.160
step_correlation    0.807 / 0.803   0.807 / 0.803   0.719 / 0.719   0.719 / 0.719
log_spread          1.147 / 1.052   1.147 / 1.052   0.510 / 0.533   0.510 / 0.533
source_distance     0.222 / 0.220   0.251 / 0.261   0.092 / 0.081   0.104 / 0.112
==================  ==============  ==============  ==============  ==============

With a single seed, skew_mean varies by 4 % and skew_p99 by 5 to 15 %. The tests allow the mean of four seeds to deviate by 8 %
(skew_mean), 12 % (skew_p99), 0.05 (step_correlation), 10 % (log_spread) and 30 % (source_distance).
"""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.fields import real, whole
from foremoe.machine.model import Model
from foremoe.routing.trace import RoutingTrace
from foremoe.synthetic.counts import Regime, bent, capped, group_heat, layer_count, layer_factor, resolve, softmax

# Letters: T tokens, L MoE layers, K top-k, Q sequences, E experts, D domains, U runs of one domain.

# Largest probability that one expert serves a token.
_TOKEN_CAP = 0.95
# Longest sequence in multiples of its domain's mean, and shape of the gamma distribution of run lengths.
_LONGEST, _RUN_SHAPE = 4.0, 4.0


def synthetic_trace(
    model: str | Model, *, num_sequences: int = 192, mean_length: float = 400.0, regime: str | Regime = "qwen3-like",
    domains: int | None = None, num_layers: int | None = None, seed: int = 0,
) -> RoutingTrace:  # fmt: skip
    """Generates seeded routing of whole sequences, in the form that a rollout would record.

    Consecutive sequences form runs of one domain, so the mix of domains changes along the file. In each layer, every domain has
    its own popularity of experts, part of which is shared by all domains. Popularity varies between sequences, and a run may have
    a burst (see `Regime`). The K experts of a token are drawn without repetition by systematic sampling. Expert e is drawn with a
    probability of exactly K*q_e, which is at most 0.95.

    Args:
        model: Model, given as a `Model` or as the name of a preset.
        num_sequences: Number of sequences.
        mean_length: Mean number of tokens per sequence before rounding. Lengths have a lognormal distribution and are at most 4
            times the mean.
        regime: Regime, given as a `Regime` or by name.
        domains: Number of domains. Defaults to the number in the regime. With 1, which is the control case, history predicts the
            load.
        num_layers: Number of layers to generate, beginning with the first layer of the model. The routing of a layer does not
            depend on it.
        seed: Seed, a whole number >= 0.

    Returns:
        A trace in which the routing of every token is known.

    Raises:
        InputError: A name is unknown, or a number is out of range.

    Example:
        >>> foremoe.synthetic_trace("gpt-oss-20b", num_sequences=4, num_layers=2, seed=0).topk_TLK.shape
        (1984, 2, 4)
    """
    model, regime = resolve(model, regime)
    Q, L = whole(num_sequences, "num_sequences"), layer_count(num_layers, model)
    D = regime.domains if domains is None else whole(domains, "domains", 1, 10_000)
    mean_length = real(mean_length, "mean_length", 1.0, 1e7, open_low=False)
    batch_seed, layers_seed = np.random.SeedSequence(whole(seed, "seed", 0)).spawn(2)

    rng = np.random.default_rng(batch_seed)
    seq_len_Q, run_Q, domain_Q = _sequences(rng, regime, Q, D, mean_length)
    # Each sequence has its own order of experts. Otherwise a token could never have two experts with neighbouring numbers.
    order_QE = rng.permuted(np.tile(np.arange(model.num_experts), (Q, 1)), axis=1)
    cut_Q = np.concatenate([[0], np.cumsum(seq_len_Q)])

    ids = np.uint8 if model.num_experts <= 256 else np.int16
    topk_TLK = np.empty((int(seq_len_Q.sum()), L, model.num_topk), ids)
    for layer, layer_seed in enumerate(layers_seed.spawn(L)):
        rng = np.random.default_rng(layer_seed)
        q_QE = _layer_popularity(rng, regime, model, D, run_Q, domain_Q)
        cumulative_QE = np.cumsum(np.take_along_axis(model.num_topk * q_QE, order_QE, axis=1), axis=1)
        systematic_topk(cumulative_QE, order_QE, cut_Q, rng.random(len(topk_TLK)), layer, topk_TLK)
    return RoutingTrace(
        topk_TLK=topk_TLK, num_experts=model.num_experts, seq_len_Q=seq_len_Q, moe_layer_L=model.moe_layer_L[:L],
        model=model.name, source=f"synthetic, seed {seed}",
    )  # fmt: skip


def _sequences(rng: np.random.Generator, regime: Regime, Q: int, D: int, mean_length: float) -> tuple[Array, Array, Array]:
    """Returns length, run and domain of every sequence, each int64 [Q]. Every domain has one run before any repeats."""
    factor_D = np.exp(regime.domain_length_std * rng.standard_normal(D))
    # Domains have equal numbers of tokens, so sequences are in inverse proportion to length, and their mean is harmonic.
    mean_D = mean_length * factor_D * np.mean(1.0 / factor_D)
    scale_Q = np.exp(regime.length_std * rng.standard_normal(Q) - 0.5 * regime.length_std**2)
    run_tokens_Q = regime.domain_run * rng.standard_gamma(_RUN_SHAPE, Q) / _RUN_SHAPE
    turn_X = rng.permuted(np.tile(np.arange(D), (-(-Q // D), 1)), axis=1).reshape(-1)
    seq_len_Q, run_Q = np.empty(Q, np.int64), np.empty(Q, np.int64)
    run, used = 0, 0
    for q in range(Q):
        if used >= run_tokens_Q[run]:
            run, used = run + 1, 0
        length = mean_D[turn_X[run]] * min(float(scale_Q[q]), _LONGEST)
        seq_len_Q[q], run_Q[q] = max(1, round(length)), run
        used += int(seq_len_Q[q])
    return seq_len_Q, run_Q, turn_X[run_Q]


def _layer_popularity(rng: np.random.Generator, regime: Regime, model: Model, D: int, run_Q: Array, domain_Q: Array) -> Array:
    """Returns the probability that a sequence's next pair goes to each expert, float64 [Q, E], at most 0.95/K."""
    Q, E = len(run_Q), model.num_experts
    shared_E, own_DE = rng.standard_normal(E), rng.standard_normal((D, E))
    spread = float(np.hypot(regime.sigma, regime.domain_std))
    z_DE = (regime.sigma * shared_E + regime.domain_std * own_DE) / (spread or 1.0)
    factor = layer_factor(rng, regime)
    log_QE = (spread * factor * bent(z_DE, regime.bend) + factor * group_heat(rng, regime, E))[domain_Q]
    log_QE += regime.sequence_std * rng.standard_normal((Q, E))
    bursts_Q, expert_Q = rng.random(Q)[run_Q] < regime.burst_chance, rng.integers(E, size=Q)[run_Q]
    log_QE[bursts_Q, expert_Q[bursts_Q]] += np.log(regime.burst_factor)
    return capped(softmax(log_QE), _TOKEN_CAP / model.num_topk)


@kernel
def systematic_topk(cumulative_QE, order_QE, cut_Q, uniform_T, layer, topk_TLK):
    """Fills ``topk_TLK[:, layer]`` with the experts at which the cumulative probability exceeds u, u+1, .. u+K-1.

    For every sequence, `cumulative_QE` increases to K, by at most 1 per expert. The experts of a token are therefore distinct.
    `order_QE` maps the columns of `cumulative_QE` to experts.
    """
    num_topk = topk_TLK.shape[2]
    num_sequences, num_experts = cumulative_QE.shape
    for q in range(num_sequences):
        cumulative_E = cumulative_QE[q]
        for t in range(cut_Q[q], cut_Q[q + 1]):
            low = 0
            for k in range(num_topk):
                point = uniform_T[t] + k
                # A later point needs a later expert, and enough experts must remain for all later points.
                high = num_experts - num_topk + k
                while low < high:
                    middle = (low + high) // 2
                    if cumulative_E[middle] > point:
                        high = middle
                    else:
                        low = middle + 1
                topk_TLK[t, layer, k] = order_QE[q, low]
                low += 1
