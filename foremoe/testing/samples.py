"""Functions that draw valid placements and plans with a numpy generator. They do not need hypothesis."""

import dataclasses

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.planner import start
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.solvers.split.exact import ExactSplit

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts, B base slots, R redundant slots, S = B + R, C copies.


def random_placement(problem: Problem, rng: np.random.Generator, *, density: float = 0.7, evenness: float = 0.5) -> Placement:
    """Draws a valid placement with random replicas and random quotas. All experts stay at home.

    Args:
        density: Probability that a redundant slot is filled.
        evenness: Parameter of the Dirichlet distribution that spreads an expert's load over its slots. With a small value, one
            slot gets nearly all of the load.
    """
    static = problem.static()
    expert_NGS, quota_NGS = static.expert_NGS.copy(), static.quotas_NGS.copy()
    for n in range(problem.N):
        _fill(problem, n % problem.L, expert_NGS[n], rng, density)
        for e in range(problem.E):
            at = np.nonzero(expert_NGS[n] == e)
            shares = rng.dirichlet(np.full(len(at[0]), evenness))
            quota_NGS[n][at] = rng.multinomial(problem.load_NE[n, e], shares)
    idle = (expert_NGS >= 0) & (quota_NGS == 0)
    idle[:, :, : problem.B] = False
    expert_NGS[idle] = -1
    return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)


def random_sources(problem: Problem, rng: np.random.Generator) -> Array:
    """Returns the problem's load by source rank, int32 [M, L, G, E]. If the problem has none, draws one with the same sums."""
    if problem.load_MLGE is not None:
        return problem.load_MLGE
    dealt = rng.multinomial(problem.load_MLE, rng.dirichlet(np.full(problem.G, 0.5)))
    return np.ascontiguousarray(np.moveaxis(dealt, -1, 2)).astype(np.int32)


def plan_of(problem: Problem, placement: Placement) -> Plan:
    """Returns a plan with this placement, which must be valid, without calling a solver of the rank level."""
    return Planner(rank=(), guard=False).plan(problem, placement, num_threads=1)[0]


def with_quotas(problem: Problem, placement: Placement, keeps_homes: bool = True) -> Placement:
    """Returns the placement with quotas. Missing quotas are filled as the planner does for a solver that only places experts."""
    return placement if placement.quota_NGS is not None else start.with_quotas(problem, placement, ExactSplit(), keeps_homes)


def many_row_problem(num_rows: int) -> Problem:
    """Returns a seeded problem of at least `num_rows` rows on four ranks. Use it to run several blocks of rows per thread."""
    rng, L, G, E = np.random.default_rng(0), 4, 4, 8
    M = -(-num_rows // L)
    popular_MLE = 60.0 * rng.random((M, L, E)) ** 4
    model = dataclasses.replace(Model.preset("qwen3-30b-a3b"), num_experts=E, num_topk=2)
    return Problem(
        model=model, cluster=Cluster.preset("8xh100", num_ranks=G, ranks_per_node=2, host_store=True),
        cost=CostModel(objective="balance"), schedule=Schedule.accumulate(M), home_LE=np.tile(np.arange(E), (L, 1)),
        load_MLE=popular_MLE.astype(np.int32), moe_layer_L=np.arange(L),
    )  # fmt: skip


def _fill(problem: Problem, layer: int, expert_GS: Array, rng: np.random.Generator, density: float) -> None:
    """Fills a row's redundant slots with random experts that may be copied to them."""
    home_rank_E, node_G = problem.home_LE[layer] // problem.B, problem.cluster.node_of_rank_G
    for g in range(problem.G):
        allowed_E = home_rank_E != g
        if problem.replicas == "node":
            allowed_E &= node_G[home_rank_E] == node_G[g]
        allowed = np.flatnonzero(allowed_E)
        filled = np.flatnonzero(rng.random(problem.R) < density)[: len(allowed)]
        expert_GS[g, problem.B + filled] = rng.permutation(allowed)[: len(filled)]
