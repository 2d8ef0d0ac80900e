"""Deadline: which way every weight copy takes, so that the copies of a use are in place as early as possible."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numba import njit

from foremoe.arrays import Array
from foremoe.cluster import Cluster
from foremoe.problem import Problem
from foremoe.solvers.base import PathSolver
from foremoe.transfers import Path, Transfers

# Letters: C copies, G ranks.

_PEER, _RDMA, _HOST = int(Path.PEER), int(Path.RDMA), int(Path.HOST)


@dataclass(frozen=True)
class Deadline(PathSolver):
    """List scheduling over link capacities, one use (a layer in a pass) at a time.

    Copies of a use are taken in the order they are given. Each may come from its home rank, by peer link inside a node and by
    RDMA across nodes, or from the host store of its node. A copy from a rank waits for the source's egress and the
    destination's ingress of that link class, one from the host for the destination's host link; it takes the way on which it
    ends first, the home rank's if both end together. Uses do not see each other's copies, as in `CostModel`.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969), with links for machines.
    """

    def solve(self, problem: Problem, transfers: Transfers) -> Transfers:
        """Returns the same copies with `path_C` chosen and `src_C` the home rank, or -1 from the host store."""
        return choose_paths(transfers, problem.home_LE, problem.cluster, problem.model.expert_bytes)


def copy_seconds(cluster: Cluster, expert_bytes: int) -> tuple[float, float, float]:
    """Seconds of one copy of an expert by `Path`: peer, RDMA, host."""
    return (
        expert_bytes / cluster.peer_bytes_per_s + cluster.peer_latency_s,
        expert_bytes / cluster.rdma_bytes_per_s_per_rank + cluster.rdma_latency_s,
        # A cluster without a host store has no host bandwidth.
        expert_bytes / cluster.host_bytes_per_s + cluster.host_latency_s if cluster.host_bytes_per_s > 0 else np.inf,
    )


def choose_paths(
    transfers: Transfers, home_LE: Array, cluster: Cluster, expert_bytes: int, allowed: Collection[Path] = tuple(Path)
) -> Transfers:
    """The copies with `path_C` and `src_C` as `Deadline` chooses them.

    Args:
        allowed: the paths there are. A copy for which there is none keeps that of the link to its home rank.
    """
    base = home_LE.shape[1] // cluster.num_ranks
    home_C = home_LE[transfers.layer_C, transfers.expert_C] // base
    path_C, src_C = np.empty(len(transfers), np.uint8), home_C.astype(np.int16)
    order_C = np.argsort(transfers.need_C, kind="stable")
    seconds = np.array(copy_seconds(cluster, expert_bytes))
    seconds[[path for path in Path if path not in allowed]] = np.inf
    _choose(order_C, transfers.need_C, home_C, transfers.dst_C, cluster.node_of_rank_G, seconds, path_C)
    src_C[path_C == Path.HOST] = -1
    return transfers.replace(path_C=path_C, src_C=src_C)


@njit(nogil=True, cache=True)
def _choose(order_C, need_C, home_C, dst_C, node_G, seconds, path_C):  # type: ignore[no-untyped-def]
    G = node_G.size
    egress = np.zeros((2, G))  # by link class: the time at which a rank's link is free again
    ingress = np.zeros((2, G))
    host_G = np.zeros(G)
    need = np.int64(-1)
    for c in order_C:
        if need_C[c] != need:
            need = np.int64(need_C[c])
            egress[:] = 0.0
            ingress[:] = 0.0
            host_G[:] = 0.0
        src, dst = home_C[c], dst_C[c]
        link = _PEER if node_G[src] == node_G[dst] else _RDMA
        by_rank = max(egress[link, src], ingress[link, dst]) + seconds[link]
        by_host = host_G[dst] + seconds[_HOST]
        if by_host < by_rank:
            path_C[c] = _HOST
            host_G[dst] = by_host
        else:
            path_C[c] = link
            egress[link, src] = by_rank
            ingress[link, dst] = by_rank
