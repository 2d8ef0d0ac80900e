"""Deadline: which way every weight copy takes, so that the copies of a use are in place as early as possible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from foremoe.arrays import Array
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
        path_C, src_C = choose_paths(problem, transfers)
        return transfers.replace(path_C=path_C, src_C=src_C)


def copy_seconds(problem: Problem) -> tuple[float, float, float]:
    """Seconds of one copy of an expert by `Path`: peer, RDMA, host."""
    cluster, expert_bytes = problem.cluster, problem.model.expert_bytes
    return (
        expert_bytes / cluster.peer_bytes_per_s + cluster.peer_latency_s,
        expert_bytes / cluster.rdma_bytes_per_s_per_rank + cluster.rdma_latency_s,
        # A cluster without a host store has no host bandwidth.
        expert_bytes / cluster.host_bytes_per_s + cluster.host_latency_s if cluster.host_bytes_per_s > 0 else np.inf,
    )


def choose_paths(problem: Problem, transfers: Transfers) -> tuple[Array, Array]:
    """``(path_C uint8, src_C int16)`` of `Deadline`."""
    home_C = problem.home_LE[transfers.layer_C, transfers.expert_C] // problem.B
    path_C, src_C = np.empty(len(transfers), np.uint8), home_C.astype(np.int16)
    order_C = np.argsort(transfers.need_C, kind="stable")
    seconds = np.array(copy_seconds(problem))
    node_G = problem.cluster.node_of_rank_G
    _choose(order_C, transfers.need_C, home_C, transfers.dst_C, node_G, seconds, path_C)
    src_C[path_C == Path.HOST] = -1
    return path_C, src_C


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
