"""Problems for the tests of the planner."""

from __future__ import annotations

import dataclasses

import numpy as np

import foremoe
from foremoe.problem.problem import Problem


def problem_of(seed: int = 0, objective: str = "balance", micro_steps: int = 3, layers: int = 4, redundant: int = 1) -> Problem:
    """A seeded load of `gpt-oss-20b` on eight ranks in two nodes."""
    model = dataclasses.replace(foremoe.Model.preset("gpt-oss-20b"), num_layers=layers)
    rng = np.random.default_rng(seed)
    rate = rng.lognormal(2.0, 1.0, (micro_steps, layers, 1, model.num_experts))
    load_MLGE = rng.poisson(rate, (micro_steps, layers, 8, model.num_experts)).astype(np.int32)
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=model.num_topk)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=8, ranks_per_node=4)
    return Problem.of(work, cluster, model=model, redundant=redundant, cost=foremoe.CostModel(objective=objective))
