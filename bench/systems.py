"""The published systems as `foremoe.simulate.System`s, with the policy, the foresight and the exposed work of each system.

They are re-implementations with foremoe's own solvers and one simulator. Systems differ only in their policies, their slots, and
the time at which they know the load. If a source does not say which work overlaps with compute, the system has two rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.cases import RECORDED
from bench.taot import Taot
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.machine.trainer import Trainer
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.simulate import System, ep_groups
from foremoe.solvers import Anneal, Feplb, Greedy, Quota
from foremoe.synthetic.counts import synthetic_workload
from foremoe.workload.workload import Workload

# Planning that nothing hides, per layer and forward: LPLB's and UltraEP's own figures on a GPU. Where none is published
# (MoonEP, ECHO, LLEP, TAOT), planning after the router takes UltraEP's.
LPLB_S, ULTRAEP_S = 100e-6, 75e-6
# Experts are re-placed in these rows; no buffers hold copies.
REPLACED = ("eplb-history", "eplb-step", "LAER-like")
# What others could do that have not said so, or with knowledge that they have not.
GRANTED = (
    "eplb-step", "LLEP, hidden", "UltraEP-like, hidden", "MoonEP-like, hidden", "ECHO-like, with foresight",
    "quota anywhere, with foresight",
)  # fmt: skip
OURS = ("foremoe in nodes", "foremoe", "foremoe, R = 1", "foremoe, R = 1, homes moved")
SECOND_SET = ("MoonEP-like", "MoonEP-like, hidden", "LLEP", "LLEP, hidden")


def systems(experts_per_rank: int, auto: int = 1) -> dict[str, System]:
    """Row name -> system, for EP groups with so many experts per rank; one without slots of its own has the problem's.

    `auto` is the number of slots that `choose_slots` takes.
    """
    ultra = {"replicas": "node", "redundant": 2, "slot_depth": 1}
    moon = {"replicas": "node", "redundant": experts_per_rank, "slot_depth": 1}
    least, two = {"redundant": experts_per_rank}, {"redundant": 2}
    quota, echo, taot = Planner(rank=(Quota(),), guard=False), STRATEGIES["echo"], Planner(rank=(Taot(),), guard=False)
    foremoe = STRATEGIES["foremoe"]
    on_line: dict[str, Any] = {"known": "router", "plan_s": ULTRAEP_S}
    return {
        "static": System(planner=STRATEGIES["static"]),
        "eplb-history": System(planner=STRATEGIES["eplb-history"]),
        "eplb-step": System(planner=STRATEGIES["eplb-step"]),
        "LAER-like": System(planner=STRATEGIES["laer"]),
        "LPLB": System(planner=STRATEGIES["lplb"], plan_s=LPLB_S),
        "FEPLB-like": System(planner=STRATEGIES["feplb"], changes={"replicas": "node", "redundant": Feplb().dyn}),
        "LLEP": System(planner=STRATEGIES["llep"], changes=least, **on_line),
        "LLEP, hidden": System(planner=STRATEGIES["llep"], changes=least),
        "UltraEP-like": System(planner=quota, changes=ultra, **on_line),
        "UltraEP-like, hidden": System(planner=quota, changes=ultra),
        "MoonEP-like": System(planner=STRATEGIES["moonep"], changes=moon, **on_line),
        "MoonEP-like, hidden": System(planner=STRATEGIES["moonep"], changes=moon),
        "ECHO-like": System(planner=echo, **on_line),
        "ECHO-like, with foresight": System(planner=echo),
        "TAOT-like, exposed": System(planner=taot, changes=two, **on_line),
        "TAOT-like": System(planner=taot, changes=two, plan_s=ULTRAEP_S),
        "quota anywhere, with foresight": System(planner=quota),
        "ReLibra-like": System(planner=Planner(home=Anneal(), rank=(Greedy(),)), changes={"replicas": "node"}),
        "foremoe in nodes": System(planner=foremoe, changes={"replicas": "node", "redundant": auto}),
        "foremoe": System(planner=foremoe, changes={"redundant": auto}),
        "foremoe, R = 1": System(planner=foremoe, changes={"redundant": 1}),
        "foremoe, R = 1, homes moved": System(planner=STRATEGIES["foremoe-homes"], changes={"redundant": 1}),
        "force-balanced": System(even=True),
    }


def step_trainer(problems: Sequence[Problem], data_parallel: int | None = None) -> Trainer:
    """The trainer of the tables: a step is a recompute and an update stage of the problems' micro-steps."""
    return Trainer(data_parallel=data_parallel or len(problems), micro_steps=2 * problems[0].M)


NOTES = (
    "static: experts at home. eplb-history, eplb-step: DeepSeek's policy on the micro-step before, or on the stage's sum."
    " LAER-like: copies in proportion to the load of the micro-step before, laid out anew for every micro-step. These three"
    " re-place experts; the weights that they move, and their gradients, are exposed, spread evenly over all links.",
    f"LPLB: a ring of replicas of each rank's hottest expert, chosen with foresight and prefetched, optimal split,"
    f" {LPLB_S * 1e6:.0f} us of planning exposed per layer; the published one keeps its replicas and places experts by EPLB"
    f" first. FEPLB-like: whole experts inside the node, {Feplb().dyn} slots as published, EP groups of at most"
    f" {Feplb.MAX_RANKS} ranks; planning and copies hidden, as its copy engines work while static experts compute.",
    "LLEP: its published planner (alpha 1.1, chunks of 1024 tokens, off below a skew of 1.3), E/G slots anywhere where the"
    " published one has no limit. UltraEP-like: quota search without token floor, R = 2 and one pool of buffers for all"
    " layers, inside the node, as published for NVLink domains that hold the whole EP group: see the NVL72 columns."
    " MoonEP-like: every node level, E/G slots (one second set of experts for all layers), inside the node. ECHO-like: bin"
    " packing with the best split, any rank. TAOT-like: transport with a price on distance, any rank, R = 2 as it publishes no"
    " number; copies overlap with compute as its abstract says, planning does not.",
    f"Rows without an addition have the load when the router has run: {ULTRAEP_S * 1e6:.0f} us of planning (UltraEP's; the others"
    " publish none) and the push of weights for forward are exposed. *hidden*: both hidden, which MoonEP's README claims of"
    " planning and its asynchronous prefetch allows, and which is granted to LLEP and UltraEP too. *with foresight*: the"
    " published rule on routing that rollout recorded, which its authors do not have. *quota anywhere*: UltraEP's rule with R"
    " = 1 over any rank. MoonEP fuses permutation into its exchange; no row is credited for that (see element_overhead_s in"
    " `bench.sensitivity`).",
    "ReLibra-like: homes annealed once for the step, incremental greedy replicas inside the node, hidden, never worse than"
    " none by the cost model. *foremoe in nodes* is our solver under its limits. foremoe: the default planner, homes in"
    " place, as many slots as `choose_slots` takes; *homes moved*: with the home level. Moves of"
    " homes (weights and optimizer state) are exposed, once per step of a recompute and an update stage; this stage bears half"
    " of them, and homes change only where that pays within the stage.",
    "slots: redundant slots per rank and layer that the plans use. buffers: expert-sized weight buffers per rank that the"
    " policy holds for all layers (R times the depth of the ring); GB: their bytes. MB: weights (every pass) and gradients"
    " that a rank sends or receives per layer and micro-step. force-balanced: the same tokens with even routing, experts at"
    " home; placement near the tokens' source can beat it.",
)


def buffers(system: System, problem: Problem) -> tuple[int, float] | None:
    """Weight buffers per rank of a system and their bytes; None where experts are re-placed, or the system makes no replicas."""
    if system.even or not system.planner.rank or not system.planner.keeps_homes:
        return None
    posed = dataclasses.replace(problem, **system.changes)
    count = posed.redundant * posed.slot_depth
    return count, count * posed.model.expert_bytes


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


def recorded_r1(ep: int, tokens_per_rank: int, micro_steps: int, num_layers: int) -> Workload | None:
    """Counts drawn from the recorded shares of DeepSeek-R1's decoding, of layers all over the model; None where it is not here.

    The recording has no micro-steps: all have the same shares, so that rules which look back are at their best.
    """
    file = RECORDED / "deepseek_r1_counts.npz"
    if not file.exists():
        return None
    counts_LE = np.load(file)["decode_in1000out1000"]
    counts_LE = counts_LE[np.linspace(0, len(counts_LE) - 1, num_layers).astype(int)]
    share_LE, rng = counts_LE / counts_LE.sum(axis=1, keepdims=True), np.random.default_rng(0)
    load_MLGE = np.empty((micro_steps, num_layers, ep, counts_LE.shape[1]), np.int32)
    for layer, share_E in enumerate(share_LE):
        load_MLGE[:, layer] = rng.multinomial(8 * tokens_per_rank, share_E, size=(micro_steps, ep))
    tokens_MG = np.full((micro_steps, ep), tokens_per_rank)
    return Workload.from_counts(load_MLGE, num_topk=8, tokens_MG=tokens_MG, stage="update", model="deepseek-v3")


def mean_skew(problems: Sequence[Problem]) -> float:
    """Mean skew of the groups with experts at home."""
    skews = []
    for problem in problems:
        load_NG = problem.static().load_NG()
        skews.append(load_NG.max(axis=1) / np.maximum(load_NG.mean(axis=1), 1e-300))
    return float(np.mean(np.concatenate(skews)))
