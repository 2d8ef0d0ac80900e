"""Synthetic load in named regimes, which differ in skew, in drift over micro-steps, and in the spread between source ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.fields import real, whole
from foremoe.base.tensor_file import digest
from foremoe.machine.model import Model
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L MoE layers, G ranks, E experts, K top-k.

# Largest probabilities that one expert serves a token, as parts of 1/K, in a micro-step and on one source rank.
_STEP_CAP, _SOURCE_CAP = 0.9, 0.95


_LIMITS = {
    "sigma": (0.0, 20.0), "group_std": (0.0, 20.0), "layer_std": (0.0, 3.0), "bend": (0.0, 10.0), "burst_chance": (0.0, 1.0),
    "burst_factor": (1.0, 1e6), "kappa": (1e-6, 1e9), "walk_std": (0.0, 20.0), "walk_ar": (0.0, 1.0), "source_kappa": (1e-6, 1e9),
    "domain_std": (0.0, 20.0), "domain_run": (1.0, 1e9), "domain_length_std": (0.0, 3.0), "sequence_std": (0.0, 20.0),
    "length_std": (0.0, 3.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Distribution of synthetic load. ``Regime.preset`` returns a named one. A spread is a standard deviation of log probability.

    Only `synthetic_workload` uses attributes marked "(counts)", and only `synthetic_trace` uses attributes marked "(tokens)".

    Attributes:
        sigma: Spread of popularity over the experts of a layer. This part of the popularity is the same in all micro-steps and
            domains.
        groups: Number of groups of neighbouring experts. Use the number of the model's routing groups, or one group per rank to
            make whole ranks hot.
        group_std: Spread of the popularity that the experts of a group share. With a value above 0, hot experts tend to be on the
            same rank.
        layer_std: Spread between layers. Each layer has a random factor on sigma, group_std and domain_std, and this is the
            standard deviation of its logarithm.
        bend: Asymmetry of popularity. With 0, popularity is lognormal. With other values, a standard normal z is replaced by
            ``(z - bend*(z^2 - 1)) / sqrt(1 + 2*bend^2)``. The spread remains the same, but there are fewer highly popular experts
            and more neglected ones, as after balanced training.
        burst_chance: Probability of a burst, in which a random expert is more popular. It applies to each layer and micro-step
            (counts), or to each layer and run of a domain (tokens).
        burst_factor: Factor by which the expert is more popular in a burst.
        kappa: Concentration of the popularity in a micro-step, which is drawn from a Dirichlet distribution with
            ``alpha = kappa*E*p`` for popularity p (counts). With higher values, the result is closer to p.
        walk_std: Spread of the log popularity in a stationary random walk (counts).
        walk_ar: Correlation between consecutive steps of the random walk (counts).
        source_kappa: Concentration of the popularity on a source rank, which is drawn from a Dirichlet distribution with
            ``alpha = source_kappa*E*q``, where q is the popularity in the micro-step (counts).
        domains: Number of kinds of sequences, each with its own popularity (tokens).
        domain_std: Spread of a domain's popularity around the popularity that all domains share (tokens).
        domain_run: Mean number of tokens in consecutive sequences of one domain (tokens). A value of 1 mixes the domains, and
            large values keep them apart.
        domain_length_std: Spread, between domains, of the log of the mean sequence length (tokens).
        sequence_std: Spread of a sequence's popularity around the popularity of its domain (tokens).
        length_std: Spread of the log of sequence length in a domain (tokens).

    Raises:
        InputError: A value is out of range.
    """

    sigma: float
    groups: int = 8
    group_std: float = 0.0
    layer_std: float = 0.0
    bend: float = 0.0
    burst_chance: float = 0.0
    burst_factor: float = 4.0
    kappa: float
    walk_std: float
    walk_ar: float = 0.9
    source_kappa: float = 8.0
    domains: int = 4
    domain_std: float
    domain_run: float = 6000.0
    domain_length_std: float = 0.0
    sequence_std: float
    length_std: float = 0.5

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            object.__setattr__(self, name, real(getattr(self, name), name, low, high, open_low=False))
        for name in ("groups", "domains"):
            object.__setattr__(self, name, whole(getattr(self, name), name, 1, 10_000))

    @classmethod
    def preset(cls, name: str) -> Regime:
        """Returns the regime with this name. Case does not matter."""
        regime = REGIMES.get(name.strip().lower()) if isinstance(name, str) else None
        if regime is None:
            raise InputError(f"there is no regime {name!r}; choose one of {', '.join(REGIMES)}, or pass a Regime.")
        return regime


# mild, mid and skew have increasing skew and drift, with hot experts anywhere. The tokens of gpt-oss-like and esft-like are
# fitted to recorded routing (see tokens.py), and their counts are within 10 % of its mean skew. The last three have hot groups,
# and counts that are fitted to one source each. None of the sources states how loads change from micro-step to micro-step:
# * r1-like: expert counts of DeepSeek-R1 while serving, recorded by SGLang (GitHub: GeneratedRandomly/SGLang-reproduce). Mean of
#   three files of 58 layers: hottest expert 6.4 times the mean; skew 1.84, 2.18 and 2.57 at EP8, 16 and 32.
# * gpt-oss-math-like: gpt-oss-20b on its own answers to mathematics (LLEP, arXiv 2601.17111, figure 3): the busiest of 8 ranks
#   has 2.4 to 2.8 times the mean, the hottest expert up to 6.4 times.
# * qwen3-like: skews in training at EP64 that UltraEP's authors give (arXiv 2606.04101 and their blog): 2.23 for GLM-4.5-Air,
#   2.86 for Qwen3-235B. Groups are weak, as Qwen3 routes without them.
_UNKNOWN: dict[str, Any] = {"kappa": 64.0, "walk_std": 0.15, "domain_std": 0.4, "sequence_std": 0.4}
REGIMES = {
    "mild": Regime(sigma=0.4, kappa=16.0, walk_std=0.10, burst_chance=0.02, domain_std=0.3, sequence_std=0.4),
    "mid": Regime(sigma=0.8, kappa=4.0, walk_std=0.30, burst_chance=0.10, domain_std=0.7, sequence_std=0.7),
    "skew": Regime(sigma=1.3, kappa=2.0, walk_std=0.50, burst_chance=0.20, domain_std=1.3, sequence_std=0.8),
    "gpt-oss-like": Regime(
        sigma=1.3, layer_std=0.4, bend=0.25, kappa=16.0, walk_std=0.2, source_kappa=1.8, domains=11, domain_std=0.52,
        sequence_std=0.68, length_std=0.6,
    ),
    "esft-like": Regime(
        sigma=0.29, kappa=100.0, walk_std=0.7, walk_ar=0.75, source_kappa=64.0, domain_std=0.75, domain_run=8300.0,
        domain_length_std=0.84, sequence_std=0.14, length_std=0.4,
    ),
    "r1-like": Regime(sigma=0.53, group_std=0.47, layer_std=0.5, **_UNKNOWN),
    "gpt-oss-math-like": Regime(sigma=1.0, group_std=0.75, layer_std=0.3, **_UNKNOWN),
    "qwen3-like": Regime(sigma=0.45, group_std=0.22, layer_std=0.3, **_UNKNOWN),
}  # fmt: skip


def synthetic_workload(
    model: str | Model, *, num_ranks: int, tokens_per_rank: int, micro_steps: int, regime: str | Regime = "qwen3-like",
    seed: int = 0, num_layers: int | None = None, stage: str = "update",
) -> Workload:  # fmt: skip
    """Generates seeded counts without tokens, for many ranks and layers at once.

    Each layer is generated in these steps:

    1. The popularity of experts is drawn according to the `Regime`.
    2. The logarithm of the popularity follows a random walk over the micro-steps. Bursts are added.
    3. The popularity in each micro-step is drawn from a Dirichlet distribution. No expert has a probability above 0.9/K.
    4. The popularity on each source rank is drawn from a Dirichlet distribution. No expert has a probability above 0.95/K. In
       both cases, the excess is spread over the other experts in proportion.
    5. The tokens_per_rank*K pairs are drawn from a multinomial distribution.

    Pairs are drawn one by one, so an expert may get a few more pairs than the rank has tokens. In contrast, `synthetic_trace`
    draws distinct experts per token.

    Args:
        model: Model, given as a `Model` or as the name of a preset.
        num_ranks: Number of source ranks.
        tokens_per_rank: Number of tokens per rank and micro-step.
        micro_steps: Number of micro-steps.
        regime: Regime, given as a `Regime` or by name.
        seed: Seed, a whole number >= 0.
        num_layers: Number of layers to generate, beginning with the first layer of the model. The counts of a layer do not depend
            on it.
        stage: "update" or "recompute".

    Returns:
        A workload of `micro_steps` micro-steps. `attention_MG` is zero, because there are no sequence lengths.

    Raises:
        InputError: A name is unknown, or a number is out of range.

    Example:
        >>> made = foremoe.synthetic_workload("gpt-oss-20b", num_ranks=8, micro_steps=2, tokens_per_rank=512, seed=0)
        >>> made.load_MLE.shape
        (2, 24, 32)
    """
    model, regime = resolve(model, regime)
    G, M = whole(num_ranks, "num_ranks"), whole(micro_steps, "micro_steps")
    tokens, L = whole(tokens_per_rank, "tokens_per_rank"), layer_count(num_layers, model)
    seeds = np.random.SeedSequence(whole(seed, "seed", 0)).spawn(L)
    load_MLGE = np.empty((M, L, G, model.num_experts), np.int32)
    for layer in range(L):
        load_MLGE[:, layer] = _layer_counts(np.random.default_rng(seeds[layer]), regime, model, M, G, tokens)
    return Workload.from_counts(
        load_MLGE, num_topk=model.num_topk, tokens_MG=np.full((M, G), tokens), stage=stage, model=model.name,
        moe_layer_L=model.moe_layer_L[:L], trace_id=digest({}, {"load": load_MLGE}),
    )  # fmt: skip


def _layer_counts(rng: np.random.Generator, regime: Regime, model: Model, M: int, G: int, tokens: int) -> Array:
    """Returns the counts of one layer, int64 [M, G, E]."""
    E, K = model.num_experts, model.num_topk
    factor = layer_factor(rng, regime)
    base_E = regime.sigma * factor * bent(rng.standard_normal(E), regime.bend) + factor * group_heat(rng, regime, E)
    step_ME = regime.walk_std * rng.standard_normal((M, E))
    log_ME = np.empty((M, E))
    walk_E = step_ME[0]
    for m in range(M):
        if m:
            # This factor keeps the walk's spread at walk_std in every micro-step.
            walk_E = regime.walk_ar * walk_E + np.sqrt(1.0 - regime.walk_ar**2) * step_ME[m]
        log_ME[m] = base_E + walk_E
    bursts_M = rng.random(M) < regime.burst_chance
    expert_M = rng.integers(E, size=M)
    log_ME[bursts_M, expert_M[bursts_M]] += np.log(regime.burst_factor)
    q_ME = capped(rng.standard_gamma(regime.kappa * E * softmax(log_ME)), _STEP_CAP / K)
    # Independent gamma draws, divided by their sum, are a Dirichlet draw.
    gamma_MGE = rng.standard_gamma(np.broadcast_to(regime.source_kappa * E * q_ME[:, None], (M, G, E)))
    return rng.multinomial(tokens * K, capped(gamma_MGE, _SOURCE_CAP / K))


def layer_factor(rng: np.random.Generator, regime: Regime) -> float:
    """Returns a random factor for the spread of a layer's popularity. Its mean over layers is 1."""
    return float(np.exp(regime.layer_std * rng.standard_normal() - 0.5 * regime.layer_std**2))


def group_heat(rng: np.random.Generator, regime: Regime, num_experts: int) -> Array:
    """Returns the log popularity that the experts of a group share, float64 [E]. A group has E/groups consecutive experts."""
    if not regime.group_std:
        return np.zeros(num_experts)
    group_E = np.arange(num_experts) * regime.groups // num_experts
    return regime.group_std * rng.standard_normal(regime.groups)[group_E]


def bent(z: Array, bend: float) -> Array:
    """Returns standard normal deviates with a shorter upper tail. Their mean remains 0 and their spread 1. See `Regime.bend`."""
    return (z - bend * (z * z - 1.0)) / np.sqrt(1.0 + 2.0 * bend * bend)


def softmax(log_XE: Array) -> Array:
    """Returns the softmax along the last axis."""
    p_XE = np.exp(log_XE - log_XE.max(axis=-1, keepdims=True))
    return p_XE / p_XE.sum(axis=-1, keepdims=True)


def capped(weight_XE: Array, cap: float) -> Array:
    """Returns probabilities in proportion to `weight_XE` along the last axis. None is above `cap` or, if that is more, 1/E.

    The excess over the cap is given to the other entries in proportion, until no probability is above the cap. If all weights are
    zero, the probabilities are uniform.
    """
    E = weight_XE.shape[-1]
    cap = max(cap, 1.0 / E)
    total_X1 = weight_XE.sum(axis=-1, keepdims=True)
    p_XE: Array = np.where(total_X1 > 0, weight_XE / np.where(total_X1 > 0, total_X1, 1.0), 1.0 / E)
    at_cap_XE = np.zeros(p_XE.shape, bool)
    # Every round brings at least one more expert to the cap, so E rounds are enough.
    for _ in range(E):
        over_XE = p_XE > cap
        if not over_XE.any():
            break
        at_cap_XE |= over_XE
        rest_XE = np.where(at_cap_XE, 0.0, p_XE)
        rest_X1 = rest_XE.sum(axis=-1, keepdims=True)
        left_X1 = 1.0 - cap * at_cap_XE.sum(axis=-1, keepdims=True)
        scale_X1 = np.where(rest_X1 > 0, left_X1 / np.where(rest_X1 > 0, rest_X1, 1.0), 0.0)
        changed_XE = np.where(at_cap_XE, cap, rest_XE * scale_X1)
        p_XE = np.where(over_XE.any(axis=-1, keepdims=True), changed_XE, p_XE)
    return p_XE


def resolve(model: str | Model, regime: str | Regime) -> tuple[Model, Regime]:
    """Returns the model and the regime. Names are replaced by the presets that they name."""
    if not isinstance(model, Model):
        model = Model.preset(model)
    return model, regime if isinstance(regime, Regime) else Regime.preset(regime)


def layer_count(num_layers: int | None, model: Model) -> int:
    """Returns the number of layers to generate. By default, it is the number of all layers of the model."""
    if num_layers is None:
        return model.num_layers
    layers = whole(num_layers, "num_layers")
    if layers > model.num_layers:
        raise InputError(f"{model.name} has {model.num_layers} MoE layers; got num_layers={layers}.")
    return layers
