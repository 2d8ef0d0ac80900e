"""Statistics of expert load that show how hard the load is to balance. Use them to compare generated with recorded routing."""

import itertools
from collections.abc import Iterator

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L MoE layers, G ranks, E experts.

# Number of counts that are converted to float64 at once.
_BLOCK = 2**20


def skew(load_XG: Array) -> Array:
    """Returns the largest load divided by the mean along the last axis. 1.0 means perfect balance or no load."""
    mean_X = load_XG.mean(axis=-1)
    return np.where(mean_X > 0, load_XG.max(axis=-1) / np.where(mean_X > 0, mean_X, 1.0), 1.0)


def mean_skew(load_XG: Array) -> float:
    """Returns the mean of `skew` over all rows with load, or 1.0 if no row has load."""
    skew_X = skew(load_XG)[load_XG.any(axis=-1)]
    return float(skew_X.mean()) if skew_X.size else 1.0


def skew_statistics(workload: Workload) -> dict[str, float]:
    """Returns the skew, drift and spread of a workload, each as a mean over layers and micro-steps.

    Returns:
        Dict with these figures. Rows without load are left out of both skews.

        * ``skew_mean`` and ``skew_p99``: Largest rank load divided by the mean, with experts e*E/G to (e+1)*E/G at home on
          rank e. 1 is perfect balance.
        * ``step_correlation``: Pearson correlation, over the experts of a layer, between the loads of one micro-step and the
          next. It is NaN if there is only one micro-step. A correlation of 1 means that each micro-step predicts the next one.
        * ``log_spread``: Standard deviation, over the experts of a layer, of log(load of all micro-steps + 1/2).
        * ``source_distance``: Half the L1 distance between the expert shares of one source rank and those of the whole
          micro-step, in [0, 1]. The distance decreases if ranks have more tokens.

    Raises:
        InputError: The number of experts is not a multiple of the number of ranks.

    Example:
        >>> {name: round(value, 3) for name, value in foremoe.skew_statistics(work).items()}
        {'skew_mean': 1.739, 'skew_p99': 3.307, 'step_correlation': 0.865, 'log_spread': 0.777, 'source_distance': 0.094}
    """
    M, L, G, E = workload.load_MLGE.shape
    if G > E or E % G:
        raise InputError(f"{E} experts do not divide over {G} ranks; deal to a number of ranks that divides {E}.")
    skew_ML, spread_L, distance_MLG = np.empty((M, L)), np.empty(L), np.empty((M, L, G))
    correlation_ML = np.full((M, L), np.nan)  # correlation of a micro-step with the one before
    for m, l in _blocks(M, L, G * E):  # noqa: E741
        load_MLE, load_MLGE = workload.load_MLE[m, l].astype(np.float64), workload.load_MLGE[m, l]
        skew_ML[m, l] = skew(load_MLE.reshape(*load_MLE.shape[:2], G, E // G).sum(axis=3))
        distance_MLG[m, l] = _source_distance(load_MLGE)
    for m, l in _blocks(M, L, E):  # noqa: E741
        with_one_before = slice(max(m.start - 1, 0), m.stop)
        correlation_ML[with_one_before, l][1:] = _step_correlation(workload.load_MLE[with_one_before, l].astype(np.float64))
    for at in range(L):
        spread_L[at] = np.log(workload.load_MLE[:, at].sum(axis=0, dtype=np.int64) + 0.5).std()
    skew_X = skew_ML[workload.load_MLE.any(axis=2)] if workload.load_MLE.any() else skew_ML
    return {
        "skew_mean": float(skew_X.mean()), "skew_p99": float(np.quantile(skew_X, 0.99)),
        "step_correlation": _mean_of_numbers(correlation_ML), "log_spread": float(spread_L.mean()),
        "source_distance": _mean_of_numbers(distance_MLG),
    }  # fmt: skip


def _blocks(num_micro_steps: int, num_layers: int, row: int) -> Iterator[tuple[slice, slice]]:
    """Yields ranges of micro-steps and layers with few rows each. Working on all rows at once takes many times more memory."""
    rows = max(_BLOCK // row, 1)
    layers = min(rows, num_layers)
    micro_steps = max(rows // layers, 1)
    for m, layer in itertools.product(range(0, num_micro_steps, micro_steps), range(0, num_layers, layers)):
        yield slice(m, min(m + micro_steps, num_micro_steps)), slice(layer, layer + layers)


def _mean_of_numbers(array: Array) -> float:
    """Returns the mean without NaN, which marks undefined entries. It is NaN if all entries are undefined."""
    numbers = array[~np.isnan(array)]
    return float(numbers.mean()) if numbers.size else float("nan")


def _step_correlation(load_MLE: Array) -> Array:
    """Returns the correlation of each micro-step's load with the one before, [M - 1, L]. It is NaN if one of them is even."""
    centred_MLE = load_MLE - load_MLE.mean(axis=2, keepdims=True)
    norm_ML = np.sqrt((centred_MLE**2).sum(axis=2))
    product_ML = (centred_MLE[1:] * centred_MLE[:-1]).sum(axis=2)
    scale_ML = norm_ML[1:] * norm_ML[:-1]
    return np.where(scale_ML > 0, product_ML / np.where(scale_ML > 0, scale_ML, 1.0), np.nan)


def _source_distance(load_MLGE: Array) -> Array:
    """Returns half the L1 distance of each source's expert shares from those of all sources, [M, L, G]. NaN without pairs."""
    pairs_MLG = load_MLGE.sum(axis=3, dtype=np.int64)
    share_MLE = load_MLGE.sum(axis=2) / np.maximum(pairs_MLG.sum(axis=2), 1)[..., None]
    share_MLGE = load_MLGE / np.maximum(pairs_MLG, 1)[..., None]
    share_MLGE -= share_MLE[:, :, None]
    return np.where(pairs_MLG > 0, 0.5 * np.abs(share_MLGE, out=share_MLGE).sum(axis=3), np.nan)
