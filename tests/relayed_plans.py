"""Plans whose copies are passed on by random ranks, which no solver makes."""

from __future__ import annotations

import dataclasses

import numpy as np

from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link


def with_relays(plan: Plan, rng: np.random.Generator, *, density: float = 1.0) -> Plan:
    """The plan with some copies passed on by a random rank that holds the expert by then; slow and plain.

    Where a source does not read it any more, what lands on its buffer next is made to wait.

    Args:
        density: Chance that a copy that could be relayed is.
    """
    t, B, node_G = plan.transfers, plan.B, plan.header.cluster.node_of_rank_G
    home_C = plan.home_LE[t.layer_C, t.expert_C] // B
    src_C, link_C = home_C.copy(), np.where(node_G[home_C] == node_G[t.dst_C], Link.PEER, Link.RDMA)
    # What lands: [rank, buffer, layer, expert, need, after].
    landings = np.stack([t.dst_C, t.buffer_C, t.layer_C, t.expert_C, t.need_C, t.after_C], axis=1).tolist()
    settled: list[list[int]] = []
    shuffled = rng.permutation(len(t))
    for c in shuffled[np.argsort(t.need_C[shuffled], kind="stable")].tolist():
        dst, _, layer, expert, need, _ = landings[c]
        holders = {}  # rank -> what would land on its copy too early
        for rank, buffer, *what, at, _ in settled:
            early = [one for one in landings if one[:2] == [rank, buffer] and one[4] > at and one[5] < need]
            if what == [layer, expert] and rank not in (dst, home_C[c]) and all(one[4] > need for one in early):
                holders[rank] = early
        if holders and rng.random() < density:
            src_C[c] = rng.choice(list(holders))
            link_C[c] = Link.PEER if node_G[src_C[c]] == node_G[dst] else Link.RDMA
            for one in holders[src_C[c]]:
                one[5] = need
        settled.append(landings[c])
    after_C = np.array([one[5] for one in landings])
    return dataclasses.replace(plan, transfers=t.replace(src_C=src_C, link_C=link_C, after_C=after_C))
