"""The published systems as `foremoe.simulate.System`s: what each plans, when it knows the load, and what of it is exposed.

They are imitations of what was published, on foremoe's own solvers and one simulator: what differs between rows is the policy,
the slots it holds, and what is known when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.cases import RECORDED
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.machine.trainer import Trainer
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.problem import Problem
from foremoe.problem.slots import SharedSlots
from foremoe.routing.trace import RoutingTrace
from foremoe.simulate import System, ep_groups
from foremoe.solvers import Anneal, Feplb, Greedy, Lpt, Quota
from foremoe.synthetic.counts import synthetic_workload
from foremoe.workload.workload import Workload

# Planning that nothing hides, per layer and forward: LPLB's and UltraEP's own figures on a GPU. Where none is published
# (MoonEP, ECHO, LLEP), planning after the router takes UltraEP's.
LPLB_S, ULTRAEP_S = 100e-6, 75e-6
# Systems that hold more redundant slots than the others: with the number of experts per rank, a second set of them.
MORE_SLOTS = ("UltraEP-like, R = 2", "FEPLB-like", "MoonEP-like", "ECHO-like, E/G slots", "LLEP")


def systems(experts_per_rank: int) -> dict[str, System]:
    """Row name -> system, for EP groups with so many experts per rank.

    The slots per rank are the problem's, but for `MORE_SLOTS`.
    """
    in_node, second_set, one_pool = {"replicas": "node"}, {"redundant": experts_per_rank}, SharedSlots(depth=1)
    quota, echo = Planner(rank=(Quota(),), guard=False), STRATEGIES["echo"]
    on_line: dict[str, Any] = {"known": "router", "plan_s": ULTRAEP_S}
    return {
        "static": System(planner=STRATEGIES["static"]),
        "eplb-history": System(planner=STRATEGIES["eplb-history"]),
        "eplb-step": System(planner=STRATEGIES["eplb-step"]),
        "eplb-exact": System(planner=STRATEGIES["eplb-exact"]),
        "LAER-like": System(planner=STRATEGIES["laer"]),
        "LPLB": System(planner=STRATEGIES["lplb"], plan_s=LPLB_S),
        "UltraEP-like": System(planner=quota, changes=in_node, **on_line),
        "UltraEP-like, R = 2": System(planner=quota, changes={**in_node, "redundant": 2}, **on_line),
        "FEPLB-like": System(planner=STRATEGIES["feplb"], changes={**in_node, "redundant": Feplb().dyn}),
        "MoonEP-like": System(planner=STRATEGIES["moonep"], changes={**in_node, **second_set, "slots": one_pool}, **on_line),
        "ECHO-like": System(planner=echo, **on_line),
        "ECHO-like, E/G slots": System(planner=echo, changes=second_set, **on_line),
        "LLEP": System(planner=STRATEGIES["llep"], changes=second_set, **on_line),
        "ReLibra-like": System(planner=Planner(home=Anneal(), rank=(Greedy(),)), changes=in_node),
        "ReLibra-like, our solver": System(planner=STRATEGIES["foremoe-homes"], changes=in_node),
        "LPT homes": System(planner=Planner(home=Lpt(), rank=())),
        "foremoe": System(planner=STRATEGIES["foremoe"]),
        "foremoe, homes moved": System(planner=STRATEGIES["foremoe-homes"]),
        "force-balanced": System(even=True),
    }


def step_trainer(problems: Sequence[Problem]) -> Trainer:
    """The trainer of the tables: a step is a recompute and an update stage of the problems' micro-steps."""
    return Trainer(data_parallel=len(problems), micro_steps=2 * problems[0].M)


NOTES = (
    "static: experts at home. eplb-history, -step, -exact: DeepSeek's policy on the micro-step before (the first one on the one"
    " that came before the stage), the stage's sum, the load itself. LAER-like: copies in proportion to the load of the"
    " micro-step before, laid out anew for every micro-step; restoring all experts from their shards, as published, is in no"
    " figure. The weights that EPLB and LAER move, and their gradients, are exposed, spread evenly over all links,"
    " without optimizer state.",
    f"LPLB: our `lplb`: a ring of replicas of each rank's hottest expert, chosen with foresight and prefetched, optimal split,"
    f" {LPLB_S * 1e6:.0f} us of planning exposed per layer; the published one keeps its replicas and places experts by"
    " EPLB first."
    f" UltraEP-like: quota search without token floor, inside the node, on line: {ULTRAEP_S * 1e6:.0f} us and the push of weights"
    " exposed; it is published with R = 2, for NVLink domains that hold the whole EP group (one node of 72: see"
    " `python -m bench.sensitivity`).",
    f"FEPLB-like: whole experts inside the node, {Feplb().dyn} slots of its own as published, EP groups of at most"
    f" {Feplb.MAX_RANKS} ranks; its scheduler and copy engines work beside the compute of experts that stay, so planning is free"
    " and copies are as hidden as foremoe's. MoonEP-like: every node level, with one second set of experts (E/G slots) for all"
    " layers; ECHO-like: bin packing with the best split, over all ranks as its public code does; LLEP: as published (alpha 1.1,"
    " chunks of 1024 tokens, off below a skew of 1.3), E/G slots anywhere. These three plan on line: planning (no figure is"
    " published: UltraEP's) and the push of weights are exposed. MoonEP hides both behind shared experts, where a model has"
    " them; the simulator has none.",
    "ReLibra-like: homes annealed once for the step, incremental greedy replicas inside the node, hidden, never worse"
    " than none by"
    " the cost model; *our solver* is foremoe's own planner kept inside nodes. LPT homes: RoutePack's placement without"
    " its packing,"
    " which needs samples, see the tables at the end. Moves of homes (weights and optimizer state) are made once per training"
    " step, a recompute and an update stage of as many micro-steps as simulated here: this stage bears half of them. Annealed"
    " homes still have to pay for all of their moves within the stage. foremoe: the default, homes in place; *homes moved*:"
    " with the home level.",
    "Slots: redundant slots per rank that a system needs. MB: weights (every pass) and replica gradients per rank, layer and"
    " micro-step; for EPLB and LAER, the weights of experts that change place.",
    "Homes are the same in all EP groups, which hold the same layers. force-balanced: the same tokens, routing forced to be even,"
    " experts at home. Placement that serves tokens near their source can beat it.",
)


def mb_per_rank(row: Mapping[str, Any], num_ranks: int) -> str:
    """Megabytes of weights and gradients on their way per rank of an EP group, layer and micro-step."""
    return f"{row['bytes_per_layer'] / num_ranks / 1e6:.0f}"


def span(texts: Iterable[str]) -> str:
    """The smallest and the largest of some numbers."""
    numbers = sorted(set(texts), key=float)
    return "-" if not numbers else numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


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
