"""What makes expert load hard to balance, in a few numbers: to compare generated routing with recorded routing."""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L MoE layers, G ranks, E experts.


def skew(load_XG: Array) -> Array:
    """Largest over mean load along the last axis; 1.0 is perfect, and stands where there is no load."""
    mean_X = load_XG.mean(axis=-1)
    return np.where(mean_X > 0, load_XG.max(axis=-1) / np.where(mean_X > 0, mean_X, 1.0), 1.0)


def skew_statistics(workload: Workload) -> dict[str, float]:
    """Skew, drift and spread of a workload, each a mean over layers and micro-steps.

    Returns:
        A figure for each of these names.

        * ``skew_mean`` and ``skew_p99``: Largest over mean rank load with experts e*E/G to (e+1)*E/G at home on rank e; 1 is
          perfect.
        * ``step_correlation``: Pearson correlation, over the experts of a layer, between one micro-step's loads and the next;
          NaN with a single micro-step. 1: the previous micro-step tells all.
        * ``log_spread``: Standard deviation, over the experts of a layer, of log(load of all micro-steps + 1/2).
        * ``source_distance``: Half the L1 distance between the expert shares of one source rank and of its micro-step, in [0, 1].
          It shrinks as ranks hold more tokens.

    Raises:
        InputError: Experts that do not divide over the ranks.

    Example:
        >>> {name: round(value, 3) for name, value in foremoe.skew_statistics(work).items()}
        {'skew_mean': 1.78, 'skew_p99': 2.471, 'step_correlation': 0.583, 'log_spread': 0.764, 'source_distance': 0.24}
    """
    load_MLE = workload.load_MLE.astype(np.float64)
    M, L, E = load_MLE.shape
    if workload.G > E or E % workload.G:
        raise InputError(f"{E} experts do not divide over {workload.G} ranks; deal to a number of ranks that divides {E}.")
    skew_ML = skew(load_MLE.reshape(M, L, workload.G, E // workload.G).sum(axis=3))
    total_LE = load_MLE.sum(axis=0)
    return {
        "skew_mean": float(skew_ML.mean()), "skew_p99": float(np.quantile(skew_ML, 0.99)),
        "step_correlation": _step_correlation(load_MLE), "log_spread": float(np.log(total_LE + 0.5).std(axis=1).mean()),
        "source_distance": _source_distance(workload.load_MLGE),
    }  # fmt: skip


def _step_correlation(load_MLE: Array) -> float:
    centred_MLE = load_MLE - load_MLE.mean(axis=2, keepdims=True)
    norm_ML = np.sqrt((centred_MLE**2).sum(axis=2))
    product_ML = (centred_MLE[1:] * centred_MLE[:-1]).sum(axis=2)
    scale_ML = norm_ML[1:] * norm_ML[:-1]
    varied_ML = scale_ML > 0
    return float((product_ML[varied_ML] / scale_ML[varied_ML]).mean()) if varied_ML.any() else float("nan")


def _source_distance(load_MLGE: Array) -> float:
    total, rows = 0.0, 0
    # One micro-step at a time: the shares of all would take twice the memory of the counts again.
    for load_LGE in load_MLGE:
        pairs_LG = load_LGE.sum(axis=2, dtype=np.int64)
        share_LE = load_LGE.sum(axis=1) / np.maximum(pairs_LG.sum(axis=1), 1)[:, None]
        share_LGE = load_LGE / np.maximum(pairs_LG, 1)[..., None]
        distance_LG = 0.5 * np.abs(share_LGE - share_LE[:, None]).sum(axis=2)
        total += float(distance_LG[pairs_LG > 0].sum())
        rows += int((pairs_LG > 0).sum())
    return total / rows if rows else float("nan")
