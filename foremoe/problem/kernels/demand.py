"""Pairs by the node that their tokens are on."""

from __future__ import annotations

from foremoe.base.compiled import inner_kernel, kernel

# Letters: N rows, G ranks, E experts, V nodes.


@inner_kernel
def demand_row(load_GE, node_G, demand_VE):
    """Fills `demand_VE`: pairs that the tokens of a node send to an expert."""
    demand_VE[:] = 0
    for g in range(node_G.size):
        of_node_E, of_rank_E = demand_VE[node_G[g]], load_GE[g]
        for e in range(of_rank_E.size):
            of_node_E[e] += of_rank_E[e]


@kernel
def demand_rows(low, high, load_NGE, node_G, demand_NVE):
    """`demand_row` for rows [low, high)."""
    for n in range(low, high):
        demand_row(load_NGE[n], node_G, demand_NVE[n])
