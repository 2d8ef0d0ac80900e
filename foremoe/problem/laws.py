"""Laws of placements. Each check is vectorised and returns the violations, with the indices and numbers of each one."""

from collections.abc import Callable

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import PlanError
from foremoe.problem.placement import Placement, Stop, repeated
from foremoe.problem.problem import Problem

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts, B base slots, S slots.

SHOWN_PER_LAW = 4  # a broken plan is usually broken everywhere, so a few places are enough


class Violations:
    """A list of violations. The method `mask` adds a violation for each of the first few true entries of a mask."""

    def __init__(self, num_layers: int) -> None:
        self.errors: list[PlanError] = []
        self.num_layers = num_layers

    def add(self, law: str, message: str, where: str = "") -> None:
        self.errors.append(PlanError(law, where, message))

    def mask(self, law: str, mask: Array, axes: str, message: Callable[[tuple[int, ...]], str]) -> None:
        """Adds violations for true entries of `mask`. `axes` has a letter for each axis, first N (a row) or C (a copy)."""
        if not mask.any():  # much faster than searching for places
            return
        places = np.argwhere(mask)
        for place in places[:SHOWN_PER_LAW]:
            index = tuple(int(i) for i in place)
            words = []
            for letter, i in zip(axes, index, strict=True):
                if letter == "N":
                    words.append(f"micro-step {i // self.num_layers}, layer {i % self.num_layers}")
                else:
                    words.append(f"{ {'G': 'rank', 'S': 'slot', 'E': 'expert', 'C': 'copy'}[letter] } {i}")
            more = f" ({len(places) - SHOWN_PER_LAW} more places)" if len(places) > SHOWN_PER_LAW else ""
            self.add(law, message(index) + more, ", ".join(words))


def slot_violations(expert_NGS: Array, shape: tuple[int, ...], num_experts: int, num_layers: int) -> list[PlanError]:
    """Returns violations that would make compiled code read out of bounds. Compiled code does not check slots itself."""
    found = Violations(num_layers)
    if not isinstance(expert_NGS, np.ndarray):
        found.add("slots", f"expert_NGS must be an array of integers; got {type(expert_NGS).__name__}.")
    elif expert_NGS.shape != shape or expert_NGS.dtype.kind != "i":
        have = f"expert_NGS is {expert_NGS.dtype} of shape {list(expert_NGS.shape)}"
        found.add("slots", f"{have}; this problem has integers of shape [N, G, S] = {list(shape)}.")
    elif expert_NGS.size and not (expert_NGS.min() >= -1 and expert_NGS.max() < num_experts):
        wrong = (expert_NGS < -1) | (expert_NGS >= num_experts)
        found.mask("canonical", wrong, "NGS", lambda i: f"expert {expert_NGS[i]} does not exist; there are {num_experts}")
    return found.errors


def require_slots(expert_NGS: Array, shape: tuple[int, ...], num_experts: int, num_layers: int) -> None:
    """Raises the first error of `slot_violations`, if there is one."""
    broken = slot_violations(expert_NGS, shape, num_experts, num_layers)
    if broken:
        raise broken[0]


def placement_violations(problem: Problem, placement: Placement, *, keeps_homes: bool = True) -> list[PlanError]:
    """Checks a solver's result against laws 1 and 2, which are about shapes, tokens, homes, slots, canonical form and nodes."""
    found = Violations(problem.L)
    broken = slot_violations(placement.expert_NGS, (problem.N, problem.G, problem.S), problem.E, problem.L)
    if broken:
        return broken
    if placement.quota_NGS is None:
        found.add("tokens", "quota_NGS is missing; a split solver fills it.")
        return found.errors
    check_placement(
        found, placement.expert_NGS, placement.quota_NGS, problem.load_NE, problem.home_LE,
        within_G=problem.cluster.node_of_rank_G if problem.replicas == "node" else None,
        keeps_homes=keeps_homes,
    )  # fmt: skip
    check_stops(found, placement.stop_N)
    if placement.bound_N is not None:
        endless_N = placement.bound_N == np.inf
        found.mask("bound", endless_N, "N", lambda i: "the bound is infinite; give -inf if nothing is proven")
    return found.errors


def check_stops(found: Violations, stop_N: Array | None) -> None:
    """Checks that `stop_N` has a valid `Stop` for every row."""
    if stop_N is not None and stop_N.size and stop_N.max() > max(Stop):
        found.mask("stop", stop_N > max(Stop), "N", lambda i: f"{stop_N[i[0]]} is not a code of Stop")


def check_placement(
    found: Violations, expert_NGS: Array, quota_NGS: Array, load_NE: Array, home_LE: Array, *,
    within_G: Array | None, keeps_homes: bool,
) -> None:  # fmt: skip
    N, G, S = expert_NGS.shape
    L, E = home_LE.shape
    B = E // G
    found.errors += slot_violations(expert_NGS, expert_NGS.shape, E, L)
    node_G = np.zeros(G, np.int32) if within_G is None else within_G
    if not found.errors and laws_hold(expert_NGS, quota_NGS, load_NE, home_LE, node_G, keeps_homes):
        return
    # Searching for the violations takes ten times as long, so it is done only if there are any.
    found.mask("quota", quota_NGS < 0, "NGS", lambda i: f"quota {quota_NGS[i]} is negative")
    if found.errors:
        return
    empty = expert_NGS < 0
    found.mask("quota", empty & (quota_NGS > 0), "NGS", lambda i: f"an empty slot has a quota of {quota_NGS[i]} pairs")
    key_NGS = np.arange(N)[:, None, None] * E + np.where(empty, 0, expert_NGS)
    served_X = np.bincount(key_NGS.ravel(), np.where(empty, 0, quota_NGS).ravel(), minlength=N * E)
    served_NE = served_X.astype(np.int64).reshape(N, E)
    wrong = served_NE != load_NE
    found.mask("tokens", wrong, "NE", lambda i: f"{served_NE[i]} of {load_NE[i]} pairs are served; quotas must sum to the load")
    twice_NG = repeated(expert_NGS)
    found.mask("canonical", twice_NG, "NG", lambda i: f"an expert has two slots on one rank: {expert_NGS[i].tolist()}")
    if not keeps_homes:
        return
    base_LGB = np.argsort(home_LE, axis=1).reshape(L, G, B)
    moved = expert_NGS.reshape(-1, L, G, S)[..., :B] != base_LGB
    found.mask(
        "homes", moved.reshape(N, G, B), "NGS",
        lambda i: f"a base slot holds expert {expert_NGS[i]} instead of its home {base_LGB[i[0] % L, i[1], i[2]]}",
    )  # fmt: skip
    replica_NGR = expert_NGS[:, :, B:]
    filled = replica_NGR >= 0
    home_NGR = (home_LE // B)[np.arange(N)[:, None, None] % L, np.where(filled, replica_NGR, 0)]

    def of_slot(verb: str, fault: str) -> Callable[[tuple[int, ...]], str]:
        return lambda i: f"redundant slot {i[2] + B} {verb} expert {replica_NGR[i]} {fault}"

    at_home = filled & (home_NGR == np.arange(G)[:, None])
    found.mask("canonical", at_home, "NGS", of_slot("copies", "onto its own home rank"))
    found.mask("canonical", filled & (quota_NGS[:, :, B:] == 0), "NGS", of_slot("holds", "without a quota"))
    if within_G is not None:
        far = filled & (within_G[home_NGR] != within_G[None, :, None])
        found.mask("node", far, "NGS", lambda i: f"expert {replica_NGR[i]} is copied across nodes, but replicas='node'")


@kernel
def laws_hold(expert_NGS, quota_NGS, load_NE, home_LE, node_G, keeps_homes):
    """Returns True if `check_placement` finds nothing. Reads every slot once. A replica must be in the `node_G` of its home."""
    N, G, S = expert_NGS.shape
    L, E = home_LE.shape
    B = E // G
    served_E, seen_E = np.empty(E, np.int64), np.full(E, -1, np.int64)
    for n in range(N):
        home_E = home_LE[n % L]
        served_E[:] = 0
        for g in range(G):
            for s in range(S):
                e, quota = np.int64(expert_NGS[n, g, s]), np.int64(quota_NGS[n, g, s])
                if keeps_homes and s < B and (e < 0 or home_E[e] != g * B + s):
                    return False
                if e < 0:
                    if quota != 0:
                        return False
                    continue
                if quota < 0 or seen_E[e] == n * G + g:
                    return False
                seen_E[e] = n * G + g
                served_E[e] += quota
                if keeps_homes and s >= B:
                    home = home_E[e] // B
                    if home == g or node_G[home] != node_G[g] or quota == 0:
                        return False
        for e in range(E):
            if served_E[e] != load_NE[n, e]:
                return False
    return True
