"""Hypothesis strategies for small, varied and valid models, clusters, schedules, problems, placements and plans.

hypothesis draws and shrinks the structure of a value, while large arrays are generated from a drawn seed. Print failures with
`describe`::

    @given(st.data())
    def test_mine(data):
        problem = data.draw(problems(max_ranks=4))
        note(describe(problem))
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from foremoe.base.arrays import Array
from foremoe.machine.cluster import DISPATCHES, Cluster
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.testing.samples import plan_of, random_placement
from foremoe.workload.workload import STAGES

# Cluster fields that only a fit determines.
_FITTED: dict[str, Any] = {
    "attention_efficiency": 0.25, "backward_ratio": 1.5, "slot_backward_s": 3e-6, "attention_backward_ratio": 1.25,
    "layer_overhead_s": 1e-6, "pair_overhead_s": 1e-10, "planned_layer_s": 2e-6, "planned_token_s": 1e-8,
    "residual": 0.125,
}  # fmt: skip

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts.

ROW_KINDS = ("flat", "skewed", "sparse", "one", "zero")


# A draw takes 0.1 ms, whatever it draws. So values that do not depend on each other share one draw of a whole number.


@functools.cache
def _below(count: int) -> st.SearchStrategy[int]:
    """Draws a whole number from 0 to below `count`.

    hypothesis copies numbers between strategies that it considers equal, such as all ``st.integers``. These differ in `count`.
    """
    return st.sampled_from(range(count))


def _digits(draw: st.DrawFn, bases: Sequence[int]) -> list[int]:
    """Draws a whole number from 0 to below each base."""
    digits: list[int] = []
    while len(digits) < len(bases):
        chunk, count = [bases[len(digits)]], bases[len(digits)]
        # hypothesis prefers small numbers where the range is wider.
        for base in bases[len(digits) + 1 :]:
            if count * base > 256:
                break
            chunk.append(base)
            count *= base
        left = draw(_below(count)) if count > 1 else 0
        for base in chunk:
            left, digit = divmod(left, base)
            digits.append(digit)
    return digits


def _one_of_each(draw: st.DrawFn, **values: Sequence[Any]) -> dict[str, Any]:
    """Draws one of the values of every name. The first values are the simplest."""
    digits = _digits(draw, [len(several) for several in values.values()])
    return {name: several[digit] for (name, several), digit in zip(values.items(), digits, strict=True)}


def _model(draw: st.DrawFn, num_experts: int) -> Model:
    drawn = _one_of_each(
        draw, first_moe_layer=(0, 1), num_topk=range(1, min(2, num_experts) + 1), hidden_size=(4, 16)
    )  # fmt: skip
    return Model(
        name="toy", num_layers=16, num_experts=num_experts, ffn_size=8, attention_params=64, num_heads=1, qk_head_dim=4,
        v_head_dim=4, source="made up for tests", **drawn,
    )  # fmt: skip


@st.composite
def models(draw: st.DrawFn, *, num_experts: int | None = None) -> Model:
    """Draws small models in which a pair takes about as long to compute as an expert takes to copy."""
    return _model(draw, draw(st.integers(1, 8)) if num_experts is None else num_experts)


def _cluster(draw: st.DrawFn, min_ranks: int, max_ranks: int, symmetric: bool) -> Cluster:
    ranks = min_ranks + _digits(draw, [max_ranks - min_ranks + 1])[0]
    if symmetric:
        sizes = [d for d in range(1, ranks + 1) if ranks % d == 0]
        node_G = np.arange(ranks) // sizes[_digits(draw, [len(sizes)])[0]]
    else:
        most, *node_of = _digits(draw, [2, *[ranks] * ranks])
        # Half of the clusters have at most three nodes.
        node_G = np.unique(np.array(node_of) % (ranks if most else 3), return_inverse=True)[1]
    drawn = _one_of_each(
        draw, flops_per_s=(1e8, 1e9, 1e12), compute_efficiency=(0.5, 1.0), slot_overhead_s=(0.0, 1e-6),
        rdma_bytes_per_s=(1e8, 4e9), host_bytes_per_s=(1e8, 4e9), peer_latency_s=(0.0, 1e-7), rdma_latency_s=(0.0, 1e-6),
        nic_sharing=(1, 2), dispatch=DISPATCHES, exchange_bytes_per_s=(None, 2e8), copy_contention=(0.0, 0.05, 1.0),
        fitted=({}, _FITTED),
    )  # fmt: skip
    return Cluster(
        name="toy", num_ranks=ranks, node_of_rank_G=node_G, peer_bytes_per_s=1e9, host_latency_s=1e-7, memory_bytes=10**9,
        source="made up for tests", **drawn.pop("fitted"), **drawn,
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn, *, min_ranks: int = 1, max_ranks: int = 6, symmetric: bool = False) -> Cluster:
    """Draws clusters with nodes of any size and ranks in any order.

    If `symmetric` is True, all nodes have the same size and ranks are in order.
    """
    return _cluster(draw, min_ranks, max_ranks, symmetric)


def _schedule(draw: st.DrawFn, num_micro_steps: int, num_layers: int, stage: str, uneven: bool) -> Schedule:
    M = num_micro_steps
    if stage == "recompute":
        return Schedule.forward_only(M)
    chunks = [v for v in range(2, num_layers + 1) if num_layers % v == 0 or uneven]
    kinds = ("accumulate", "1f1b", "interleaved") if chunks else ("accumulate", "1f1b")
    drawn = _one_of_each(
        draw, reforward=(False, True), kind=kinds, chunks=chunks or (1,), even=(True, False), block=(False, True)
    )
    kind, reforward = drawn["kind"], drawn["reforward"]
    if kind == "accumulate":
        schedule = Schedule.accumulate(M, reforward)
    else:
        sizes = [pp for pp in range(1, 5) if kind == "1f1b" or M % pp == 0]
        pp, pp_rank = draw(st.sampled_from([(pp, rank) for pp in sizes for rank in range(pp)]))
        if kind == "1f1b":
            schedule = Schedule.one_f_one_b(M, pp, pp_rank, reforward)
        else:
            schedule = Schedule.interleaved(M, pp, drawn["chunks"], pp_rank, reforward)
    return _uneven(draw, schedule, num_layers, drawn["even"], drawn["block"]) if uneven else schedule


@st.composite
def schedules(
    draw: st.DrawFn, num_micro_steps: int, *, num_layers: int = 1, stage: str | None = None, uneven: bool = False
) -> Schedule:
    """Draws schedules of every kind for the given numbers of micro-steps and layers.

    Args:
        stage: Stage of the schedule, ``"recompute"`` or ``"update"``. By default, either is drawn.
        uneven: Whether to include schedules with chunks of different sizes and with activation recomputation in blocks of several
            layers.
    """
    stage = draw(st.sampled_from(STAGES)) if stage is None else stage
    return _schedule(draw, num_micro_steps, num_layers, stage, uneven)


def _uneven(draw: st.DrawFn, schedule: Schedule, num_layers: int, even: bool, block: bool) -> Schedule:
    """Returns the schedule with random chunks, unless they may be `even`, and, if `block`, with blocks of layers."""
    if even and num_layers % schedule.num_chunks == 0:
        chunk_L = schedule.chunks(num_layers)
    else:
        chunk_L = np.sort(np.array(_digits(draw, [schedule.num_chunks] * num_layers), np.int32))
        schedule = dataclasses.replace(schedule, chunk_L=chunk_L)
    if not (schedule.reforward and block):
        return schedule
    new_L = np.array(_digits(draw, [2] * num_layers), bool)
    new_L[1:] |= np.diff(chunk_L) > 0
    return dataclasses.replace(schedule, block_L=np.cumsum(new_L))


@st.composite
def problems(
    draw: st.DrawFn, *, min_ranks: int = 1, max_ranks: int = 6, max_base: int = 3, min_redundant: int = 0, max_redundant: int = 3,
    min_micro_steps: int = 1, max_micro_steps: int = 4, min_layers: int = 1, max_layers: int = 4, max_pairs: int = 40,
    stages: Sequence[str] = STAGES, objectives: Sequence[str] = ("balance", "time"), replicas: Sequence[str] = ("any", "node"),
    slot_depth: int | None = None, row_kinds: Sequence[str] = ROW_KINDS, sources: bool | None = None, symmetric: bool = False,
    uneven: bool = True,
) -> Problem:  # fmt: skip
    """Draws problems of every kind that the library accepts.

    Args:
        max_base: Maximum number of base slots per rank, so that E is at most max_ranks * max_base.
        max_pairs: Maximum load of one expert from one source rank.
        slot_depth: Number of buffers per slot. By default, it is drawn from 1 to 3.
        row_kinds: Kinds of row loads to draw. See `ROW_KINDS`.
        sources: Whether the problem has ``load_MLGE``. By default, either is drawn.
        symmetric: Whether nodes have equal sizes, with ranks in order.
        uneven: Whether to include schedules with chunks of different sizes and with activation recomputation in blocks of several
            layers.
    """
    cluster = _cluster(draw, min_ranks, max_ranks, symmetric)
    G = cluster.num_ranks
    size = _one_of_each(
        draw, base=range(1, max_base + 1), M=range(min_micro_steps, max_micro_steps + 1), L=range(min_layers, max_layers + 1)
    )  # fmt: skip
    E, M, L = G * size["base"], size["M"], size["L"]
    seed = draw(st.integers(0, 2**32 - 1))
    kinds = [row_kinds[kind] for kind in _digits(draw, [len(row_kinds)] * (M * L))]
    drawn = _one_of_each(
        draw, stage=stages, objective=objectives, overlap=(0.0, 0.5, 1.0), replicas=replicas,
        redundant=range(min(min_redundant, E), min(max_redundant, E) + 1),
        slot_depth=(1, 2, 3) if slot_depth is None else (slot_depth,), permuted=(False, True),
        known=("nothing", "tokens", "attention"), sources=(False, True) if sources is None else (sources,), first_layer=(0, 3),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    load_MLGE = np.stack([_row(kind, G, E, max_pairs, rng) for kind in kinds]).reshape(M, L, G, E)
    tokens_MG = rng.integers(0, 50, (M, G)).astype(np.int32)
    return Problem(
        model=_model(draw, E), cluster=cluster,
        cost=CostModel(objective=drawn["objective"], overlap=drawn["overlap"]),
        stage=drawn["stage"], schedule=_schedule(draw, M, L, drawn["stage"], uneven),
        redundant=drawn["redundant"], slot_depth=drawn["slot_depth"], replicas=drawn["replicas"],
        home_LE=np.stack([rng.permutation(E) if drawn["permuted"] else np.arange(E) for _ in range(L)]),
        load_MLE=load_MLGE.sum(axis=2), load_MLGE=load_MLGE if drawn["sources"] else None,
        tokens_MG=None if drawn["known"] == "nothing" else tokens_MG,
        attention_MG=tokens_MG.astype(np.float64) ** 2 if drawn["known"] == "attention" else None,
        moe_layer_L=np.arange(L) + drawn["first_layer"],
    )  # fmt: skip


# (density, evenness) of `random_placement`.
_SPREADS = tuple((density, evenness) for density in (1.0, 0.6, 0.2, 0.0) for evenness in (0.1, 1.0, 50.0))


def placements(problem: Problem) -> st.SearchStrategy[Placement]:
    """Draws valid placements for `problem`, from static placement to placements in which all redundant slots are filled."""

    def placement(seed: int, spread: int) -> Placement:
        density, evenness = _SPREADS[spread]
        return random_placement(problem, np.random.default_rng(seed), density=density, evenness=evenness)

    return st.builds(placement, st.integers(0, 2**32 - 1), _below(len(_SPREADS)))


def plans(problem: Problem) -> st.SearchStrategy[Plan]:
    """Draws valid plans for `problem` with random placements."""
    return placements(problem).map(functools.partial(plan_of, problem))


def _row(kind: str, num_ranks: int, num_experts: int, max_pairs: int, rng: np.random.Generator) -> Array:
    """Returns the load of one row, int32 [G, E]."""
    shape = (num_ranks, num_experts)
    load_GE = np.zeros(shape, np.int64)
    if kind == "flat":
        load_GE[:] = rng.integers(1, max_pairs + 1)
    elif kind == "skewed":
        # A few experts take most of the load, and source ranks send different amounts.
        popular_E = rng.permutation(max_pairs / np.arange(1, num_experts + 1))
        load_GE = (popular_E * rng.random((num_ranks, 1)) + rng.random(shape)).astype(np.int64)
    elif kind == "sparse":
        load_GE = np.where(rng.random(shape) < 0.2, rng.integers(0, 3, shape), 0)
    elif kind == "one":
        load_GE[:, rng.integers(num_experts)] = rng.integers(0, max_pairs + 1, num_ranks)
    return load_GE.astype(np.int32)
