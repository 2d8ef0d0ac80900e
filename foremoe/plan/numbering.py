"""Checks that the numbers in a plan's arrays refer to something that exists, before they are used as indices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foremoe.base.arrays import Array, ArrayField
from foremoe.base.budget import require_budget
from foremoe.base.errors import InputError
from foremoe.plan.transfers import Link
from foremoe.problem.placement import Stop
from foremoe.problem.schedule import Phase

if TYPE_CHECKING:
    from foremoe.plan.plan import Plan

# Letters: M micro-steps, L layers, G ranks, E experts, S slots, C copies.


def require_dtypes(fields: Mapping[str, ArrayField], arrays: Mapping[str, Array], prefix: str = "") -> None:
    """Raises InputError if an array from a file does not have the dtype of its field."""
    for name, array in arrays.items():
        if array.dtype != fields[name].dtype:
            raise InputError(f"{prefix}{name} must be {fields[name].dtype}; got {array.dtype}.")


def require_numbered(plan: Plan) -> None:
    """Raises InputError if sizes of a plan disagree, or if its arrays name experts, ranks, layers or codes that do not exist.

    The laws of the plan find all other errors (``Plan.check``).
    """
    head, t = plan.header, plan.transfers
    M, L, G, S, E = plan.M, plan.L, plan.G, plan.S, plan.E
    for what, told, held in (
        ("experts of the model", head.model.num_experts, E), ("ranks of the cluster", head.cluster.num_ranks, G),
        ("slots per rank", E // max(G, 1) + head.redundant, S), ("micro-steps of the schedule", head.schedule.M, M),
        ("layer numbers", len(head.moe_layer_L), L),
    ):  # fmt: skip
        if told != held:
            raise InputError(f"the header says {told} {what}, the arrays {held}; write the plan again.")
    head.schedule.chunks(L)
    if 0 in (M, L, G, S, E):
        raise InputError(f"an axis of [M, L, G, S, E] = {[M, L, G, S, E]} is empty; write the plan again.")
    # The laws are checked with tables of the experts on each rank and of the contents of each buffer.
    tables = {f"tables of {L} layers x {E} experts x {G} ranks": 4 * L * E * G}
    tables[f"tables of {G} ranks and {head.num_buffers} buffers"] = 8 * G * head.num_buffers
    for what, num_bytes in tables.items():
        require_budget(num_bytes, what, "the plan's sizes are not those of a model", plan.num_bytes)
    ranges: tuple[tuple[str, Array, int, int], ...] = (
        ("home_LE", plan.home_LE, 0, E), ("expert_MLGS", plan.expert_MLGS, -1, E),
        ("stop_ML", plan.stop_ML, 0, len(Stop)), ("moe_layer_L", head.moe_layer_L, 0, 2**31),
        ("transfers.micro_step_C", t.micro_step_C, 0, M), ("transfers.layer_C", t.layer_C, 0, L),
        ("transfers.phase_C", t.phase_C, 0, len(Phase)), ("transfers.expert_C", t.expert_C, 0, E),
        ("transfers.src_C", t.src_C, -1, G), ("transfers.dst_C", t.dst_C, 0, G), ("transfers.slot_C", t.slot_C, 0, S),
        ("transfers.link_C", t.link_C, 0, len(Link)),
    )  # fmt: skip
    for name, array, low, end in ranges:
        if array.size and not low <= array.min() <= array.max() < end:
            found = f"{array.min()} to {array.max()}"
            raise InputError(f"{name} must hold numbers from {low} to {end - 1}; got {found}.")
