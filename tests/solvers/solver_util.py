"""What the tests of solvers share: random problems, rows, and what a valid placement is."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from hypothesis import strategies as st

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.laws import placement_violations
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule

BALANCE = CostModel(objective="balance")


def balance(problem):
    """The problem under the objective balance."""
    return dataclasses.replace(problem, cost=BALANCE)


def make_problem(load_MLE, node_G, redundant, *, replicas="any", home_LE=None, num_expert_groups=1):
    load_MLE = np.asarray(load_MLE, np.int32)
    M, L, E = load_MLE.shape
    node_G = np.asarray(node_G, np.int32)
    return Problem(
        model=dataclasses.replace(Model.preset("qwen3-30b-a3b"), num_experts=E, num_topk=1, num_expert_groups=num_expert_groups),
        cluster=dataclasses.replace(Cluster.preset("8xh100", num_ranks=len(node_G)), node_of_rank_G=node_G),
        load_MLE=load_MLE,
        home_LE=np.tile(np.arange(E), (L, 1)) if home_LE is None else home_LE,
        schedule=Schedule.accumulate(M),
        redundant=redundant,
        replicas=replicas,
        moe_layer_L=np.arange(L),
    )


@st.composite
def loads(draw, num_experts, distinct=False):
    """int32 [E]: nothing, few tied values, or a few hot experts among cold ones."""
    if distinct:
        return np.array(draw(st.lists(st.integers(0, 10_000), min_size=num_experts, max_size=num_experts, unique=True)), np.int32)
    kind = draw(st.sampled_from(("zero", "tied", "small", "hot", "huge")))
    top = {"zero": 0, "tied": 2, "small": 20, "hot": 50, "huge": 2**31 - 1}[kind]
    load_E = np.array(draw(st.lists(st.integers(0, top), min_size=num_experts, max_size=num_experts)), np.int64)
    if kind == "hot":
        load_E[draw(st.integers(0, num_experts - 1))] *= 100
    return load_E.astype(np.int32)


@st.composite
def node_maps(draw, num_ranks):
    """int32 [G]: nodes of any size, ranks in any order, nodes of one rank among them."""
    node_G = np.array(draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_ranks, max_size=num_ranks)))
    return np.unique(node_G, return_inverse=True)[1].astype(np.int32)


@st.composite
def problems(draw, distinct=False, **options):
    G, B = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    M, L = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    E = G * B
    load_MLE = np.array([[draw(loads(E, distinct)) for _ in range(L)] for _ in range(M)])
    home_LE = np.array([draw(st.permutations(range(E))) for _ in range(L)])
    node_G, redundant = draw(node_maps(G)), draw(st.integers(1, min(3, E)))
    return make_problem(load_MLE, node_G, redundant, replicas=draw(st.sampled_from(("any", "node"))), home_LE=home_LE, **options)


@st.composite
def placed_rows(draw, max_ranks=5, top=None):
    """``(load_E, expert_GS)``: one row with homes anywhere and random replicas, canonical apart from unused replicas."""
    G, B = draw(st.integers(1, max_ranks)), draw(st.integers(1, 3))
    E = G * B
    R = draw(st.integers(0, min(3, E)))
    load_E = draw(loads(E)) if top is None else np.array(draw(st.lists(st.integers(0, top), min_size=E, max_size=E)), np.int32)
    expert_GS = np.full((G, B + R), -1, np.int16)
    expert_GS[:, :B] = np.array(draw(st.permutations(range(E)))).reshape(G, B)
    for g in range(G):
        for s in range(B, B + R):
            e = draw(st.integers(-1, E - 1))
            expert_GS[g, s] = -1 if e in expert_GS[g] else e
    return load_E, expert_GS


def row_problem(load_E, expert_GS):
    """A problem of that one row, for calling a split solver."""
    G, S = expert_GS.shape
    return make_problem(load_E[None, None], np.zeros(G, int), S - len(load_E) // G)


def num_replicas_N(problem: Problem, placement: Placement) -> np.ndarray:
    """Redundant slots in use."""
    return (placement.expert_NGS[:, :, problem.B :] >= 0).sum(axis=(1, 2))


def served_E(expert_GS, quota_GS, num_experts):
    used = expert_GS >= 0
    return np.bincount(expert_GS[used], quota_GS[used], minlength=num_experts).astype(np.int64)


def require_split(load_E, expert_GS, quota_GS):
    """Every pair is served once, where its expert is."""
    assert (quota_GS >= 0).all() and not quota_GS[expert_GS < 0].any()
    assert (served_E(expert_GS, quota_GS, len(load_E)) == load_E).all()


def least_maximum(load_E, expert_GS):
    """Max-flow min-cut by brute force: a set of ranks serves at least the experts that have no slot outside it."""
    G = len(expert_GS)
    ranks_E = [sum(1 << g for g in range(G) if e in expert_GS[g]) for e in range(len(load_E))]
    least = 0
    for chosen in range(1, 1 << G):
        stuck = sum(int(load) for load, ranks in zip(load_E, ranks_E, strict=True) if ranks and not ranks & ~chosen)
        least = max(least, math.ceil(stuck / chosen.bit_count()))
    return least


def require_valid(problem: Problem, placement: Placement, keeps_homes: bool = True) -> None:
    broken = placement_violations(problem, placement, keeps_homes=keeps_homes)
    assert not broken, broken[0]


def require_no_worse_than_static(problem: Problem, placement: Placement) -> None:
    assert (placement.load_NG().max(axis=1) <= problem.static().load_NG().max(axis=1)).all()


def served(placement: Placement) -> list[dict[tuple[int, int], int]]:
    """Per row: (rank, expert) -> pairs served there, without zeros."""
    return [
        {(int(g), int(expert_GS[g, s])): int(quota_GS[g, s]) for g, s in np.argwhere(quota_GS > 0)}
        for expert_GS, quota_GS in zip(placement.expert_NGS, placement.quotas_NGS, strict=True)
    ]
