"""TransferList: the weight copies that follow from placement, schedule and buffers. Solvers never create this list."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, array, order_of
from foremoe.base.compiled import kernel
from foremoe.problem.schedule import Schedule

# Letters: C copies, U uses (a layer in a pass, see Schedule.uses), M micro-steps, L layers, G ranks, S = B + R slots, E experts.


class Link(enum.IntEnum):
    """The link by which a copy is sent."""

    PEER = 0  # from a rank of the same node, over the node's own link
    RDMA = 1  # from a rank of another node
    HOST = 2  # from the node's host store


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferList(ArrayValue):
    """Weight copies, sorted by need: by `need_C`, then by destination, then by slot.

    Attributes:
        micro_step_C: Micro-step whose tokens first use the copy, int32.
        layer_C: Layer of the plan, int16.
        phase_C: `Phase` of the use that first needs the copy, uint8.
        expert_C: Logical expert that is copied, int16.
        src_C: Source rank of the weights, int16. It is the expert's home rank, or -1 for the host store.
        dst_C: Destination rank, int16.
        slot_C: Redundant slot of the placement that the copy fills (B <= slot < S), int16.
        link_C: `Link`, uint8. An engine may use another link.
        buffer_C: Buffer of the destination, int32. There are ``redundant * slot_depth`` buffers for all layers.
        need_C: Index in `Schedule.uses` of the use that first reads the copy, int32.
        after_C: Index of the use that must be over before the copy may land, int32, or -1 if the buffer is free from the start.

    Gradient returns are not listed here. The gradient of a replica is sent home after the backward pass of its row, over the peer
    or RDMA link between the two ranks, even if the weights came from the host store.
    """

    micro_step_C: Array = array(np.int32)
    layer_C: Array = array(np.int16)
    phase_C: Array = array(np.uint8)
    expert_C: Array = array(np.int16)
    src_C: Array = array(np.int16)
    dst_C: Array = array(np.int16)
    slot_C: Array = array(np.int16)
    link_C: Array = array(np.uint8)
    buffer_C: Array = array(np.int32)
    need_C: Array = array(np.int32)
    after_C: Array = array(np.int32)

    def __repr__(self) -> str:
        by_link = ", ".join(f"{(self.link_C == link).sum()} {link.name.lower()}" for link in Link)
        return f"TransferList({len(self)} copies: {by_link})"

    def __len__(self) -> int:
        return len(self.need_C)

    @staticmethod
    def none() -> TransferList:
        """Returns an empty list."""
        return TransferList(**{name: np.zeros(0) for name in TransferList.array_fields()})

    def replace(self, **arrays: Array) -> TransferList:
        """Returns the same copies with some columns replaced."""
        return dataclasses.replace(self, **arrays)


def derive_transfers(
    expert_NGS: Array, quota_NGS: Array, home_LE: Array, *, schedule: Schedule, slot_depth: int, node_of_rank_G: Array
) -> TransferList:  # fmt: skip
    """Derives the copies that every use needs. There are as few copies as buffers with least-recently-used order allow.

    An expert that is still in a buffer is not sent again, because weights do not change within a plan. Only redundant slots with
    a quota need weights. All weights come from the home rank. `home_LE` has home slots, as in a plan.
    """
    L, E = home_LE.shape
    _, G, S = expert_NGS.shape
    base = E // G
    uses = schedule.uses(L)
    row_U = uses.micro_step_U.astype(np.int64) * L + uses.layer_U
    needed_NGR = np.where(quota_NGS[:, :, base:] > 0, expert_NGS[:, :, base:], np.int16(-1))
    demand = _Demand(row_U, uses.layer_U, uses.use_U, needed_NGR, (S - base) * slot_depth, E)
    out = np.empty((len(row_U) * G * (S - base), 6), np.int32)
    num = _derive(demand, out) if base < S else 0
    found = out[:num].T.copy()  # makes columns contiguous, because each is read by itself
    order_C = order_of(*found[:3])  # use, rank and slot
    use, dst, slot, expert, buffer, after = (column[order_C] for column in found)
    layer_C = uses.layer_U[use]
    src_C = home_LE[layer_C, expert] // base
    return TransferList(
        micro_step_C=uses.micro_step_U[use], layer_C=layer_C, phase_C=uses.phase_U[use], expert_C=expert, src_C=src_C, dst_C=dst,
        slot_C=slot + base, link_C=np.where(node_of_rank_G[src_C] == node_of_rank_G[dst], Link.PEER, Link.RDMA),
        buffer_C=buffer, need_C=uses.use_U[use], after_C=after,
    )  # fmt: skip


class _Demand(NamedTuple):
    """Demands of all uses: the experts of redundant slots, where -1 is no expert, and the number of buffers."""

    row_U: Array
    layer_U: Array
    use_U: Array
    needed_NGR: Array
    num_buffers: int
    num_experts: int


@kernel
def _derive(demand, out):
    """Assigns buffers to each rank's uses, in order. Writes (position of use, dst, slot, expert, buffer, after)."""
    row_U, layer_U, use_U, needed_NGR, num_buffers, num_experts = demand
    _, G, R = needed_NGR.shape
    held = np.empty(num_buffers, np.int64)  # layer * E + expert in each buffer, or -1
    last = np.empty(num_buffers, np.int64)  # position of the last use that read it, or -1
    num = 0
    for g in range(G):
        held[:] = -1
        last[:] = -1
        for u in range(row_U.size):
            offset = np.int64(layer_U[u]) * num_experts
            for r in range(R):
                e = needed_NGR[row_U[u], g, r]
                if e >= 0:
                    for b in range(num_buffers):
                        if held[b] == offset + e:
                            last[b] = u
            for r in range(R):
                e = needed_NGR[row_U[u], g, r]
                if e < 0:
                    continue
                found, victim = False, -1
                for b in range(num_buffers):
                    if held[b] == offset + e:
                        found = True
                        break
                    # An empty buffer is taken first. Buffers that this use itself reads are kept.
                    if last[b] < u and (victim < 0 or last[b] < last[victim]):
                        victim = b
                if found:
                    continue
                out[num, 0] = u
                out[num, 1] = g
                out[num, 2] = r
                out[num, 3] = e
                out[num, 4] = victim
                out[num, 5] = use_U[last[victim]] if last[victim] >= 0 else -1
                held[victim] = offset + e
                last[victim] = u
                num += 1
    return num
