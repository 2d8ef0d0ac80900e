"""Comparison of systems on the EP groups of one stage. Each system has its own planner, foresight and prefetch."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.machine.trainer import Trainer
from foremoe.plan.figures import FIGURES, plan_figures, stage_seconds
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link
from foremoe.planner.comparison import no_history
from foremoe.planner.planner import Planner
from foremoe.planner.sampling import line_without_figures
from foremoe.problem.foresight import foreseen
from foremoe.problem.problem import Problem
from foremoe.simulate.pipeline import PipelineRank, on_pipeline, simulate_pipeline
from foremoe.simulate.result import Simulation
from foremoe.simulate.stage import even_routing, simulate
from foremoe.simulate.step import against, head_seconds, optimizer_seconds, reduction_seconds, replacement_seconds
from foremoe.solvers import Anneal, Keep
from foremoe.solvers.home.price import price_L
from foremoe.workload.skew import skew
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, E experts, G ranks.

BALANCED = "force-balanced"
_MEANS = ("gap_mean", "replicas_per_layer", "moves_per_layer", "bytes_per_layer", "transfer_s")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A planner to compare, with the options of its simulation.

    Attributes:
        planner: Planner, which may have a home level. Its pack level is ignored, because groups are already packed.
        known: When loads are known: "rollout" or "router", as in `simulate`.
        plan_s: Time in seconds of exposed planning per forward pass of a layer, as in `simulate`.
        prefetch: How many uses ahead a copy may start at most, as in `simulate`.
        changes: New values for fields of the problem (``replicas``, ``redundant``, ``slot_depth``).
        even: Whether routing is forced to be even. The planner is then not used.
    """

    planner: Planner = field(default_factory=Planner)
    known: str = "rollout"
    plan_s: float = 0.0
    prefetch: int = 2
    changes: Mapping[str, Any] = field(default_factory=dict)
    even: bool = False


def ep_groups(workload: Workload, size: int) -> list[Workload]:
    """Splits a workload into EP groups of `size` consecutive ranks. Each has its own tokens in the same micro-steps.

    Raises:
        InputError: `size` does not divide the number of ranks.
    """
    if size < 1 or workload.G % size:
        raise InputError(f"{workload.G} ranks do not divide into EP groups of {size}; choose a size that divides {workload.G}.")
    out = []
    for low in range(0, workload.G, size):
        cut = workload.cut_arrays(G=slice(low, low + size))
        pairs_ML = cut["load_MLGE"].sum(axis=(2, 3), dtype=np.int64)
        tokens_M = cut["tokens_MG"].sum(axis=1, dtype=np.int64)
        # Unknown tokens are counted over all ranks together. The pairs that are missing in a group give its share.
        lacking_ML = tokens_M[:, None] - -(-pairs_ML // workload.num_topk)
        cut["unknown_ML"] = np.minimum(lacking_ML, workload.unknown_ML)
        out.append(dataclasses.replace(workload, **cut, micro_step_Q=None, rank_Q=None, dealt=None))
    return out


def simulate_systems(
    groups: Sequence[Problem], systems: Mapping[str, System], *, pp: int = 1, vpp: int = 1,
    history_LE: Array | Sequence[Array] | None = None, trainer: Trainer | None = None, num_threads: int | None = None,
    progress: Progress | None = None, keep: dict[str, list[tuple[Plan, Simulation]]] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Plans and simulates every EP group with every system.

    EP groups wait for each other at the end of the stage to synchronise gradients, so the slowest group determines the length of
    the stage. Homes are chosen for all groups together, because all groups hold the same layers.

    Args:
        groups: EP groups of one stage, each with its own load.
        systems: Systems to compare, keyed by name.
        pp: Number of pipeline ranks over which the layers are split.
        vpp: Number of chunks per pipeline rank.
        history_LE: Load of an earlier step, as in `compare`, or one array for each group.
        trainer: Optimizer, number of EP groups and time outside the stage. Defaults to a `Trainer` with the number of `groups`.
        num_threads: Number of planning threads. Defaults to all cores.
        progress: Callback that gets (system, groups done, number of groups).
        keep: Dict, keyed by names of systems, to be filled with the plan and the simulation of each pipeline rank of the first
            group.

    Returns:
        One dict per system. Figures cover all micro-steps. A micro-step without history has the static placement. If a system
        cannot plan the groups (`Planner.refusal`), every figure is None and ``note`` holds the reason. The keys are:

        * ``solver``: name of the system,
        * `FIGURES`: skews over all rows, peaks over all ranks, predicted times of the slowest group and pipeline rank, and means
          over groups for all other figures,
        * ``simulated_stage_s``: length of the stage, including moves of homes, reduction and optimizer,
        * the parts of the slowest group's stage,
        * ``moves_s``: exposed time of this stage's share of moving homes (`Trainer.micro_steps`), and `replacement_seconds`,
        * ``reduction_s`` and ``optimizer_s``: see `step`,
        * ``fill_s``: time added by filling host stores,
        * ``executable``: False if homes move between micro-steps, which no engine supports,
        * ``tokens_per_s_per_rank``: throughput in tokens per second and rank,
        * ``speedup_vs_static``: speed-up of the stage, or None without static placement,
        * ``step_speedup``: speed-up of the whole step, or None without static placement or without the time outside the stages,
        * ``step_speedup_at``: speed-ups of steps that spend given percentages outside the stages, or None without static
          placement,
        * ``share_of_balanced``: stage time with even routing divided by that of the system, or None without even routing,
        * ``groups``: number of groups.

    Raises:
        InputError: There are no groups, or no system can plan them.
    """
    if not groups:
        raise InputError("there are no EP groups to simulate.")
    trainer = trainer or Trainer(data_parallel=len(groups))
    shared = _Shared(groups, pp, vpp, history_LE, trainer, num_threads, progress, {} if keep is None else keep)
    rows = _with_blanks([_left_out(name, system, groups[0]) or _row(name, system, shared) for name, system in systems.items()])
    static = next((row for row in rows if row["solver"] == "static"), None)
    balanced_s = next((row["simulated_stage_s"] for row in rows if systems[row["solver"]].even), None)
    static_s = None if static is None else static["simulated_stage_s"]
    for row in rows:
        of_static = None if static is None or not row["n_solved"] else static["predicted_stage_s"] / row["predicted_stage_s"]
        row["predicted_speedup_vs_static"] = of_static
        row |= against(row["simulated_stage_s"], static_s, balanced_s, trainer)
    return rows


class _Shared(NamedTuple):
    """Options of `simulate_systems` that all lines of a table share."""

    groups: Sequence[Problem]
    pp: int
    vpp: int
    history_LE: Array | Sequence[Array] | None
    trainer: Trainer
    num_threads: int | None
    progress: Progress | None
    keep: dict[str, list[tuple[Plan, Simulation]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Results of one EP group."""

    ranks: list[PipelineRank]
    simulations: list[Simulation]
    moves_s: float
    reduction_s: float
    optimizer_s: float
    cpu_s: float
    fill_s: float

    @property
    def stage_s(self) -> float:
        return self.simulations[0].total_s + self.moves_s + self.reduction_s + self.optimizer_s


def _left_out(name: str, system: System, problem: Problem) -> dict[str, Any] | None:
    """Returns the line of a system that refuses the groups, or None if it plans them."""
    reason = None if system.even else system.planner.refusal(problem)
    if reason is None:
        return None
    return line_without_figures(name, f"left out: {reason}")


def _with_blanks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines. Those of systems that were left out get None for every missing figure."""
    full = next((row for row in rows if row["n_solved"]), None)
    if full is None and rows:
        raise InputError(f"no system plans these EP groups; {rows[0]['solver']}: {rows[0]['note']}")
    return [row if row["n_solved"] else dict.fromkeys(full or ()) | row for row in rows]


def _row(name: str, system: System, shared: _Shared) -> dict[str, Any]:
    groups, history_LE = shared.groups, shared.history_LE
    history = list(history_LE) if isinstance(history_LE, Sequence) else [history_LE] * len(groups)
    posed = [even_routing(p) if system.even else dataclasses.replace(p, **system.changes) for p in groups]
    home_LE = _homes(system, posed, history, shared.num_threads)
    done = []
    for i, problem in enumerate(posed):
        done.append(_run(system, problem, home_LE, history[i], shared))
        if shared.progress is not None:
            shared.progress(name, i + 1, len(groups))
    if name in shared.keep:
        shared.keep[name] = [(rank.plan, run) for rank, run in zip(done[0].ranks, done[0].simulations, strict=True)]
    slowest = max(done, key=lambda group: group.stage_s)
    # The other pipeline ranks wait for the one that waits least.
    parts = min((s.parts for s in slowest.simulations), key=lambda part: part.bubble_s)
    tokens = sum(int(p.tokens_MG.sum()) for p in groups if p.tokens_MG is not None)
    num_ranks = sum(p.G for p in groups) * shared.pp
    blind = [] if system.even else no_history(system.planner, groups[0], history[0])
    return {
        "solver": name, **_figures(name, done, shared.trainer), "simulated_stage_s": slowest.stage_s, **parts.to_dict(),
        "moves_s": slowest.moves_s, "reduction_s": slowest.reduction_s, "optimizer_s": slowest.optimizer_s,
        "fill_s": slowest.fill_s,
        "executable": all(rank.plan.executable for rank in slowest.ranks),
        "tokens_per_s_per_rank": tokens / slowest.stage_s / num_ranks, "groups": len(groups),
        **({"note": blind[0]} if blind else {}),
    }  # fmt: skip


def _homes(system: System, posed: Sequence[Problem], history: Sequence[Array | None], num_threads: int | None) -> Array:
    """Returns the homes of all groups, chosen from the load that the system foresees."""
    planner = system.planner
    if system.even or planner.home == Keep():
        return posed[0].home_LE
    posed = [foreseen(p, planner.foresight, h) for p, h in zip(posed, history, strict=True)]
    return planner.homes(*posed, num_threads=num_threads)


def home_moves_L(problem: Problem, home_LE: Array, home: object) -> Array:
    """Returns the seconds to move experts to the homes `home_LE`, float64 [L]. `home` may define the state bytes per weight."""
    return price_L(problem, home_LE, getattr(home, "state_bytes", Anneal().state_bytes))


def _run(system: System, posed: Problem, home_LE: Array, history_LE: Array | None, shared: _Shared) -> _Group:
    pp, vpp, trainer = shared.pp, shared.vpp, shared.trainer
    planner = dataclasses.replace(Planner(rank=()) if system.even else system.planner, home=Keep())
    alone = pp * vpp == 1
    moves_L = home_moves_L(posed, home_LE, system.planner.home)
    there = dataclasses.replace(posed, home_LE=home_LE)
    # Pipeline ranks move their layers in parallel.
    posed_ranks = on_pipeline(there, pp, vpp)
    of_rank = [np.isin(posed.moe_layer_L, one.moe_layer_L) for one in posed_ranks]
    moves_s = max(float(moves_L[layers].sum()) for layers in of_rank) * trainer.share_of_step(posed.M)
    ranks, cpu_s = [], 0.0
    for one, layers in zip(posed_ranks, of_rank, strict=True):
        seen_LE = None if history_LE is None else history_LE[layers]
        plan, report = planner.plan(one, history_LE=seen_LE, num_threads=shared.num_threads)
        cpu_s += sum(level.cpu_s for level in report.levels)
        ranks.append(PipelineRank(problem=one, plan=plan))
    moves_s += max(replacement_seconds(rank.problem, rank.plan) for rank in ranks)
    options: dict[str, Any] = {"prefetch": system.prefetch, "known": system.known, "plan_s": system.plan_s}
    options["outside_s_MG"] = head_seconds(posed)

    def timelines(full_stores: bool) -> list[Simulation]:
        if alone:
            return [simulate(there, ranks[0].plan, full_stores=full_stores, **options)]
        return simulate_pipeline(ranks, full_stores=full_stores, **options)

    simulations, fill_s = timelines(False), 0.0
    if any((rank.plan.transfers.link_C == Link.HOST).any() for rank in ranks):
        fill_s = simulations[0].total_s - timelines(True)[0].total_s
    return _Group(
        ranks=ranks, simulations=simulations, moves_s=moves_s, cpu_s=cpu_s, fill_s=fill_s,
        reduction_s=max(reduction_seconds(one, trainer) for one in posed_ranks),
        optimizer_s=max(optimizer_seconds(one, trainer) for one in posed_ranks),
    )  # fmt: skip


def _figures(name: str, done: Sequence[_Group], trainer: Trainer) -> dict[str, Any]:
    """Returns `FIGURES` over all groups and pipeline ranks."""
    pairs: list[tuple[Problem, Plan]] = [(rank.problem, rank.plan) for group in done for rank in group.ranks]
    rows = [plan_figures(name, problem, plan, static_s=0.0, trainer=trainer) for problem, plan in pairs]
    load_NG = np.concatenate([plan.load_NG for _, plan in pairs])
    skew_N = skew(load_NG[load_NG.any(axis=1)] if load_NG.any() else load_NG)
    links = rows[0]["bytes_by_link"]
    figures = {
        "skew_mean": float(skew_N.mean()), "skew_p99": float(np.quantile(skew_N, 0.99)), "skew_max": float(skew_N.max()),
        **{key: float(np.mean([row[key] for row in rows])) for key in _MEANS},
        "bytes_by_link": {link: float(np.mean([row["bytes_by_link"][link] for row in rows])) for link in links},
        "predicted_stage_s": max(max(stage_seconds(rank.plan)[0] for rank in group.ranks) + group.moves_s for group in done),
        "fits": all(row["fits"] for row in rows),
        "peak_bytes_with_reforward": max((row["peak_bytes_with_reforward"] for row in rows), key=lambda size: size or 0),
        **{key: max(row[key] for row in rows) for key in ("max_fanout", "peak_bytes", "host_bytes", "slots_per_rank")},
        "plan_us_per_layer": 1e6 * sum(group.cpu_s for group in done) / len(load_NG),
        "n_solved": len(load_NG),
    }  # fmt: skip
    assert set(FIGURES) <= {*figures, "predicted_speedup_vs_static"}
    return figures
