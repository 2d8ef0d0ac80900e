"""Foresight: the load that the planner sees. It is exact with router replay. Other kinds are for ablations and baselines."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.fields import real, whole
from foremoe.problem.problem import Problem

# Letters: M micro-steps, L layers, G source ranks, E experts, T tokens, K top-k, X tokens that change or scenarios.

# Number of earlier micro-steps that serve as scenarios of the next one.
PAST = 8


@dataclass(frozen=True, slots=True)
class Noisy:
    """Exact loads with noise. Each expert's load is multiplied by exp(drift * normal). Then the row is scaled to its old total.

    Attributes:
        drift: Standard deviation of the factor's logarithm, from 0 to 100.
        seed: Seed of the noise, an integer >= 0. The noise of a micro-step does not depend on the number of micro-steps.

    Example:
        >>> blurred, _ = foremoe.Planner(foresight=foremoe.Noisy(drift=0.3)).plan(problem)
        >>> round(float(blurred.skew_ML.mean()), 3), round(float(plan.skew_ML.mean()), 3)
        (1.108, 1.053)
    """

    drift: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        # exp(100 * normal) still fits float64. A larger factor would overflow and give meaningless loads.
        real(self.drift, "drift of Noisy", 0.0, 100.0, open_low=False)
        whole(self.seed, "seed of Noisy", 0)


@dataclass(frozen=True, slots=True)
class Rerouted:
    """Routing in which a share of the choices differs, as if training computed its own routing (``stage(..., replay=False)``).

    The levels plan for this routing with counts by source. The real load is then served as a runtime would serve it. Each source
    sends a slot at most the planned number of pairs, and sends all further pairs to the expert's home. With other kinds of
    foresight, quotas are split on the real load instead.

    Attributes:
        share: Share of (token, layer) choices that differ, from 0 (exact foresight) to 1.
        how: With "swap", one of the token's experts is replaced by another one. With "redraw", all of them are drawn again.
            Experts are drawn with probabilities in proportion to their load.
        seed: Seed of the draw, an integer >= 0. The draw of a micro-step does not depend on the number of micro-steps.

    Example:
        >>> rerouted, _ = foremoe.Planner(foresight=foremoe.Rerouted(share=0.4)).plan(problem)
        >>> round(float(rerouted.skew_ML.mean()), 3), round(float(plan.skew_ML.mean()), 3)
        (1.065, 1.053)
    """

    share: float = 0.1
    how: str = "swap"
    seed: int = 0

    def __post_init__(self) -> None:
        real(self.share, "share of Rerouted", 0.0, 1.0, open_low=False)
        if self.how not in ("swap", "redraw"):
            raise InputError(f'how of Rerouted must be "swap" or "redraw"; got {self.how!r}.')
        whole(self.seed, "seed of Rerouted", 0)

    def counts(self, load_MLGE: Array, num_topk: int) -> Array:
        """Returns counts of changed routing (int32 [M, L, G, E]) for given counts. Every source keeps its number of pairs."""
        out_MLGE = load_MLGE.astype(np.int64)
        for m, load_LGE in enumerate(out_MLGE):
            rng = np.random.default_rng([self.seed, m])
            tokens_LG = load_LGE.sum(axis=2) // num_topk
            chance_LGE = np.broadcast_to(load_LGE.sum(axis=1, keepdims=True), load_LGE.shape).astype(np.float64)
            if self.how == "swap":  # tokens that have the expert already cannot get it
                chance_LGE *= np.maximum(tokens_LG[..., None] - load_LGE, 0)
            total_LG = chance_LGE.sum(axis=2)
            left_LG = np.where(total_LG > 0, rng.binomial(tokens_LG, self.share), 0)
            left_LG *= num_topk if self.how == "redraw" else 1
            come_LGE = rng.multinomial(left_LG, chance_LGE / np.where(total_LG > 0, total_LG, 1.0)[..., None])
            others_LG = load_LGE.sum(axis=2)
            for load_LG in np.moveaxis(load_LGE, 2, 0):  # draws pairs to remove without replacement
                others_LG -= load_LG
                gone_LG = rng.hypergeometric(load_LG, others_LG, left_LG)
                load_LG -= gone_LG
                left_LG -= gone_LG
            load_LGE += come_LGE
        return out_MLGE.astype(np.int32)

    def choices(self, topk_TLK: Array) -> Array:
        """Returns changed choices of tokens, [T, L, K]. Distinct experts of a token remain distinct, and -1 remains -1."""
        out_TLK = topk_TLK.copy()
        for layer in range(topk_TLK.shape[1]):
            rng = np.random.default_rng([self.seed, layer])
            known_TK = topk_TLK[(topk_TLK[:, layer] >= 0).all(axis=1), layer]
            at_X = np.flatnonzero((rng.random(len(topk_TLK)) < self.share) & (topk_TLK[:, layer] >= 0).all(axis=1))
            if self.how == "redraw":  # takes the choice of a random token
                out_TLK[at_X, layer] = known_TK[rng.integers(max(1, len(known_TK)), size=len(at_X))]
                continue
            place_X = rng.integers(topk_TLK.shape[2], size=len(at_X))
            for _ in range(100):  # limited, because an expert that most tokens have may never fit
                new_X = rng.choice(known_TK.ravel(), size=len(at_X)) if len(at_X) else place_X
                fits_X = (topk_TLK[at_X, layer] != new_X[:, None]).all(axis=1)
                out_TLK[at_X[fits_X], layer, place_X[fits_X]] = new_X[fits_X]
                at_X, place_X = at_X[~fits_X], place_X[~fits_X]
        return out_TLK


Foresight = str | Noisy | Rerouted
FORESIGHTS = ("exact", "previous", "step")


def require_foresight(foresight: Foresight) -> None:
    """Raises InputError unless `foresight` is "exact", "previous", "step", a `Noisy` or a `Rerouted`."""
    if not isinstance(foresight, Noisy | Rerouted) and foresight not in FORESIGHTS:
        raise InputError(f"foresight must be {', '.join(FORESIGHTS)}, Noisy(drift) or Rerouted(share); got {foresight!r}.")


def foreseen(problem: Problem, foresight: Foresight, history_LE: Array | None) -> Problem:
    """Returns the problem that levels and guard see. Its load is `predicted_load`. Counts by source exist only for `Rerouted`.

    With "previous", the scenarios are the earlier micro-steps. With "step", they are all micro-steps of the step.
    """
    if isinstance(foresight, Rerouted) and foresight.share > 0:
        given_MLGE = problem.load_MLGE if problem.load_MLGE is not None else problem.load_MLE[:, :, None]
        load_MLGE = foresight.counts(given_MLGE, problem.model.num_topk)
        sources = load_MLGE if problem.load_MLGE is not None else None
        return dataclasses.replace(problem, load_MLE=load_MLGE.sum(axis=2, dtype=np.int32), load_MLGE=sources, routed=None)
    if isinstance(foresight, Rerouted):
        return problem
    load_MLE = predicted_load(problem.load_MLE, foresight, history_LE)
    if load_MLE is problem.load_MLE:
        return problem
    scenario_XMLE, complete = _scenarios(problem.load_MLE, foresight, history_LE), foresight == "step"
    return dataclasses.replace(problem.with_load(load_MLE), scenario_XMLE=scenario_XMLE, scenarios_complete=complete)


def _scenarios(load_MLE: Array, foresight: Foresight, history_LE: Array | None) -> Array | None:
    """Returns `Problem.scenario_XMLE`, int32 [X, M, L, E]: the earlier micro-steps, the last one first, or those of the step."""
    if foresight == "step":
        return np.broadcast_to(load_MLE[:, None], (len(load_MLE), *load_MLE.shape))
    if foresight != "previous":
        return None
    seen_MLE = load_MLE if history_LE is None else np.concatenate([history_LE[None], load_MLE])
    before_M = np.arange(len(load_MLE)) + (history_LE is not None)  # number of micro-steps known by then
    index_XM = before_M - 1 - np.arange(max(1, min(PAST, int(before_M.max()))))[:, None]
    return np.where((index_XM >= 0)[:, :, None, None], seen_MLE[np.maximum(0, index_XM)], 0)


def predicted_load(load_MLE: Array, foresight: str | Noisy, history_LE: Array | None) -> Array:
    """Returns the load that solvers and the guard see, int32 [M, L, E].

    Args:
        load_MLE: Real load.
        foresight: With ``"exact"``, solvers see the real load. With ``"previous"``, they see the load of the previous micro-step.
            With ``"step"``, they see the sum over the step in every micro-step. The value may also be a `Noisy`.
        history_LE: Load that solvers see in the first micro-step with ``"previous"``. None stands for zeros.
    """
    if isinstance(foresight, Noisy):
        noise = [np.random.default_rng([foresight.seed, m]).standard_normal(load_MLE.shape[1:]) for m in range(len(load_MLE))]
        blurred_MLE = load_MLE * np.exp(foresight.drift * np.stack(noise))
        total_ML = np.maximum(blurred_MLE.sum(axis=2, keepdims=True), 1e-300)
        return np.rint(blurred_MLE * (load_MLE.sum(axis=2, keepdims=True) / total_ML)).astype(np.int32)
    if foresight == "exact":
        return load_MLE
    if foresight == "step":
        summed_LE = load_MLE.sum(axis=0, dtype=np.int64)
        if summed_LE.max(initial=0) > np.iinfo(np.int32).max:
            raise InputError(f"the step's load of one expert reaches {summed_LE.max()} pairs; plan it in smaller mini-batches.")
        return np.broadcast_to(summed_LE.astype(np.int32), load_MLE.shape)
    first_LE = np.zeros_like(load_MLE[0]) if history_LE is None else history_LE
    return np.concatenate([first_LE[None], load_MLE[:-1]])
