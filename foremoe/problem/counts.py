"""Counts: the load of a problem in the form that compiled functions read."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array, frozen_array, sealed
from foremoe.base.parallel import for_rows
from foremoe.problem.kernels.demand import demand_rows

# Letters: N rows, G ranks, E experts, V nodes.

# Read-only like the arrays in whose place it is used, so that kernels compile once for both.
_UNKNOWN = frozen_array(np.zeros((1, 1, 1)), np.int32, "sources")


class Counts(NamedTuple):
    """Numbers of (token, expert) pairs in every row, int32."""

    load_NE: Array  # pairs of each expert
    load_NGE: Array  # pairs by source rank; a single zero if `located` is False
    demand_NVE: Array  # pairs by the node of their tokens; a single zero if `located` is False
    located: bool  # whether sources are known


def count(load_NE: Array, load_NGE: Array | None, node_G: Array) -> Counts:
    """Returns the `Counts` of a load, including the sums by node."""
    if load_NGE is None:
        return Counts(load_NE, _UNKNOWN, _UNKNOWN, False)
    N, _, E = load_NGE.shape
    demand_NVE = np.zeros((N, int(node_G.max()) + 1, E), np.int32)
    for_rows(lambda low, high: demand_rows(low, high, load_NGE, node_G, demand_NVE), N, whole=True)
    return Counts(load_NE, load_NGE, sealed(demand_NVE), True)
