"""The published systems as `foremoe.simulate.System`s: what each plans, when it knows the load, and what of it is exposed.

They are imitations of what was published, on foremoe's own solvers and one simulator: what differs between rows is the policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.cases import RECORDED
from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.simulate import System, ep_groups, foremoe_planner
from foremoe.solvers import Anneal, Greedy, Lpt, Quota
from foremoe.solvers.base import RowSolver
from foremoe.synthetic.counts import synthetic_workload
from foremoe.workload.workload import Workload

# Letters: G ranks, S slots, E experts.

# Planning that nothing hides, per layer and forward: LPLB's and UltraEP's own figures on a GPU, FEPLB's on a CPU core.
LPLB_S, ULTRAEP_S, FEPLB_S = 100e-6, 75e-6, 50e-6


@dataclass(frozen=True)
class WholeExperts(RowSolver):
    """FEPLB-like: an overloaded rank gives a whole expert away, the one that levels it best with the idlest rank of its node."""

    @staticmethod
    def edit(load_E: Array, node_G: Array, num_base: int, params: Array, expert_GS: Array, quota_GS: Array) -> None:
        """See `RowSolver.edit`."""
        for _ in range(expert_GS.shape[0]):
            load_G = quota_GS.sum(axis=1)
            giver = load_G.argmax()
            to, slot = -1, -1
            for g in range(load_G.size):
                if node_G[g] == node_G[giver] and g != giver and (to < 0 or load_G[g] < load_G[to]):
                    for s in range(num_base, expert_GS.shape[1]):
                        if expert_GS[g, s] < 0:
                            to, slot = g, s
                            break
            if to < 0:
                return
            best, most = -1, load_G[giver]
            for b in range(num_base):
                after = max(load_G[giver] - quota_GS[giver, b], load_G[to] + quota_GS[giver, b])
                if quota_GS[giver, b] > 0 and after < most:
                    best, most = b, after
            if best < 0:
                return
            expert_GS[to, slot] = expert_GS[giver, best]
            quota_GS[to, slot] = quota_GS[giver, best]
            quota_GS[giver, best] = 0


def systems() -> dict[str, System]:
    """Row name -> system; the slots per rank are the problem's, unless the name says otherwise."""
    in_node = {"replicas": "node"}
    quota = Planner(rank=(Quota(),), guard=False)
    return {
        "static": System(planner=STRATEGIES["static"]),
        "eplb-history": System(planner=STRATEGIES["eplb-history"]),
        "eplb-step": System(planner=STRATEGIES["eplb-step"]),
        "eplb-exact": System(planner=STRATEGIES["eplb-exact"]),
        "LPLB": System(planner=STRATEGIES["lplb"], plan_s=LPLB_S),
        "UltraEP-like": System(planner=quota, known="router", plan_s=ULTRAEP_S, changes=in_node),
        "UltraEP-like, R = 2": System(planner=quota, known="router", plan_s=ULTRAEP_S, changes={**in_node, "redundant": 2}),
        "FEPLB-like": System(planner=Planner(rank=(WholeExperts(),), guard=False), plan_s=FEPLB_S, changes=in_node),
        "ReLibra-like": System(planner=Planner(home=Anneal(), rank=(Greedy(),)), changes=in_node),
        "ReLibra-like, our solver": System(planner=foremoe_planner(), changes=in_node),
        "LPT homes": System(planner=Planner(home=Lpt(), rank=())),
        "foremoe": System(planner=foremoe_planner()),
        "force-balanced": System(even=True),
    }


NOTES = (
    "static: experts at home. eplb-history, -step, -exact: DeepSeek's policy on the micro-step before (the first one on the one"
    " that came before the stage), the stage's sum, the load itself. The weights that EPLB moves are in no stage time;"
    " *apart* has"
    " them, spread evenly over all links, without optimizer state: its rows are bounds.",
    f"LPLB: our `lplb`: a ring of replicas of each rank's hottest expert, chosen with foresight and prefetched, optimal split,"
    f" {LPLB_S * 1e6:.0f} us of planning exposed per layer; the published one keeps its replicas and places experts by"
    " EPLB first."
    f" UltraEP-like: quota search without token floor, inside the node, on line: {ULTRAEP_S * 1e6:.0f} us and the push of weights"
    " exposed; it is published with R = 2, for NVLink domains that hold the whole EP group (one node of 72: see"
    " `python -m bench.sensitivity`). FEPLB-like: whole experts inside the node, as many as R slots hold,"
    f" {FEPLB_S * 1e6:.0f} us exposed, copies as hidden as foremoe's.",
    "ReLibra-like: homes annealed once for the step, incremental greedy replicas inside the node, hidden, never worse"
    " than none by"
    " the cost model; *our solver* is foremoe's own planner kept inside nodes. LPT homes: RoutePack's placement without"
    " its packing,"
    " which needs samples, see the tables at the end. Moves of homes (weights and optimizer state) are charged to this one stage"
    " and its few micro-steps; over a whole step they weigh less. foremoe: hierarchical with the home level.",
    "Homes are the same in all EP groups, which hold the same layers. force-balanced: the same tokens, routing forced to be even,"
    " experts at home. Placement that serves tokens near their source can beat it.",
    "Every (token, expert) pair travels, as in a plain all-to-all: exchanges are most of a stage across nodes, and balance gains"
    " less where a token is sent once per node (`python -m bench.dispatches`).",
)


def synthetic_groups(
    model: str | Model, *, num_ranks: int, ep: int, tokens_per_rank: int = 8192, micro_steps: int = 4, regime: str = "mid",
    seed: int = 0, num_layers: int | None = None, ranks_per_node: int = 8, cluster: Cluster | None = None, redundant: int = 1,
    **changes: Any,
) -> list[Problem]:  # fmt: skip
    """The EP groups of a synthetic stage; `changes` are fields of the problems."""
    work = synthetic_workload(
        model, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, micro_steps=micro_steps, regime=regime, seed=seed,
        num_layers=num_layers,
    )  # fmt: skip
    return group_problems(work, model, ep, ranks_per_node, cluster, redundant, **changes)


def group_problems(
    work: Workload, model: str | Model, ep: int, ranks_per_node: int, cluster: Cluster | None, redundant: int, **changes: Any
) -> list[Problem]:
    """A problem for every EP group of a workload."""
    of = Cluster.preset("8xh100", num_ranks=ep, ranks_per_node=ranks_per_node) if cluster is None else cluster
    preset = Model.preset(model) if isinstance(model, str) else model
    problems = [Problem.of(group, of, redundant=redundant, model=preset) for group in ep_groups(work, ep)]
    return [dataclasses.replace(problem, **changes) for problem in problems] if changes else problems


def recorded_workload(files: Sequence[str], model: str, num_ranks: int, tokens_per_rank: int) -> Workload | None:
    """Recorded routing dealt to ranks; None where the recordings are not at hand."""
    if any(not (RECORDED / name).exists() for name in files):
        return None
    trace = RoutingTrace.concat([RoutingTrace.load(RECORDED / name, model=model) for name in files])
    return Workload.from_trace(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)


def mean_skew(problems: Sequence[Problem]) -> float:
    """Mean skew of the groups with experts at home."""
    skews = []
    for problem in problems:
        load_NG = problem.static().load_NG()
        skews.append(load_NG.max(axis=1) / np.maximum(load_NG.mean(axis=1), 1e-300))
    return float(np.mean(np.concatenate(skews)))
