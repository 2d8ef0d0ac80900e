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


@st.composite
def models(draw: st.DrawFn, *, num_experts: int | None = None) -> Model:
    """Draws small models in which a pair takes about as long to compute as an expert takes to copy."""
    experts = draw(st.integers(1, 8)) if num_experts is None else num_experts
    return Model(
        name="toy", num_layers=16, first_moe_layer=draw(st.sampled_from([0, 1])), num_experts=experts,
        num_topk=draw(st.integers(1, min(2, experts))), hidden_size=draw(st.sampled_from([4, 16])), ffn_size=8,
        attention_params=64, num_heads=1, qk_head_dim=4, v_head_dim=4, source="made up for tests",
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn, *, min_ranks: int = 1, max_ranks: int = 6, symmetric: bool = False) -> Cluster:
    """Draws clusters with nodes of any size and ranks in any order.

    If `symmetric` is True, all nodes have the same size and ranks are in order.
    """
    ranks = draw(st.integers(min_ranks, max_ranks))
    if symmetric:
        per_node = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
        node_G = np.arange(ranks) // per_node
    else:
        node_G = np.unique(
            draw(st.lists(st.integers(0, draw(st.sampled_from([2, ranks - 1]))), min_size=ranks, max_size=ranks)),
            return_inverse=True,
        )[1]
    return Cluster(
        name="toy", num_ranks=ranks, node_of_rank_G=node_G, flops_per_s=draw(st.sampled_from([1e8, 1e9, 1e12])),
        compute_efficiency=draw(st.sampled_from([0.5, 1.0])), slot_overhead_s=draw(st.sampled_from([0.0, 1e-6])),
        peer_bytes_per_s=1e9, rdma_bytes_per_s=draw(st.sampled_from([1e8, 4e9])),
        host_bytes_per_s=draw(st.sampled_from([1e8, 4e9])), peer_latency_s=draw(st.sampled_from([0.0, 1e-7])),
        rdma_latency_s=draw(st.sampled_from([0.0, 1e-6])), host_latency_s=1e-7, nic_sharing=draw(st.sampled_from([1, 2])),
        dispatch=draw(st.sampled_from(DISPATCHES)), exchange_bytes_per_s=draw(st.sampled_from([None, 2e8])),
        copy_contention=draw(st.sampled_from([0.0, 0.05, 1.0])), memory_bytes=10**9, **draw(st.sampled_from([{}, _FITTED])),
        source="made up for tests",
    )  # fmt: skip


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
    M = num_micro_steps
    if (draw(st.sampled_from(STAGES)) if stage is None else stage) == "recompute":
        return Schedule.forward_only(M)
    reforward = draw(st.booleans())
    chunks = [v for v in range(2, num_layers + 1) if num_layers % v == 0 or uneven]
    kind = draw(st.sampled_from(["accumulate", "1f1b", *(["interleaved"] if chunks else [])]))
    if kind == "accumulate":
        schedule = Schedule.accumulate(M, reforward)
    else:
        pp = draw(st.sampled_from([p for p in range(1, 5) if kind == "1f1b" or M % p == 0]))
        pp_rank = draw(st.integers(0, pp - 1))
        if kind == "1f1b":
            schedule = Schedule.one_f_one_b(M, pp, pp_rank, reforward)
        else:
            schedule = Schedule.interleaved(M, pp, draw(st.sampled_from(chunks)), pp_rank, reforward)
    return draw(_uneven(schedule, num_layers)) if uneven else schedule


@st.composite
def _uneven(draw: st.DrawFn, schedule: Schedule, num_layers: int) -> Schedule:
    """Returns the schedule with random chunks and blocks of layers."""
    chunk_L = np.sort(np.array(draw(_lists(schedule.num_chunks, num_layers)), np.int32))
    if num_layers % schedule.num_chunks == 0 and draw(st.booleans()):
        chunk_L = schedule.chunks(num_layers)
    else:
        schedule = dataclasses.replace(schedule, chunk_L=chunk_L)
    if not schedule.reforward or draw(st.booleans()):
        return schedule
    new_L = np.array(draw(_lists(2, num_layers)), bool)
    new_L[1:] |= np.diff(chunk_L) > 0
    return dataclasses.replace(schedule, block_L=np.cumsum(new_L))


def _lists(below: int, length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, below - 1), min_size=length, max_size=length)


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
    cluster = draw(clusters(min_ranks=min_ranks, max_ranks=max_ranks, symmetric=symmetric))
    G = cluster.num_ranks
    E = G * draw(st.integers(1, max_base))
    M, L = draw(st.integers(min_micro_steps, max_micro_steps)), draw(st.integers(min_layers, max_layers))
    stage = draw(st.sampled_from(list(stages)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = draw(st.lists(st.sampled_from(list(row_kinds)), min_size=M * L, max_size=M * L))
    load_MLGE = np.stack([_row(kind, G, E, max_pairs, rng) for kind in kinds]).reshape(M, L, G, E)
    permuted, known = draw(st.booleans()), draw(st.sampled_from(["nothing", "tokens", "attention"]))
    tokens_MG = rng.integers(0, 50, (M, G)).astype(np.int32)
    return Problem(
        model=draw(models(num_experts=E)), cluster=cluster,
        cost=CostModel(objective=draw(st.sampled_from(list(objectives))), overlap=draw(st.sampled_from([0.0, 0.5, 1.0]))),
        stage=stage, schedule=draw(schedules(M, num_layers=L, stage=stage, uneven=uneven)),
        redundant=draw(st.integers(min(min_redundant, E), min(max_redundant, E))),
        slot_depth=draw(st.integers(1, 3)) if slot_depth is None else slot_depth,
        replicas=draw(st.sampled_from(list(replicas))),
        home_LE=np.stack([rng.permutation(E) if permuted else np.arange(E) for _ in range(L)]), load_MLE=load_MLGE.sum(axis=2),
        load_MLGE=load_MLGE if (draw(st.booleans()) if sources is None else sources) else None,
        tokens_MG=None if known == "nothing" else tokens_MG,
        attention_MG=tokens_MG.astype(np.float64) ** 2 if known == "attention" else None,
        moe_layer_L=np.arange(L) + draw(st.sampled_from([0, 3])),
    )  # fmt: skip


def placements(problem: Problem) -> st.SearchStrategy[Placement]:
    """Draws valid placements for `problem`, from static placement to placements in which all redundant slots are filled."""
    return st.builds(
        functools.partial(random_placement, problem), st.builds(np.random.default_rng, st.integers(0, 2**32 - 1)),
        density=st.sampled_from([1.0, 0.6, 0.2, 0.0]), evenness=st.sampled_from([0.1, 1.0, 50.0]),
    )  # fmt: skip


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
