"""Relays: copies that a rank passes on from its own buffer. This module finds their origin and those that engines can execute."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.plan.landings import latest
from foremoe.plan.links import choose_links
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList

# Letters: C copies of the whole plan, Y relays among them, P links (`Link`), L, G, E as in Plan.


class Relays(NamedTuple):
    """Dependencies of a plan's relays, with arrays int64 [C]."""

    buffer_C: Array  # buffer of the source from which a relay is read; -1 for copies from home or the host store
    parent_C: Array  # copy that brought the expert there; -1 if the copy is not a relay
    depth_C: Array  # number of relays of the same use up to this one; 0 if its source has the expert from an earlier use

    @property
    def relay_C(self) -> Array:
        """bool [C], True for copies that are relays."""
        return self.buffer_C >= 0


def home_ranks(plan: Plan, t: TransferList) -> Array:
    """Returns int64 [C], the home rank of every copy's expert."""
    return plan.home_LE[t.layer_C, t.expert_C].astype(np.int64) // plan.B


def relays_of(plan: Plan, t: TransferList) -> Relays:
    """Finds the relays among the copies `t` of a plan.

    Raises:
        InputError: A source does not hold the expert that it should pass on, or ranks pass an expert on in a circle.
    """
    buffer_C, parent_C = np.full(len(t), -1), np.full(len(t), -1)
    relay_Y = np.flatnonzero((t.src_C >= 0) & (t.src_C != home_ranks(plan, t)))
    if not len(relay_Y):
        return Relays(buffer_C, parent_C, np.zeros(len(t), np.int64))
    held_Y = latest(t, *(column_C[relay_Y] for column_C in (t.src_C, t.layer_C, t.expert_C, t.need_C)))
    lacking_Y = (held_Y < 0) | (t.src_C[relay_Y] == t.dst_C[relay_Y])
    if lacking_Y.any():
        c = relay_Y[np.argmax(lacking_Y)]
        relay = f"rank {t.src_C[c]} pass on expert {t.expert_C[c]} of layer {t.layer_C[c]}"
        lack = f"which it does not hold by use {t.need_C[c]}; Plan.check() says more"
        raise InputError(f"copy {c} of the plan lets {relay}, {lack}.")
    buffer_C[relay_Y], parent_C[relay_Y] = t.buffer_C[held_Y], held_Y
    same_use_C = np.where(t.need_C[parent_C] == t.need_C, parent_C, -1)
    depth_C = chain_depth(same_use_C)
    c = int(np.argmax(depth_C))
    if depth_C[c] > (same_use_C >= 0).sum():
        raise InputError(f"copy {c} of the plan is passed on in a circle: no rank has expert {t.expert_C[c]} first; plan again.")
    return Relays(buffer_C, parent_C, depth_C)


def chain_depth(parent_C: Array) -> Array:
    """Returns int64 [C], the number of parents in each copy's chain. In a circle, it exceeds the number of relays."""
    depth_C, child_Y = np.zeros(len(parent_C), np.int64), np.flatnonzero(parent_C >= 0)
    for _ in range(len(child_Y) + 1):
        deeper_Y = depth_C[parent_C[child_Y]] + 1
        if (deeper_Y == depth_C[child_Y]).all():
            break
        depth_C[child_Y] = deeper_Y
    return depth_C


def keep_executable(plan: Plan, t: TransferList, backend_P: Array, two_sided_P: Array) -> TransferList:
    """Replaces relays that an engine cannot execute with copies from the home.

    A relay is executed only if the relay and the original copy use the same two-sided backend. If a source's own copy fails, the
    source stops using this backend, and thus its relays too. The failure of one backend therefore never makes a second backend
    fail.
    """
    home_C, node_G = home_ranks(plan, t), plan.header.cluster.node_of_rank_G
    home_link_C = np.where(node_G[home_C] == node_G[t.dst_C], Link.PEER, Link.RDMA)
    while True:
        relays = relays_of(plan, t)
        own_C = np.where(relays.parent_C >= 0, t.link_C[relays.parent_C], t.link_C)
        drop_C = relays.relay_C & ((backend_P[t.link_C] != backend_P[own_C]) | ~two_sided_P[t.link_C])
        if not drop_C.any():
            return t
        # Relays that passed on one of these copies may now have to come from home as well.
        t = t.replace(src_C=np.where(drop_C, home_C, t.src_C), link_C=np.where(drop_C, home_link_C, t.link_C))


def copies_for(plan: Plan, backend_P: Array, two_sided_P: Array) -> TransferList:
    """Returns the plan's copies for the available backends. If a link has no backend, its copies get other links.

    `backend_P` is the backend of each link, or -1 if there is none. `two_sided_P` says whether this backend is two-sided.
    """
    advised = keep_executable(plan, plan.transfers, backend_P, two_sided_P)
    if (backend_P[advised.link_C] >= 0).all():
        return advised
    # Allows as many relays in a row as the plan has.
    hops = int(relays_of(plan, plan.transfers).depth_C.max(initial=0))
    return keep_executable(plan, reschedule(plan, backend_P, hops), backend_P, two_sided_P)


def reschedule(plan: Plan, backend_P: Array, relay: int) -> TransferList:
    """Returns the plan's copies, distributed again over the links that have a backend."""
    head, allowed = plan.header, [link for link in Link if backend_P[link] >= 0]
    return choose_links(
        plan.transfers, plan.home_LE, head.cluster, head.model.expert_bytes, allowed, relay=relay
    )  # fmt: skip
