"""Nonnegative least squares with few unknowns, for relative residuals, with a variant that is robust against outliers."""

from itertools import combinations

import numpy as np

from foremoe.base.arrays import Array

# Letters: N points, F unknowns.

_ROUNDS = 8
_OUTLIER = 1.5  # multiple of the median above which residuals lose weight


def nonnegative(factor_NF: Array, seconds_N: Array, scale_N: Array, weight_N: Array) -> Array:
    """Returns the x >= 0, float64 [F], that minimises the sum of ``weight * ((factor @ x - seconds) / scale)**2``.

    The function tries every set of unknowns that may be above 0, so F should be small. Scales must be above 0. All other inputs
    must be at least 0.
    """
    root_N = np.sqrt(weight_N) / scale_N
    a_NF, b_N = factor_NF * root_N[:, None], seconds_N * root_N
    # Columns are scaled to similar size, because seconds per byte and seconds per layer differ by ten orders of magnitude.
    scale_F = np.maximum(np.abs(a_NF).max(axis=0, initial=0.0), np.finfo(float).tiny)
    a_NF = a_NF / scale_F
    F = factor_NF.shape[1]
    best_F, best = np.zeros(F), float(b_N @ b_N)
    for size in range(F, 0, -1):
        if size == F - 1 and (best_F > 0).all():
            break  # the unconstrained minimum satisfies the constraint
        for chosen in combinations(range(F), size):
            found = np.linalg.lstsq(a_NF[:, chosen], b_N, rcond=None)[0]
            if (found < 0).any():
                continue
            rest = float(np.square(a_NF[:, chosen] @ found - b_N).sum())
            if rest < best * (1.0 - 1e-12):
                best_F, best = np.zeros(F), rest
                best_F[list(chosen)] = found
    return best_F / scale_F


def robust(factor_NF: Array, seconds_N: Array, scale_N: Array | None = None) -> Array:
    """Returns a fit that is robust against outliers, by repeating `nonnegative` with less weight for points with large residuals.

    `scale_N` defaults to `seconds_N`.
    """
    scale_N = seconds_N if scale_N is None else scale_N
    weight_N = np.ones(len(seconds_N))
    for _ in range(_ROUNDS):
        x_F = nonnegative(factor_NF, seconds_N, scale_N, weight_N)
        off_N = np.abs(factor_NF @ x_F - seconds_N) / scale_N
        limit = max(_OUTLIER * float(np.median(off_N)), 1e-9)
        weight_N = np.square(limit / np.maximum(off_N, limit))
    return x_F


def residuals(fitted_N: Array, seconds_N: Array) -> Array:
    """Returns the relative residuals (fitted - measured) / measured, float64 [N]."""
    return (fitted_N - seconds_N) / seconds_N
