"""Programme: the part of a plan that one rank runs, as sequences of copies, uses and gradient returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array, order_of
from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.plan.replicas import Replicas
from foremoe.plan.rounds import rounds_of
from foremoe.plan.transfers import TransferList
from foremoe.problem.schedule import Phase, Uses

# Letters: U uses (a layer in a pass) in order of execution, C copies of the whole plan, M, L, G, E, S as in Plan.


class Return(NamedTuple):
    """The return of a replica's gradient to its home after the backward pass of a row. Its key is larger than any key of a copy.

    `turn` is the number of gradients of the same row that the home receives before this one. Both ranks use it to determine which
    gradients are staged at the home.
    """

    key: int
    layer: int
    expert: int
    src_rank: int
    dst_rank: int
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Programme:
    """The part of a plan that one rank runs.

    The source and the destination of a copy start it at the same position (see `start_positions`). Copies that start at one
    position are ordered by need, then by `rounds_of`. All ranks thus have the same order of batches, (position, need). Ranks that
    wait for each other in this order cannot deadlock.
    """

    uses: list[tuple[int, int, int]]  # (micro-step, layer, phase) of `Schedule.uses`, by position
    pass_U: list[int]
    need_C: Array  # position of the use that needs each copy
    start_C: Array  # position at which each copy starts
    home_C: Array  # home rank of each copy's expert
    starts: dict[int, list[int]]  # position -> copies that start there and of which this rank is the home or the destination
    arrivals: dict[int, list[int]]  # position -> copies to this rank that the use needs
    frees: dict[int, list[int]]  # position -> buffers of this rank that are not needed after it, until a copy arrives in them
    returns: dict[int, list[Return]]  # position -> gradients that leave or reach this rank after it

    @staticmethod
    def of(plan: Plan, rank: int, prefetch: int, transfers: TransferList | None = None) -> Programme:
        """Returns the part of the plan that `rank` runs. Copies start at most `prefetch` positions before they are needed.

        The plan must keep homes. `transfers` replaces the plan's copies if they have other links.
        """
        t = plan.transfers if transfers is None else transfers
        uses = plan.header.schedule.uses(plan.L)
        columns = uses.micro_step_U, uses.layer_U, uses.phase_U
        triples: list[tuple[int, int, int]] = list(zip(*(column_U.tolist() for column_U in columns), strict=True))
        need_C, home_C = t.need_C.astype(np.int64), plan.home_LE[t.layer_C, t.expert_C].astype(np.int64) // plan.B
        start_C = start_positions(t, prefetch)
        # The home takes part even in copies from the host store, because they come from home if the store fails.
        mine_C = np.flatnonzero((t.dst_C == rank) | (home_C == rank))
        here_C = np.flatnonzero(t.dst_C == rank)
        round_C = rounds_of(need_C, t.slot_C, t.src_C, t.dst_C, plan.header.cluster)
        in_order = mine_C[order_of(need_C[mine_C], round_C[mine_C])]
        freed_C = here_C[t.after_C[here_C] >= 0]
        return Programme(
            uses=triples, pass_U=uses.pass_U.tolist(), need_C=need_C, start_C=start_C, home_C=home_C,
            starts=_group(start_C[in_order], in_order), arrivals=_group(need_C[here_C], here_C),
            frees=_group(t.after_C[freed_C], t.buffer_C[freed_C]), returns=_returns(plan, rank, uses),
        )  # fmt: skip

    def require_turn(self, due: int, micro_step: int, layer: int, phase: int) -> None:
        """Raises InputError unless the given use is the use at position `due`."""
        use = (micro_step, layer, int(phase))
        if self.uses[due : due + 1] != [use]:
            text = use_text(*self.uses[due]) if due < len(self.uses) else "nothing; all uses were run"
            known = "" if use in self.uses else ", which the plan does not have"
            raise InputError(f"the plan's schedule has {text} next; got {use_text(micro_step, layer, phase)}{known}.")


def use_text(micro_step: int, layer: int, phase: int) -> str:
    """Returns a description of a use in words."""
    return f"{Phase(phase).name.lower()} of micro-step {micro_step}, layer {layer}"


def start_positions(t: TransferList, prefetch: int, late_C: Array | None = None) -> Array:
    """Returns int64 [C], the use at whose beginning each copy starts.

    A copy starts after the use that must be over on the destination, and at most `prefetch` positions before the use that needs
    the copy. The copies of `late_C` start only in the use that needs them.
    """
    need_C = t.need_C.astype(np.int64)
    start_C = np.maximum(t.after_C.astype(np.int64) + 1, need_C - prefetch).clip(0)
    if late_C is not None:
        start_C[late_C] = need_C[late_C]
    return start_C


def _group(key_C: Array, value_C: Array) -> dict[int, list[int]]:
    """Returns the values of each key in the given order."""
    groups: dict[int, list[int]] = {}
    for key, value in zip(key_C.tolist(), value_C.tolist(), strict=True):
        groups.setdefault(key, []).append(value)
    return groups


def _returns(plan: Plan, rank: int, uses: Uses) -> dict[int, list[Return]]:
    """Returns position -> the gradient returns of `rank`, ordered by expert, then by the rank of the replica."""
    if not plan.header.schedule.trains:
        return {}
    replicas, u_N, backward_U = Replicas.of(plan), np.full(plan.N, -1), uses.phase_U == Phase.BACKWARD
    row_U = uses.micro_step_U.astype(np.int64) * plan.L + uses.layer_U
    u_N[row_U[backward_U]] = uses.use_U[backward_U]
    u_Z = u_N[replicas.row_Z]
    order_Z = order_of(u_Z, replicas.expert_Z, replicas.rank_Z)
    order_Z = order_Z[u_Z[order_Z] >= 0]
    at_I = np.flatnonzero((replicas.rank_Z[order_Z] == rank) | (replicas.home_Z[order_Z] == rank))
    mine_I = order_Z[at_I]
    turn_Z = _turns(u_Z, replicas.home_Z, order_Z)
    columns = replicas.row_Z % plan.L, replicas.expert_Z, replicas.rank_Z, replicas.home_Z, turn_Z
    rows = (at_I + len(plan.transfers)).tolist(), *(column_Z[mine_I].tolist() for column_Z in columns)
    returns: dict[int, list[Return]] = {}
    for u, *row in zip(u_Z[mine_I].tolist(), *rows, strict=True):
        returns.setdefault(u, []).append(Return(*row))
    return returns


def _turns(u_Z: Array, home_Z: Array, order_Z: Array) -> Array:
    """Returns int64 [Z], the number of earlier gradients of the same use to the same home, in `order_Z`."""
    key_I = u_Z[order_Z] * (home_Z.max(initial=0) + 1) + home_Z[order_Z]
    by_key_I = np.argsort(key_I, kind="stable")
    sorted_I = key_I[by_key_I]
    turn_Z = np.zeros(len(u_Z), np.int64)
    turn_Z[order_Z[by_key_I]] = np.arange(len(key_I)) - np.searchsorted(sorted_I, sorted_I)
    return turn_Z
