"""Programme: a plan as one rank executes it, position by position: what starts when, what must be there, what goes home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan
from foremoe.plan.relays import Relays, home_ranks, relays_of
from foremoe.plan.transfers import TransferList
from foremoe.problem.schedule import Phase

# Letters: U uses (a layer in a pass) in order of execution, C copies of the whole plan, M, L, G, E, S as in Plan.


class Return(NamedTuple):
    """The gradient of one replica on its way home, after backward of a row."""

    key: int
    layer: int
    expert: int
    src_rank: int
    dst_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Programme:
    """One rank's part of a plan.

    A copy starts on both ends at the same position: after the use that must be over on the destination, and at most `prefetch`
    positions before the use that needs it. A relay starts a position later than the copy that it passes on, or, where that is
    too late, in the same one. Copies of one position start in the order of `Relays.depth_C`, then of need. So all ranks have one
    order of batches, (position, depth, need), in which a relay comes after what it waits for: ranks that wait for each other in
    this order never do so in a circle.

    Attributes:
        micro_step_U: int32, micro-step of every use, see `Schedule.uses`.
        layer_U: Layer of every use.
        phase_U: uint8, `Phase` of every use.
        pass_U: Pass of every use.
        position: (micro-step, layer, phase) -> position.
        need_C: Position of the use that needs each copy.
        start_C: Position of the use at which each copy may start.
        starts: Position -> the copies to start there in which this rank has or may have a part, as destination, home or relay.
        arrivals: Position -> the copies to this rank that the use needs.
        frees: Position -> buffers of this rank whose contents are not needed after it, until a copy lands.
        returns: Position -> gradients that leave or reach this rank after it.
        home_C: Home rank of every copy's expert.
        relays: Where relays come from.
    """

    micro_step_U: list[int]
    layer_U: list[int]
    phase_U: list[int]
    pass_U: list[int]
    position: dict[tuple[int, int, int], int]
    need_C: Array
    start_C: Array
    home_C: Array
    starts: dict[int, list[int]]
    arrivals: dict[int, list[int]]
    frees: dict[int, list[int]]
    returns: dict[int, list[Return]]
    relays: Relays

    @staticmethod
    def of(plan: Plan, rank: int, prefetch: int, transfers: TransferList | None = None) -> Programme:
        """The part of `rank`; `prefetch` positions ahead of need at most.

        Args:
            transfers: The plan's copies from other sources; default: from those of the plan.

        Raises:
            InputError: As `relays_of`.
        """
        t, schedule = plan.transfers if transfers is None else transfers, plan.header.schedule
        uses = schedule.uses(plan.L)
        micro_step_U = plan.order_M[uses.micro_step_U]
        triples = list(zip(micro_step_U.tolist(), uses.layer_U.tolist(), uses.phase_U.tolist(), strict=True))
        need_C, after_C = t.need_C.astype(np.int64), t.after_C.astype(np.int64)
        home_C, relays = home_ranks(plan, t), relays_of(plan, t)
        start_C = _starts(np.maximum(after_C + 1, need_C - prefetch).clip(0), need_C, relays)
        # Where relays cannot be used any more, copies come from home.
        mine_C = np.flatnonzero((t.dst_C == rank) | (home_C == rank) | (t.src_C == rank))
        here_C = np.flatnonzero(t.dst_C == rank)
        in_order = mine_C[np.lexsort((mine_C, need_C[mine_C], relays.depth_C[mine_C]))]
        freed_C = here_C[after_C[here_C] >= 0]
        returns = _returns(plan, rank, {triple: u for u, triple in enumerate(triples)})
        return Programme(
            micro_step_U=micro_step_U.tolist(),
            layer_U=uses.layer_U.tolist(),
            phase_U=uses.phase_U.tolist(),
            pass_U=uses.pass_U.tolist(),
            position={triple: u for u, triple in enumerate(triples)},
            need_C=need_C,
            start_C=start_C,
            home_C=home_C,
            starts=_group(start_C[in_order], in_order),
            arrivals=_group(need_C[here_C], here_C),
            frees=_group(after_C[freed_C], t.buffer_C[freed_C]),
            returns=returns,
            relays=relays,
        )


def _starts(start_C: Array, need_C: Array, relays: Relays) -> Array:
    """Start positions, with those of relays after those of the copies they pass on, as far as their use allows."""
    late_K = np.flatnonzero(relays.parent_C >= 0)
    while True:
        after_K = np.minimum(start_C[relays.parent_C[late_K]] + 1, need_C[late_K])
        if (after_K <= start_C[late_K]).all():
            return start_C
        start_C[late_K] = np.maximum(start_C[late_K], after_K)


def _group(key_C: Array, value_C: Array) -> dict[int, list[int]]:
    """Values by key, in the order given."""
    groups: dict[int, list[int]] = {}
    for key, value in zip(key_C.tolist(), value_C.tolist(), strict=True):
        groups.setdefault(key, []).append(value)
    return groups


def _returns(plan: Plan, rank: int, position: dict[tuple[int, int, int], int]) -> dict[int, list[Return]]:
    """Position -> the returns of `rank`, by expert, then replica rank."""
    if not plan.header.schedule.trains:
        return {}
    m_Z, l_Z, g_Z, s_Z = np.nonzero(plan.quota_MLGS[..., plan.B :] > 0)
    e_Z = plan.expert_MLGS[m_Z, l_Z, g_Z, s_Z + plan.B]
    home_Z = plan.home_LE[l_Z, e_Z] // plan.B
    u_ML = np.full((plan.M, plan.L), -1)
    for (m, l, phase), u in position.items():  # noqa: E741
        if phase == Phase.BACKWARD:
            u_ML[m, l] = u
    u_Z = u_ML[m_Z, l_Z]
    order_Z = np.lexsort((g_Z, e_Z, u_Z))
    order_Z = order_Z[u_Z[order_Z] >= 0]
    key_Z = np.empty(len(m_Z), np.int64)
    key_Z[order_Z] = len(plan.transfers) + np.arange(len(order_Z))
    returns: dict[int, list[Return]] = {}
    for z in order_Z[(g_Z[order_Z] == rank) | (home_Z[order_Z] == rank)]:
        one = Return(int(key_Z[z]), int(l_Z[z]), int(e_Z[z]), int(g_Z[z]), int(home_Z[z]))
        returns.setdefault(int(u_Z[z]), []).append(one)
    return returns
