"""Eight named imbalances with one cause each. They are the workloads W0 to W7 of Megatron-LM's token-imbalance benchmark.

The workloads are generated as counts. Pull request 7488 of Megatron-LM proposes them, and its figures are used here. A hot set
has a quarter of the experts, and three of four tokens draw from it. In W5, half of the experts are idle. In W6, the hot spot
moves every three steps. In W7, half of the tokens are in a burst in every fourth step.

The following choices are our own. A step is a micro-step here. The hot set of W1 is drawn at random for each layer. The hot set
of W3 is every fourth expert. W1 to W3 therefore differ only in the location of the hot set. The source ranks of W4 have 1.5 to
0.5 times the mean number of tokens.
"""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.base.tensor_file import digest
from foremoe.machine.model import Model
from foremoe.synthetic.counts import layer_count
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G source ranks, E experts, K top-k, H hot experts, X draws, P experts to draw from, J
# remaining choices of a token.

IMBALANCES = (
    "balanced", "hot-expert-set", "hot-rank", "spread-hot-experts", "ragged-sources", "idle-rank", "rotating-hot-spot", "burst",
)  # fmt: skip
_HOT_TOKENS, _BURST_TOKENS = 0.75, 0.5
_ROTATES, _BURSTS = 3, 4  # micro-steps
_RAGGED = 0.5  # relative deviation of the first and the last source rank's tokens from the mean


def imbalance_workload(
    model: str | Model, name: str, *, num_ranks: int, tokens_per_rank: int, micro_steps: int, seed: int = 0,
    num_layers: int | None = None, stage: str = "update",
) -> Workload:  # fmt: skip
    """Generates seeded counts of one named imbalance. Every token has top-k distinct experts.

    Args:
        model: Model, given as a `Model` or as the name of a preset.
        name: Name of the imbalance, one of

            * ``"balanced"`` (W0): pairs are given to the experts in turn.
            * ``"hot-expert-set"`` (W1): three of four tokens draw from a random quarter of the experts.
            * ``"hot-rank"`` (W2): three of four tokens draw from the first quarter of the experts, which is at home on the first
              ranks.
            * ``"spread-hot-experts"`` (W3): three of four tokens draw from every fourth expert.
            * ``"ragged-sources"`` (W4): source ranks have 1.5 to 0.5 times the mean number of tokens. All tokens draw from all
              experts.
            * ``"idle-rank"`` (W5): no token draws from the first half of the experts.
            * ``"rotating-hot-spot"`` (W6): like W2, but the next quarter of the experts becomes hot every three micro-steps.
            * ``"burst"`` (W7): tokens draw from all experts, but in every fourth micro-step, half of the tokens draw as in W2.
        num_ranks: Number of source ranks.
        tokens_per_rank: Number of tokens of a source rank in a micro-step. In W4, it is the mean over source ranks.
        micro_steps: Number of micro-steps.
        seed: Seed, a whole number >= 0.
        num_layers: Number of layers to generate, beginning with the first layer of the model. The counts of a layer do not depend
            on it.
        stage: "update" or "recompute".

    Returns:
        A workload of `micro_steps` micro-steps. `attention_MG` is zero, because there are no sequence lengths.

    Raises:
        InputError: A name is unknown, or a number is out of range.
    """
    model = Model.preset(model) if isinstance(model, str) else model
    if name not in IMBALANCES:
        raise InputError(f"there is no imbalance {name!r}; choose one of {', '.join(IMBALANCES)}.")
    G, M = whole(num_ranks, "num_ranks"), whole(micro_steps, "micro_steps")
    tokens, L = whole(tokens_per_rank, "tokens_per_rank"), layer_count(num_layers, model)
    tokens_G = _tokens(name, tokens, G)
    seeds = np.random.SeedSequence([whole(seed, "seed", 0), IMBALANCES.index(name)]).spawn(L)
    load_MLGE = np.empty((M, L, G, model.num_experts), np.int32)
    for layer in range(L):
        load_MLGE[:, layer] = _layer_counts(np.random.default_rng(seeds[layer]), name, model, M, tokens_G)
    return Workload.from_counts(
        load_MLGE, num_topk=model.num_topk, tokens_MG=np.tile(tokens_G, (M, 1)), stage=stage, model=model.name,
        moe_layer_L=model.moe_layer_L[:L], trace_id=digest({}, {"load": load_MLGE}),
    )  # fmt: skip


def _tokens(name: str, tokens: int, G: int) -> Array:
    """Returns the tokens of every source rank, int64 [G], whose mean is `tokens`."""
    spread = _RAGGED if name == "ragged-sources" and G > 1 else 0.0
    edge_G = np.rint(np.cumsum(np.linspace(1.0 + spread, 1.0 - spread, G)) * tokens).astype(np.int64)
    return np.diff(edge_G, prepend=0)


def _layer_counts(rng: np.random.Generator, name: str, model: Model, M: int, tokens_G: Array) -> Array:
    """Returns the counts of one layer, int64 [M, G, E]."""
    E, K = model.num_experts, model.num_topk
    if name == "balanced":
        return np.broadcast_to(_in_turn(tokens_G * K, E), (M, len(tokens_G), E))
    anywhere_H = rng.permutation(E)[: max(K, E // 4)]
    load_MGE = np.zeros((M, len(tokens_G), E), np.int64)
    for m in range(M):
        hot_H, share = _hot(name, m, anywhere_H, E, K)
        hot_G = (tokens_G * share).astype(np.int64)
        load_MGE[m] = distinct_counts(rng, tokens_G - hot_G, E, K)
        load_MGE[m][:, hot_H] += distinct_counts(rng, hot_G, len(hot_H), K)
    return load_MGE


def _hot(name: str, m: int, anywhere_H: Array, E: int, K: int) -> tuple[Array, float]:
    """Returns the hot experts of a micro-step, and the share of tokens that draw only from these."""
    H = len(anywhere_H)
    if name == "idle-rank":
        return np.arange(E - max(K, E - E // 2), E), 1.0
    share = {"ragged-sources": 0.0, "burst": _BURST_TOKENS * (m % _BURSTS == _BURSTS - 1)}.get(name, _HOT_TOKENS)
    first = m // _ROTATES * H if name == "rotating-hot-spot" else 0
    hot_H = {"hot-expert-set": anywhere_H, "spread-hot-experts": np.arange(H) * E // H}.get(name, (first + np.arange(H)) % E)
    return hot_H, share


def _in_turn(pairs_G: Array, E: int) -> Array:
    """Deals pairs to the experts in turn, int64 [G, E]. Each source rank continues where the previous one stopped."""
    first_G = np.cumsum(pairs_G) - pairs_G
    return (pairs_G // E)[:, None] + ((np.arange(E) - first_G[:, None]) % E < (pairs_G % E)[:, None])


def distinct_counts(rng: np.random.Generator, tokens_X: Array, num_experts: int, num_topk: int) -> Array:
    """Draws `num_topk` distinct experts for each token and returns their counts, int64 [X, P]. All sets are equally likely.

    Experts are considered one by one. A token that has j choices left takes the next of the p remaining experts with probability
    j / p. It therefore suffices to know how many tokens have j choices left. The distribution is exact.
    """
    choices_J = np.arange(num_topk + 1)
    waiting_XJ = np.zeros((len(tokens_X), num_topk + 1), np.int64)
    waiting_XJ[:, num_topk] = tokens_X
    load_XP = np.empty((len(tokens_X), num_experts), np.int64)
    for p in range(num_experts):
        took_XJ = rng.binomial(waiting_XJ, np.minimum(1.0, choices_J / (num_experts - p)))
        load_XP[:, p] = took_XJ.sum(axis=1)
        waiting_XJ -= took_XJ
        waiting_XJ[:, :-1] += took_XJ[:, 1:]
    return load_XP
