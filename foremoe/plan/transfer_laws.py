"""Laws of a plan's copies, with checks as in `laws`. Most checks are vectorised, and the remaining ones use `Replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foremoe.plan.replay import GONE, MISSING, Replay
from foremoe.plan.transfers import Link
from foremoe.problem.laws import SHOWN_PER_LAW, Violations
from foremoe.problem.schedule import Uses

if TYPE_CHECKING:
    from foremoe.plan.plan import Plan

# Letters: L layers, G ranks, R redundant slots, C copies, U uses.


def check_transfers(found: Violations, plan: Plan, uses: Uses) -> None:
    """Checks law 3, which says that the copies give every use its weights and that no copy lands in a buffer that is in use."""
    _check_ranges(found, plan)
    if not found.errors:
        _check_times(found, plan, uses)
    if found.errors:
        return
    t = plan.transfers
    placed_C = plan.expert_MLGS[t.micro_step_C, t.layer_C, t.dst_C, t.slot_C] == t.expert_C
    lack = "where the plan does not place expert"
    found.mask("residency", ~placed_C, "C", lambda i: f"fills slot {t.slot_C[i]}, {lack} {t.expert_C[i]}")
    if not found.errors:
        _check_order(found, plan)
    if found.errors:
        return
    replay = Replay.of(plan, uses)
    found.mask(
        "buffers", replay.early_C, "C",
        lambda i: f"buffer {t.buffer_C[i]} of rank {t.dst_C[i]} is overwritten while use {t.need_C[i]} still reads it",
    )  # fmt: skip
    _check_readers(found, plan, uses, replay)


def _check_ranges(found: Violations, plan: Plan) -> None:
    """Checks that every column of a copy refers to existing things."""
    t, R = plan.transfers, plan.header.redundant
    inside = (t.layer_C >= 0) & (t.layer_C < plan.L) & (t.expert_C >= 0) & (t.expert_C < plan.E)
    inside &= (t.dst_C >= 0) & (t.dst_C < plan.G) & (t.slot_C >= plan.B) & (t.slot_C < plan.B + R)
    found.mask("residency", ~inside, "C", lambda i: f"layer, expert, rank or slot out of range (slot {t.slot_C[i]})")
    found.mask("residency", t.link_C > max(Link), "C", lambda i: f"{t.link_C[i]} is not a code of Link")
    if found.errors:
        return
    num_buffers = plan.header.num_buffers
    outside_C = (t.buffer_C < 0) | (t.buffer_C >= num_buffers)
    found.mask("buffers", outside_C, "C", lambda i: f"buffer {t.buffer_C[i]} is outside this rank's 0 to {num_buffers - 1}")
    home_C = plan.home_LE[t.layer_C, t.expert_C] // plan.B
    found.mask(
        "residency", t.src_C != np.where(t.link_C == Link.HOST, -1, home_C), "C",
        lambda i: f"expert {t.expert_C[i]} comes from {t.src_C[i]}, neither its home {home_C[i]} nor -1 for the host store",
    )  # fmt: skip
    node_G = plan.header.cluster.node_of_rank_G
    wrong_C = (t.src_C == home_C) & ((t.link_C == Link.RDMA) != (node_G[home_C] != node_G[t.dst_C]))
    found.mask(
        "residency", wrong_C, "C",
        lambda i: f"rank {t.src_C[i]} sends it over {Link(int(t.link_C[i])).name}, which does not lead to rank {t.dst_C[i]}",
    )  # fmt: skip
    if plan.header.cluster.host_bytes_per_s == 0:
        lost = "comes from a host store, but the cluster has none"
        found.mask("residency", t.link_C == Link.HOST, "C", lambda i: f"expert {t.expert_C[i]} {lost}")


def _check_times(found: Violations, plan: Plan, uses: Uses) -> None:
    """Checks that every copy is needed by a use of its layer, phase and micro-step, and may land before it."""
    t = plan.transfers
    late_C = (t.after_C >= t.need_C) | (t.after_C < -1)
    found.mask("buffers", late_C, "C", lambda i: f"may land after use {t.after_C[i]} but is needed at {t.need_C[i]}")
    at_C = np.minimum(np.searchsorted(uses.use_U, t.need_C), len(uses.use_U) - 1)
    right = (uses.use_U[at_C] == t.need_C) & (uses.layer_U[at_C] == t.layer_C) & (uses.phase_U[at_C] == t.phase_C)
    right &= uses.micro_step_U[at_C] == t.micro_step_C
    found.mask("residency", ~right, "C", lambda i: f"need {t.need_C[i]} is not a use of its layer, phase and micro-step")


def _check_order(found: Violations, plan: Plan) -> None:
    """Checks that copies are sorted by need (use, then rank, then slot), without duplicates."""
    t = plan.transfers
    key_C = (t.need_C.astype(np.int64) * plan.G + t.dst_C) * plan.S + t.slot_C
    behind_C = np.append(False, key_C[1:] <= key_C[:-1])[: len(t)]
    found.mask("order", behind_C, "C", lambda i: f"follows a copy for the same or a later use, rank or slot ({t.need_C[i]})")


def _check_readers(found: Violations, plan: Plan, uses: Uses, replay: Replay) -> None:
    """Checks that every slot that serves has its expert when it is read."""
    for state, text in ((MISSING, "was never copied there"), (GONE, "has been overwritten by then")):
        places = np.argwhere(replay.read_UGR == state)
        more = f"({len(places)} uses in all)"
        for u, g, r in places[:SHOWN_PER_LAW].tolist():
            m, layer = int(uses.micro_step_U[u]), int(uses.layer_U[u])
            where = f"use {u} (layer {layer}), rank {g}, slot {plan.B + r}"
            found.add("residency", f"expert {plan.expert_MLGS[m, layer, g, plan.B + r]} {text} {more}.", where)
