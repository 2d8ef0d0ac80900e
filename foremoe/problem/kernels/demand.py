"""Kernels that count pairs by the node of their tokens."""

from __future__ import annotations

from foremoe.base.compiled import kernel

# Letters: N rows, G ranks, E experts, V nodes, Q parts, R sums, C columns of a table.


@kernel
def add_rows(amount_QC, row_Q, out_RC):
    """Adds every row of `amount_QC` to the row of `out_RC` with the index in `row_Q`."""
    for q in range(row_Q.size):
        to_C, amount_C = out_RC[row_Q[q]], amount_QC[q]
        for c in range(to_C.size):
            to_C[c] += amount_C[c]


@kernel
def demand_rows(low, high, load_NGE, node_G, demand_NVE):
    """Adds the number of pairs that the tokens of each node send to each expert to `demand_NVE`, for rows [low, high)."""
    for n in range(low, high):
        add_rows(load_NGE[n], node_G, demand_NVE[n])
