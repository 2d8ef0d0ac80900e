"""Ways to break a valid plan: one change each, and the law that must name it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import assume, note
from hypothesis import strategies as st

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import plan_of, random_placement
from foremoe.testing.strategies import problems

# Letters: M micro-steps, L layers, N rows, G ranks, E experts, B base slots, S slots, C copies.

# Sizes at which most problems really have copies.
COPYING: dict[str, Any] = {"min_ranks": 2, "max_ranks": 4, "max_base": 2, "min_redundant": 1, "max_redundant": 2, "max_pairs": 8}


@st.composite
def copying_plans(draw: st.DrawFn, *, density: float = 1.0, **options: Any) -> tuple[Problem, Plan]:
    """A problem and a plan of it that copies and overwrites: redundant slots are filled with chance `density`."""
    usual = {"min_micro_steps": 2, "min_layers": 2, "row_kinds": ("flat", "skewed"), "replicas": ("any",)}
    problem = draw(problems(**{**COPYING, **usual, **options}))
    note(describe(problem))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    plan = plan_of(problem, random_placement(problem, rng, density=density, evenness=20.0)).rederived()
    assume(len(plan.transfers) > 0)
    return problem, plan


@st.composite
def mutated(draw: st.DrawFn, transfers: TransferList) -> TransferList:
    """One change to one copy: a column, its loss, its doubling, or a buffer traded with another copy."""
    c, other = (draw(st.integers(0, len(transfers) - 1)) for _ in range(2))
    kind = draw(st.sampled_from(["column", "column", "column", "remove", "twice", "trade"]))
    if kind == "remove":
        return transfers.cut(C=np.arange(len(transfers)) != c)
    if kind == "twice":
        return transfers.cut(C=np.sort(np.append(np.arange(len(transfers)), c)))
    if kind == "trade":
        buffer_C = transfers.buffer_C.copy()
        buffer_C[[c, other]] = buffer_C[[other, c]]
        return transfers.replace(buffer_C=buffer_C)
    name = draw(st.sampled_from([*TransferList.array_fields(), "after_C", "after_C", "buffer_C", "need_C"]))
    column_C = getattr(transfers, name).copy()
    lowest = 0 if name in ("phase_C", "link_C") else -1
    near = max(lowest, int(column_C[c]) + draw(st.sampled_from([-3, -2, -1, 1, 2, 3])))
    column_C[c] = draw(st.sampled_from([near, int(column_C[other])]))
    return transfers.replace(**{name: column_C})


class Breaker:
    """One plan to break: finds places at random and skips the example where there is none."""

    def __init__(self, problem: Problem, plan: Plan, rng: np.random.Generator) -> None:
        self.problem, self.plan, self.rng = problem, plan, rng
        self.expert, self.quota = plan.expert_MLGS.copy(), plan.quota_MLGS.copy()

    def place(self, mask: Array) -> tuple[int, ...]:
        """A random true place of `mask`."""
        places = np.argwhere(mask)
        assume(len(places) > 0)
        return tuple(int(i) for i in places[self.rng.integers(len(places))])

    def placed(self) -> Plan:
        """The plan with the changed slots. Its bounds are lowered to zero, which proves nothing optimal: other loads may reach
        less, and bounds are a law of their own."""
        zero = np.zeros_like(self.plan.bound_ML)
        slots = {"expert_MLGS": self.expert, "quota_MLGS": self.quota}
        return dataclasses.replace(self.plan, **slots, bound_ML=zero, load_bound_ML=zero, stop_ML=np.zeros_like(zero, np.uint8))

    def take_over(self, allowed: Callable[[int, int, int], bool], share: float = 0.5) -> Plan:
        """Puts into some empty redundant slot an expert that ``allowed(layer, rank, expert)``, with a share of another slot's
        quota of it."""
        B, redundant = self.plan.B, np.arange(self.plan.S) >= self.plan.B
        m, layer, g, s = self.place((self.expert < 0) & redundant)
        base = self.expert[m, layer, :, :B]
        ok = np.vectorize(lambda e: allowed(layer, g, int(e)))(base)
        home, b = self.place(ok & (self.quota[m, layer, :, :B] >= 2))
        moved = int(self.quota[m, layer, home, b] * share)
        self.expert[m, layer, g, s], self.quota[m, layer, g, s] = base[home, b], moved
        self.quota[m, layer, home, b] -= moved
        return self.placed()

    def copy_column(self, name: str, c: int, value: int) -> Plan:
        """The plan with one entry of one column of its transfers changed."""
        column_C = getattr(self.plan.transfers, name).copy()
        column_C[c] = value
        return dataclasses.replace(self.plan, transfers=self.plan.transfers.replace(**{name: column_C}))

    def sent_by(self, c: int, src: int) -> Plan:
        """The plan with one copy from another rank."""
        t = self.plan.transfers
        src_C, link_C = t.src_C.copy(), t.link_C.copy()
        src_C[c], link_C[c] = src, Link.PEER
        return dataclasses.replace(self.plan, transfers=t.replace(src_C=src_C, link_C=link_C))

    def any_copy(self) -> int:
        return int(self.rng.integers(len(self.plan.transfers)))

    def node(self, rank: int) -> int:
        return int(self.problem.cluster.node_of_rank_G[rank])

    def home(self, layer: int, expert: int) -> int:
        return int(self.plan.home_LE[layer, expert]) // self.plan.B

    def on_rank(self, m: int, layer: int, rank: int, expert: int) -> bool:
        return bool((self.expert[m, layer, rank] == expert).any())


# Laws 1 and 2: tokens, quotas, homes, slots.


def quota_one_too_many(b: Breaker) -> Plan:
    b.quota[b.place(b.quota > 0)] += 1
    return b.placed()


def token_lost(b: Breaker) -> Plan:
    b.quota[b.place((b.quota > 0) & (np.arange(b.plan.S) < b.plan.B))] -= 1
    return b.placed()


def negative_quota(b: Breaker) -> Plan:
    b.quota[b.place(b.quota >= 0)] = -1
    return b.placed()


def empty_slot_with_quota(b: Breaker) -> Plan:
    b.quota[b.place(b.expert < 0)] = 1
    return b.placed()


def home_moved(b: Breaker) -> Plan:
    m, layer = (int(b.rng.integers(n)) for n in (b.plan.M, b.plan.L))
    base = b.expert[m, layer, :, : b.plan.B]
    pairs = [
        (one, two)
        for one in np.ndindex(*base.shape)
        for two in np.ndindex(*base.shape)
        if one[0] < two[0] and not b.on_rank(m, layer, two[0], base[one]) and not b.on_rank(m, layer, one[0], base[two])
    ]
    assume(pairs)
    one, two = pairs[b.rng.integers(len(pairs))]
    for array in (b.expert[m, layer], b.quota[m, layer]):
        array[one], array[two] = array[two], array[one]
    return b.placed()


def homes_no_permutation(b: Breaker) -> Plan:
    home_LE = b.plan.home_LE.copy()
    home_LE[0, 0] = home_LE[0, 1]
    return dataclasses.replace(b.plan, home_LE=home_LE)


def replica_on_its_home_rank(b: Breaker) -> Plan:
    return b.take_over(lambda layer, g, e: b.home(layer, e) == g)


def twice_on_a_rank(b: Breaker) -> Plan:
    redundant = np.arange(b.plan.S) >= b.plan.B
    has_room = ((b.expert < 0) & redundant).any(axis=3, keepdims=True)
    m, layer, g, s = b.place(redundant & has_room & (b.quota >= 2))
    (free,) = b.place((b.expert[m, layer, g] < 0) & redundant)
    b.expert[m, layer, g, free], b.quota[m, layer, g, free] = b.expert[m, layer, g, s], 1
    b.quota[m, layer, g, s] -= 1
    return b.placed()


def replica_without_quota(b: Breaker) -> Plan:
    m, layer, g, s = b.place((b.expert < 0) & (np.arange(b.plan.S) >= b.plan.B))
    (e,) = b.place(np.array([not b.on_rank(m, layer, g, e) for e in range(b.plan.E)]))
    b.expert[m, layer, g, s] = e
    return b.placed()


def unknown_expert(b: Breaker) -> Plan:
    b.expert[b.place(b.expert < 0)] = b.plan.E
    return b.placed()


def replica_across_nodes(b: Breaker) -> Plan:
    return b.take_over(lambda layer, g, e: b.node(b.home(layer, e)) != b.node(g))


# Law 3: residency and buffers.


def copy_missing(b: Breaker) -> Plan:
    kept = np.arange(len(b.plan.transfers)) != b.any_copy()
    return dataclasses.replace(b.plan, transfers=b.plan.transfers.cut(C=kept))


def weights_from_another_rank(b: Breaker) -> Plan:
    c = b.any_copy()
    return b.sent_by(c, b.rng.choice(strangers(b.plan, c)))


def weights_from_a_rank_that_received_them(b: Breaker) -> Plan:
    """No rank passes on what it has received, even if it holds it by then."""
    t = b.plan.transfers
    same = (t.layer_C[:, None] == t.layer_C) & (t.expert_C[:, None] == t.expert_C) & (t.need_C[:, None] >= t.need_C)
    c, before = b.place(same & (t.dst_C[:, None] != t.dst_C))
    return b.sent_by(c, t.dst_C[before])


def strangers(plan: Plan, c: int) -> list[int]:
    """Ranks that a copy's weights cannot come from: all but the home."""
    home = int(plan.home_LE[plan.transfers.layer_C[c], plan.transfers.expert_C[c]]) // plan.B
    return sorted({*range(plan.G)} - {home})


def needed_by_another_use(b: Breaker) -> Plan:
    c = b.any_copy()
    return b.copy_column("need_C", c, int(b.plan.transfers.need_C[c]) + 1)


def for_another_micro_step(b: Breaker) -> Plan:
    c = b.any_copy()
    return b.copy_column("micro_step_C", c, (int(b.plan.transfers.micro_step_C[c]) + 1) % b.plan.M)


def into_a_slot_that_holds_another(b: Breaker) -> Plan:
    t = b.plan.transfers
    held = b.plan.expert_MLGS[t.micro_step_C, t.layer_C, t.dst_C]  # [C, S]
    (c, s) = b.place((held != t.expert_C[:, None]) & (np.arange(b.plan.S) >= b.plan.B))
    return b.copy_column("slot_C", c, s)


def into_no_redundant_slot(b: Breaker) -> Plan:
    return b.copy_column("slot_C", b.any_copy(), b.plan.B - 1)


def lands_before_its_buffer_was_used(b: Breaker) -> Plan:
    t = b.plan.transfers
    same = (t.dst_C[:, None] == t.dst_C) & (t.buffer_C[:, None] == t.buffer_C)
    c, _ = b.place(same & (t.need_C[:, None] > t.need_C))
    before = int(t.need_C[same[c] & (t.need_C < t.need_C[c])].max())
    return b.copy_column("after_C", c, before - 1)


def lands_after_its_use(b: Breaker) -> Plan:
    c = b.any_copy()
    return b.copy_column("after_C", c, int(b.plan.transfers.need_C[c]))


def buffer_does_not_exist(b: Breaker) -> Plan:
    return b.copy_column("buffer_C", b.any_copy(), int(b.rng.choice([-1, b.plan.header.num_buffers])))


def two_copies_into_one_buffer(b: Breaker) -> Plan:
    t = b.plan.transfers
    one, two = b.place(np.triu((t.dst_C[:, None] == t.dst_C) & (t.need_C[:, None] == t.need_C), 1))
    return b.copy_column("buffer_C", two, int(t.buffer_C[one]))


# Header, bounds.


def schedule_of_another_length(b: Breaker) -> Plan:
    header = dataclasses.replace(b.plan.header, schedule=Schedule.accumulate(b.plan.M + 1))
    return dataclasses.replace(b.plan, header=header)


def bound_above_the_objective(b: Breaker) -> Plan:
    bound_ML = b.plan.bound_ML.copy()
    m, layer = b.place(bound_ML >= 0)
    bound_ML[m, layer] = b.plan.objective_ML[m, layer] * 1.001 + 1e-9
    return dataclasses.replace(b.plan, bound_ML=bound_ML)


def load_bound_above_the_load(b: Breaker) -> Plan:
    load_bound_ML = b.plan.load_bound_ML.copy()
    m, layer = b.place(load_bound_ML >= 0)
    load_bound_ML[m, layer] = b.plan.load_NG[m * b.plan.L + layer].max() + 1
    return dataclasses.replace(b.plan, load_bound_ML=load_bound_ML)


BREAKS: dict[Callable[[Breaker], Plan], str] = {
    quota_one_too_many: "tokens", token_lost: "tokens", negative_quota: "quota", empty_slot_with_quota: "quota",
    home_moved: "homes", homes_no_permutation: "homes", replica_on_its_home_rank: "canonical", twice_on_a_rank: "canonical",
    replica_without_quota: "canonical", unknown_expert: "canonical", replica_across_nodes: "node", copy_missing: "residency",
    weights_from_another_rank: "residency", weights_from_a_rank_that_received_them: "residency",
    needed_by_another_use: "residency", for_another_micro_step: "residency", into_a_slot_that_holds_another: "residency",
    into_no_redundant_slot: "residency", lands_before_its_buffer_was_used: "buffers", lands_after_its_use: "buffers",
    buffer_does_not_exist: "buffers", two_copies_into_one_buffer: "buffers",
    schedule_of_another_length: "header", bound_above_the_objective: "bound",
    load_bound_above_the_load: "bound",
}  # fmt: skip
