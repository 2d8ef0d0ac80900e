"""Relays: copies that a rank passes on from a buffer of its own; where it has them from, and which of them an engine executes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.plan.paths import choose_paths
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList

# Letters: C copies of the whole plan, K relays among them, Z what lands in buffers (residents, then copies), L, G, E as in Plan.


class Relays(NamedTuple):
    """What a plan's relays depend on; all [C].

    Attributes:
        buffer_C: The buffer of the source that a relay is read from, -1 for copies from home or the host store.
        parent_C: The copy that brought the expert there, -1 if it was there from the start, or for no relay.
        depth_C: How many relays of the same use it comes after, itself included; 0 where its source has it from an earlier use.
    """

    buffer_C: Array
    parent_C: Array
    depth_C: Array

    @property
    def relay_C(self) -> Array:
        """bool: which copies are relays."""
        return self.buffer_C >= 0


def home_ranks(plan: Plan, t: TransferList) -> Array:
    """int64 [C], home rank of every copy's expert."""
    return plan.home_LE[t.layer_C, t.expert_C].astype(np.int64) // plan.B


def relays_of(plan: Plan, t: TransferList) -> Relays:
    """The relays among the copies `t` of a plan.

    Raises:
        InputError: A source does not hold what it should pass on, or ranks pass it on in a circle.
    """
    buffer_C, parent_C, depth_C = np.full(len(t), -1), np.full(len(t), -1), np.zeros(len(t), np.int64)
    relay_K = np.flatnonzero((t.src_C >= 0) & (t.src_C != home_ranks(plan, t)))
    found = Relays(buffer_C, parent_C, depth_C)
    if not len(relay_K):
        return found
    rank_Z, layer_Z, expert_Z, need_Z, buffer_Z = _landings(plan, t)
    first = len(rank_Z) - len(t)
    span = int(t.need_C.max()) + 2
    what = lambda rank, layer, expert: (rank.astype(np.int64) * plan.L + layer) * plan.E + expert  # noqa: E731
    what_Z, what_K = what(rank_Z, layer_Z, expert_Z), what(t.src_C[relay_K], t.layer_C[relay_K], t.expert_C[relay_K])
    key_Z = what_Z * span + need_Z + 1
    order_Z = np.argsort(key_Z, kind="stable")
    last_K = np.searchsorted(key_Z[order_Z], what_K * span + t.need_C[relay_K] + 1, side="right") - 1
    held_K = order_Z[np.maximum(last_K, 0)]
    lacking_K = (last_K < 0) | (what_Z[held_K] != what_K) | (t.src_C[relay_K] == t.dst_C[relay_K])
    if lacking_K.any():
        c = relay_K[np.argmax(lacking_K)]
        raise InputError(
            f"copy {c} of the plan lets rank {t.src_C[c]} pass on expert {t.expert_C[c]} of layer {t.layer_C[c]}, which it does "
            f"not hold by use {t.need_C[c]}; Plan.check() says more."
        )
    buffer_C[relay_K], parent_C[relay_K] = buffer_Z[held_K], np.maximum(held_K - first, -1)
    same_K = relay_K[(parent_C[relay_K] >= 0) & (t.need_C[parent_C[relay_K]] == t.need_C[relay_K])]
    depth_C[same_K] = 1
    for _ in range(plan.G):
        deeper_K = depth_C[parent_C[same_K]] + 1
        if (deeper_K == depth_C[same_K]).all():
            return found
        depth_C[same_K] = deeper_K
    c = same_K[np.argmax(depth_C[same_K])]
    raise InputError(f"copy {c} of the plan is passed on in a circle: no rank has expert {t.expert_C[c]} first; plan anew.")


def without_relays(plan: Plan, t: TransferList, drop_C: Array) -> TransferList:
    """The copies with the relays that a mask selects coming from their home ranks."""
    home_C, node_G = home_ranks(plan, t), plan.header.cluster.node_of_rank_G
    link_C = np.where(node_G[home_C] == node_G[t.dst_C], Link.PEER, Link.RDMA)
    return t.replace(src_C=np.where(drop_C, home_C, t.src_C), link_C=np.where(drop_C, link_C, t.link_C))


def executable(plan: Plan, t: TransferList, backend_P: Array, two_sided_P: Array) -> TransferList:
    """The copies with relays only where the relay and the copy it passes on go by one two-sided backend; others come from home.

    A source whose own copy failed has then given up the backend that its relays would take, so one failure is not turned into
    that of a second backend.

    Args:
        backend_P: The backend that serves each path, -1 for none.
        two_sided_P: Whether it is two-sided.
    """
    while True:
        relays = relays_of(plan, t)
        own_C = np.where(relays.parent_C >= 0, t.link_C[relays.parent_C], t.link_C) if len(t) else t.link_C
        drop_C = relays.relay_C & ((backend_P[t.link_C] != backend_P[own_C]) | ~two_sided_P[t.link_C])
        if not drop_C.any():
            return t
        # What passed on one of these may have to come from home as well now.
        t = without_relays(plan, t, drop_C)


def carried(plan: Plan, backend_P: Array, two_sided_P: Array) -> TransferList:
    """The plan's copies as backends (see `executable`) can carry them: as advised, on new ways if one of those is not served."""
    advised = executable(plan, plan.transfers, backend_P, two_sided_P)
    if (backend_P[advised.link_C] >= 0).all():
        return advised
    # As many relays in a row as the plan has.
    hops = int(relays_of(plan, plan.transfers).depth_C.max(initial=0))
    return executable(plan, anew(plan, backend_P, hops), backend_P, two_sided_P)


def anew(plan: Plan, backend_P: Array, relay: int) -> TransferList:
    """The plan's copies scheduled over the ways that are served."""
    head, served = plan.header, [path for path in Link if backend_P[path] >= 0]
    return choose_paths(
        plan.transfers, plan.home_LE, head.cluster, head.model.expert_bytes, served, relay=relay,
        buffers_per_pool=head.slots.num_buffers(head.redundant, 1), resident_LGS=plan.resident_LGS,
    )  # fmt: skip


def _landings(plan: Plan, t: TransferList) -> tuple[Array, Array, Array, Array, Array]:
    """Rank, layer, expert, need (-1 from the start) and buffer of all that lands; residents first."""
    columns = t.dst_C, t.layer_C, t.expert_C, t.need_C.astype(np.int64), t.buffer_C
    if plan.resident_LGS is None:
        return columns
    pool = plan.header.slots.num_buffers(plan.header.redundant, 1)
    layer_R, rank_R, r_R = np.nonzero(plan.resident_LGS[..., plan.B :] >= 0)
    expert_R = plan.resident_LGS[layer_R, rank_R, plan.B + r_R]
    there = rank_R, layer_R, expert_R, np.full(len(rank_R), -1), layer_R * pool + r_R
    rank_Z, layer_Z, expert_Z, need_Z, buffer_Z = (np.concatenate(pair) for pair in zip(there, columns, strict=True))
    return rank_Z, layer_Z, expert_Z, need_Z, buffer_Z
