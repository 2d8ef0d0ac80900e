"""Conversion of a plan's placement to the arrays of EPLB, which serving engines can load."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError

if TYPE_CHECKING:
    from foremoe.plan.plan import Plan

# Letters: M micro-steps, L layers, G ranks, S slots of a rank, P = G*S physical experts, E logical experts, X most copies of one.


class EplbMaps(NamedTuple):
    """A placement as EPLB's ``rebalance_experts`` returns it. For a single layer, arrays have no first axis.

    Attributes:
        phy2log: Logical expert in every physical slot, int64 [L, P]. Slot ``g*S + s`` is on rank g.
        log2phy: Physical experts of every logical expert in ascending order, int64 [L, E, X], padded with -1.
        logcnt: Number of physical experts of every logical expert, int64 [L, E], at least 1.
    """

    phy2log: Array
    log2phy: Array
    logcnt: Array


def eplb_maps(plan: Plan, layer: int | None, micro_step: int | None) -> EplbMaps:
    """Returns the arrays of EPLB for a plan, as described in `Plan.to_eplb`."""
    for name, value, length in (("layer", layer, plan.L), ("micro_step", micro_step, plan.M)):
        if value is not None and value not in range(length):
            raise InputError(f"{name}={value} does not exist; the plan has {length}.")
    if micro_step is None and (plan.expert_MLGS != plan.expert_MLGS[:1]).any():
        raise InputError(f"the placement differs between the plan's {plan.M} micro-steps; choose one with micro_step=.")
    expert_LGS = plan.expert_MLGS[micro_step or 0].astype(np.int64)
    phy2log = np.stack([_filled(expert_GS, plan.E).reshape(-1) for expert_GS in expert_LGS])
    logcnt = np.stack([np.bincount(row_P, minlength=plan.E) for row_P in phy2log])
    log2phy = np.full((plan.L, plan.E, logcnt.max()), -1, np.int64)
    for row_P, row_EX in zip(phy2log, log2phy, strict=True):
        for e in range(plan.E):
            places = np.flatnonzero(row_P == e)
            row_EX[e, : len(places)] = places
    if layer is None:
        return EplbMaps(phy2log, log2phy, logcnt)
    return EplbMaps(phy2log[layer], log2phy[layer, :, : logcnt[layer].max()], logcnt[layer])


def _filled(expert_GS: Array, num_experts: int) -> Array:
    """Returns the placement with an expert in every slot.

    An empty slot gets another copy of the rank's own expert that has the fewest copies on other ranks. If that expert is on no
    other rank, an even split then leaves the loads of all ranks unchanged.
    """
    filled_GS = expert_GS.copy()
    count_E = np.bincount(expert_GS[expert_GS >= 0], minlength=num_experts)
    for expert_S in filled_GS:
        for s in np.flatnonzero(expert_S < 0):
            here_E = np.bincount(expert_S[expert_S >= 0], minlength=num_experts)
            among = np.flatnonzero(here_E) if here_E.any() else np.arange(num_experts)
            expert_S[s] = min(among, key=lambda e: (count_E[e] - here_E[e], here_E[e]))
            count_E[expert_S[s]] += 1
    return filled_GS
