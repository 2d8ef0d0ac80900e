"""Compiles kernels in advance, so that the first plan does not wait for compilation."""

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np

from foremoe.base.compiled import watch_compilation
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.split import split_over_sources
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.routing.readers.counting import count_micro_steps
from foremoe.simulate import simulate
from foremoe.solvers.home.anneal import Anneal
from foremoe.solvers.pack.repack import repack
from foremoe.solvers.search.search import Search
from foremoe.synthetic import synthetic_trace
from foremoe.workload.routed_experts import count_workload, from_routed_experts
from foremoe.workload.workload import Workload

__all__ = ["warm_up"]

_RANKS, _SEQUENCES, _TOKENS = 4, 8, 32
_PLANNER = Planner(rank=(Search(effort=8),))
# Integer types that rollout engines return, by number of experts.
_DTYPES = {16: (np.uint8, np.int16, np.int32, np.int64), 512: (np.int16, np.int32, np.int64)}


def warm_up(progress: Callable[[str], None] | None = None) -> float:
    """Compiles readers, packing, the default planner, advice, the simulator and synthetic traces by running them on tiny inputs.

    numba caches the compiled functions on disk.

    The inputs cover both objectives, replicas on any rank or only inside nodes, and known or unknown source ranks.

    Args:
        progress: Callback that gets the name of each function after it has been compiled.

    Returns:
        Time taken in seconds. It is a few seconds if everything was already compiled.
    """
    begin_s = time.perf_counter()
    with watch_compilation(progress):
        for work, problem in _problems():
            plan, _ = _PLANNER.plan(problem)
            plan.check(problem)
            plan.rows_for(work, 0)
            if problem.load_NGE is not None:
                sources = problem.load_NGE, plan.expert_NGS, plan.quota_NGS, problem.cluster.node_of_rank_G
                split_over_sources(*sources, 0, demand_NVE=problem.counts().demand_NVE)
                simulate(problem, plan)
            Anneal(sweeps=2).solve(problem)
        synthetic_trace("gpt-oss-20b", num_sequences=1, num_layers=1)
        one_Q, rank_Q = np.ones(4, np.int64), np.arange(4) // 2
        repack(one_Q, one_Q, np.ones((4, 1, 2), np.int64), rank_Q, one_Q, 2, np.arange(4) % 2)
    return time.perf_counter() - begin_s


def _problems() -> Iterator[tuple[Workload, Problem]]:
    works = [work for num_experts in _DTYPES for work in _read(num_experts)]
    cases = itertools.product(works, (1, _RANKS), ("time", "balance"), ("any", "node"))
    for work, num_nodes, objective, replicas in cases:
        cluster = Cluster.preset("8xh100", num_ranks=_RANKS, ranks_per_node=_RANKS // num_nodes)
        cost = CostModel(objective=objective)
        problem = Problem.of(work, cluster, model=_model(work.E), cost=cost, replicas=replicas)
        yield work, problem
        yield work, problem.with_load(problem.load_MLE)


def _read(num_experts: int) -> Iterator[Workload]:
    """Yields a workload of each stage, after running every reader."""
    model, rng = _model(num_experts), np.random.default_rng(0)
    place_Q = np.zeros(_SEQUENCES, np.int32), np.arange(_SEQUENCES, dtype=np.int32) % _RANKS
    # A few experts have nearly all tokens, so that no row is balanced at the start.
    popularity_E = np.arange(num_experts, 0, -1) ** -2.0
    scores_QTLE = rng.gumbel(size=(_SEQUENCES, _TOKENS, 2, num_experts)) + np.log(popularity_E[::-1])
    topk_QTLK = np.argsort(scores_QTLE, axis=-1)[..., -2:]
    for dtype in _DTYPES[num_experts]:
        payloads = list(topk_QTLK.astype(dtype))
        trace, _ = from_routed_experts(payloads, model=model)
        count_workload(payloads, num_ranks=_RANKS, micro_step_Q=place_Q[0], rank_Q=place_Q[1], model=model)
        count_micro_steps(payloads, num_experts)
    for stage in ("recompute", "update"):
        yield Workload.from_trace(trace, num_ranks=_RANKS, tokens_per_rank=_TOKENS, stage=stage)


def _model(num_experts: int) -> Model:
    sizes = {"name": "warm-up", "num_layers": 2, "first_moe_layer": 0, "num_experts": num_experts, "num_topk": 2}
    return Model.from_dict(Model.preset("qwen3-30b-a3b").to_dict() | sizes)
