"""Foresight: which load the planner sees. With router replay it is the exact one; the rest are for ablations and baselines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.fields import whole

# Letters: M micro-steps, L layers, E experts.


@dataclass(frozen=True, slots=True)
class Noisy:
    """Exact loads blurred: every expert's load times exp(drift * normal), rescaled to the row's total.

    Attributes:
        drift: Standard deviation of the log factor, from 0 to 100.
        seed: Of the noise, a whole number >= 0; a micro-step's noise does not depend on how many there are.
    """

    drift: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        # exp(100 * normal) still fits float64; a larger factor would overflow to nonsense loads.
        if not 0 <= self.drift <= 100:
            raise InputError(f"Noisy needs a drift from 0 to 100; got {self.drift}.")
        whole(self.seed, "seed of Noisy", 0)


Foresight = str | Noisy
FORESIGHTS = ("exact", "previous", "step")


def require_foresight(foresight: Foresight) -> None:
    """Raises InputError for anything but exact, previous, step or a `Noisy`."""
    if not isinstance(foresight, Noisy) and foresight not in FORESIGHTS:
        raise InputError(f"foresight must be {', '.join(FORESIGHTS)} or Noisy(drift); got {foresight!r}.")


def predicted_load(load_MLE: Array, foresight: Foresight, history_LE: Array | None) -> Array:
    """int32 [M, L, E]: the load that solvers and the guard see.

    Args:
        foresight: ``"exact"``; ``"previous"``: the micro-step before (the first sees `history_LE`, or zeros: nothing is known);
            ``"step"``: the step's sum in every micro-step; or `Noisy`.
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
