"""Planner: composes the levels into one plan, keeps the best of them per row, and says how it went."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.errors import InputError, PlanError
from foremoe.base.parallel import row_runner
from foremoe.levels import HomeSolver, OrderSolver, PackSolver, PathSolver, RankSolver, SplitSolver
from foremoe.plan.cost_in_order import bound_as_sent, cost_as_sent, refusal
from foremoe.plan.header import PlanHeader, PlanKey
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.planner.start import starting_placement, with_quotas
from foremoe.planner.summary import LevelSummary, PlanSummary, level_summary
from foremoe.problem.bounds import load_bound, row_bound
from foremoe.problem.foresight import Foresight, predicted_load, require_foresight
from foremoe.problem.laws import placement_violations, slot_violations
from foremoe.problem.objective import price_rows, row_objective
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.solvers.home.keep import Keep
from foremoe.solvers.path.deadline import Deadline
from foremoe.solvers.rank.chain import Chain
from foremoe.solvers.split.exact import ExactSplit
from foremoe.workload.packing import AsGiven
from foremoe.workload.workload import Workload

if TYPE_CHECKING:
    from foremoe.routing.trace import RoutingTrace

# Letters: M micro-steps, L layers, N = M*L rows, E experts, G ranks, S slots.


@dataclass(frozen=True, slots=True)
class Planner:
    """A composition of levels; every field takes a solver instance, and its repr names it in tables and files.

    Attributes:
        pack, home, rank, split, order, path: the levels. `rank` holds node- and rank-level solvers, each starting from the one
            before. `split` None keeps the solvers' quotas and fills missing ones exactly. `order` None plans every row alone, in
            the order given, and prices it with all its copies sent.
        foresight: which load the levels see; see `foresight.predicted_load`. Quotas are always split on the real load.
        guard: per row, keep the best of static, the start and every level's output under the objective.
    """

    pack: PackSolver = field(default_factory=AsGiven)
    home: HomeSolver = field(default_factory=Keep)
    rank: tuple[RankSolver, ...] = field(default_factory=lambda: (Chain(),))
    split: SplitSolver | None = None
    order: OrderSolver | None = None
    path: PathSolver = field(default_factory=Deadline)
    foresight: Foresight = "exact"
    guard: bool = True

    def __post_init__(self) -> None:
        require_foresight(self.foresight)
        for name, base in (("pack", PackSolver), ("home", HomeSolver), ("path", PathSolver)):
            if not isinstance(getattr(self, name), base):
                raise InputError(f"{name} must be a {base.__name__}; got {getattr(self, name)!r}.")
        if self.split is not None and not isinstance(self.split, SplitSolver):
            raise InputError(f"split must be a SplitSolver or None; got {self.split!r}.")
        if self.order is not None and not isinstance(self.order, OrderSolver):
            raise InputError(f"order must be an OrderSolver or None; got {self.order!r}.")
        if self.order is not None and self.foresight != "exact":
            raise InputError(f'order needs foresight="exact", since it plans ahead; got {self.foresight!r}.')
        if self.order is not None and self.split is not None:
            raise InputError(f"order splits quotas itself, by what is resident; leave out split={self.split!r}.")
        if not isinstance(self.rank, tuple) or not all(isinstance(s, RankSolver) for s in self.rank):
            raise InputError(f"rank must be a tuple of Solvers such as (Chain(),); got {self.rank!r}.")
        if not isinstance(self.guard, bool):
            raise InputError(f"guard must be True or False; got {self.guard!r}.")

    @property
    def keeps_homes(self) -> bool:
        """True if every level leaves homes in their base slots, so that plans are executable."""
        return all(solver.keeps_homes for solver in self.rank)

    def using(self, *solvers: Any) -> Planner:
        """The same planner with levels replaced: each solver goes to its own `level`, rank solvers together in order."""
        changed: dict[str, Any] = {}
        for solver in solvers:
            level = getattr(solver, "level", None)
            if level == "rank":
                changed[level] = (*changed.get(level, ()), solver)
            elif level in ("pack", "home", "split", "order", "path"):
                changed[level] = solver
            else:
                raise InputError(f"{solver!r} has no level; derive it from one of the classes in foremoe.solvers.base.")
        return dataclasses.replace(self, **changed)

    def workload(self, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, **options: Any) -> Workload:
        """Deals a trace to micro-steps and source ranks with this planner's pack level; options as `Workload.from_trace`."""
        return Workload.from_trace(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, packer=self.pack, **options)

    def homes(self, *problems: Problem, num_threads: int | None = None) -> Array:
        """int32 [L, E] home slots for a whole step, decided over all its stages together; never called by `plan`.

        Args:
            num_threads: default: every core; the result is the same.
        """
        if not problems:
            raise InputError("homes needs at least one problem.")
        first = problems[0]
        for other in problems[1:]:
            if (other.L, other.E, other.G) != (first.L, first.E, first.G):
                raise InputError(
                    f"homes are decided for one set of layers, experts and ranks; got {first.L}, {first.E}, {first.G} and"
                    f" {other.L}, {other.E}, {other.G}."
                )
        load_MLE = np.concatenate([p.load_MLE for p in problems])
        make = Schedule.accumulate if first.stage == "update" else Schedule.forward_only
        known: dict[str, Any] = {}
        for name in ("load_MLGE", "tokens_MG", "attention_MG"):
            parts = [getattr(p, name) for p in problems]
            known[name] = None if any(part is None for part in parts) else np.concatenate(parts)
        together = dataclasses.replace(first, load_MLE=load_MLE, schedule=make(len(load_MLE)), **known)
        with row_runner(num_threads):
            return self.home.solve(first if len(problems) == 1 else together)

    def plan(
        self,
        problem: Problem,
        start: Plan | Placement | None = None,
        *,
        key: PlanKey | None = None,
        history_LE: Array | None = None,
        num_threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancel: Event | None = None,
    ) -> tuple[Plan, PlanSummary]:
        """Plans every layer of every micro-step.

        Never raises for a hard instance: rows that a limit or a cancel cut short hold the best valid placement found, and
        ``Plan.stop_ML`` says so.

        Args:
            problem: what to plan.
            start: a plan or placement to start from (default: static); on another load its quotas are split anew.
            key: which part of training this is; default: step 0 of the problem's stage.
            history_LE: int32, an earlier step's load, for foresight "previous".
            num_threads: default: every core.   progress: called with (rows done, rows in all).   cancel: stops early when set.

        Raises:
            InputError: the start or history does not fit.   PlanError: a solver returned an invalid placement.
        """
        began = time.perf_counter()
        warnings: list[str] = []
        if key is not None and key.stage != problem.stage:
            raise InputError(f"the key is of stage {key.stage} but the problem of stage {problem.stage}; make them equal.")
        with row_runner(num_threads) as runner:
            seen = self._seen(problem, history_LE)
            first = starting_placement(seen, start, self.split or ExactSplit())
            solvers = self.rank if problem.R >= 1 and problem.G >= 2 else ()
            done = 0

            def step(rows: int) -> None:
                nonlocal done
                done += rows
                if progress is not None:
                    progress(min(done, total), total)

            total = max(1, len(solvers)) * problem.N
            levels: list[LevelSummary] = []
            best = current = first
            best_N = start_N = row_objective(seen, first)
            if self.guard and start is not None:
                # A start may be worse than doing nothing; the guard promises to be worse than neither.
                static = seen.static()
                static_N = row_objective(seen, static)
                best, best_N = first.where(start_N <= static_N, static), np.minimum(start_N, static_N)
            levels.append(level_summary("start", (0.0, 0.0), seen, first, start_N, 0))
            stop_N, kept_N = np.full(problem.N, Stop.DONE, np.uint8), np.ones(problem.N, bool)
            proven_N = np.full(problem.N, -np.inf)
            for solver in solvers:
                if cancel is not None and cancel.is_set():
                    stop_N[:] = Stop.CANCELLED
                    warnings.append(f"cancelled before {solver!r} ran.")
                    break
                at, cpu_at = time.perf_counter(), time.thread_time()
                with row_runner(runner.num_threads, step, cancel):
                    current = self._completed(solver, seen, solver.solve(seen, current))
                spent = (time.perf_counter() - at, time.thread_time() - cpu_at)
                self._verify(solver, seen, current)
                objective_N = row_objective(seen, current)
                better_N = objective_N < best_N if self.guard else np.ones(problem.N, bool)
                level_stop_N = np.full(problem.N, Stop.DONE, np.uint8) if current.stop_N is None else current.stop_N
                stop_N = np.where(objective_N > best_N, Stop.FELL_BACK, level_stop_N) if self.guard else level_stop_N
                stop_N = np.where(level_stop_N == Stop.CANCELLED, Stop.CANCELLED, stop_N)
                if current.bound_N is not None and solver.keeps_homes:
                    proven_N = np.maximum(proven_N, current.bound_N)
                best, best_N = current.where(better_N, best), np.where(better_N, objective_N, best_N)
                kept_N &= ~better_N
                improved = int((objective_N < start_N).sum())
                levels.append(level_summary(repr(solver), spent, seen, best, best_N, improved))
            if (stop_N == Stop.CANCELLED).any() and not warnings:
                warnings.append(
                    f"cancelled; {int((stop_N == Stop.CANCELLED).sum())} of {problem.N} rows hold what they started from."
                )
            at, cpu_at = time.perf_counter(), time.thread_time()
            with row_runner(runner.num_threads, None, cancel):
                order_M, best = self.in_order(problem, best, warnings, cancel)
            spent = (time.perf_counter() - at, time.thread_time() - cpu_at)
            if seen is not problem or order_M is not None:
                # What is optimal for a predicted load, or for a row alone, proves nothing on the real one, or in a sequence.
                stop_N = np.where(stop_N == Stop.OPTIMAL, Stop.DONE, stop_N)
            placement = self._on_real_load(problem, seen, best, history_LE)
            plan = self.assemble(problem, placement, stop_N, proven_N if seen is problem else None, key, order_M)
            if order_M is not None:
                objective_N = plan.objective_ML.ravel()
                improved = int((objective_N < start_N).sum())
                levels.append(level_summary(repr(self.order), spent, problem, placement, objective_N, improved))
        stops = {stop.name: int((plan.stop_ML == stop).sum()) for stop in Stop if (plan.stop_ML == stop).any()}
        return plan, PlanSummary(
            plan_s=time.perf_counter() - began, levels=tuple(levels), rows=problem.N,
            rows_kept_at_start=int(kept_N.sum()), stops=stops, warnings=tuple(warnings),
        )  # fmt: skip

    def _seen(self, problem: Problem, history_LE: Array | None) -> Problem:
        """The problem as the levels see it: with the predicted load."""
        if history_LE is not None:
            history_LE = frozen_array(history_LE, np.int32, "history_LE", (problem.L, problem.E))
        load_MLE = predicted_load(problem.load_MLE, self.foresight, history_LE)
        return problem if load_MLE is problem.load_MLE else problem.with_load(load_MLE)

    def _completed(self, solver: RankSolver, problem: Problem, placement: Placement) -> Placement:
        """A level's output with quotas; nothing compiled may read it before its slots are known to exist."""
        shape = (problem.N, problem.G, problem.S)
        self._refuse(solver, slot_violations(placement.expert_NGS, shape, problem.E, problem.L))
        if placement.quota_NGS is None or self.split is not None:
            split = self.split or ExactSplit()
            filled = with_quotas(problem, placement.expert_NGS, split, solver.keeps_homes)
            placement = dataclasses.replace(filled, bound_N=placement.bound_N, stop_N=placement.stop_N)
        return placement

    def _verify(self, solver: RankSolver | OrderSolver, problem: Problem, placement: Placement) -> None:
        self._refuse(solver, placement_violations(problem, placement, keeps_homes=self.keeps_homes))

    def _refuse(self, solver: RankSolver | OrderSolver, broken: list[PlanError]) -> None:
        if broken:
            raise PlanError(broken[0].law, broken[0].where, f"{solver!r} returned an invalid placement: {broken[0].message}")

    def _on_real_load(self, problem: Problem, seen: Problem, placement: Placement, history_LE: Array | None) -> Placement:
        """The placement with its quotas split on the real load, which is all that a prediction can leave to do."""
        if seen is problem:
            return placement
        expert_NGS = placement.expert_NGS
        if self.foresight == "previous" and history_LE is None:
            expert_NGS = expert_NGS.copy()
            expert_NGS[: problem.L] = problem.static().expert_NGS[: problem.L]
        return with_quotas(problem, expert_NGS, self.split or ExactSplit(), self.keeps_homes)

    def in_order(
        self, problem: Problem, placement: Placement, warnings: list[str], cancel: Event | None
    ) -> tuple[Array | None, Placement]:
        """What the order level makes of finished rows; None for the order if there is no such level, or a warning why not."""
        if self.order is None:
            return None, placement
        cancelled = cancel is not None and cancel.is_set()
        why_not = refusal(problem, self.keeps_homes) or "the plan was cancelled." * cancelled
        if why_not:
            warnings.append(f"{self.order!r} was left out: {why_not}")
            return None, placement
        order_M, placement = self.order.solve(problem, placement)
        self._verify(self.order, problem, placement)
        return order_M, placement

    def assemble(
        self, problem: Problem, placement: Placement, stop_N: Array, proven_N: Array | None, key: PlanKey | None,
        order_M: Array | None,
    ) -> Plan:  # fmt: skip
        """The plan of finished rows; `order_M` as `in_order` returns it."""
        M, L, G, S = problem.M, problem.L, problem.G, problem.S
        cost = problem.cost
        load_bound_N = load_bound(problem)
        bound_N = row_bound(problem, load_bound_N) if order_M is None else bound_as_sent(problem, load_bound_N)
        if proven_N is not None and order_M is None:
            # A solver's bound may come from floating-point search; it never exceeds what the plan reaches.
            objective_N = row_objective(problem, placement)
            bound_N = np.maximum(bound_N, np.minimum(proven_N, objective_N))
            if cost.objective == "balance":
                load_bound_N = bound_N
                # Meeting a lower bound is a proof, whichever solver found the row.
                settled_N = (objective_N <= bound_N) & (stop_N != Stop.CANCELLED) & self.keeps_homes
                stop_N = np.where(settled_N, Stop.OPTIMAL, stop_N)
        plan = Plan(
            header=PlanHeader(
                key=key if key is not None else PlanKey(stage=problem.stage),
                planner=repr(self), model=problem.model, cluster=problem.cluster, cost=cost, slots=problem.slots,
                schedule=problem.schedule, redundant=problem.R, replicas=problem.replicas, keeps_homes=self.keeps_homes,
                moe_layer_L=problem.moe_layer_L, trace_id=problem.trace_id, dealt=problem.dealt,
            ),
            home_LE=problem.home_LE,
            load_MLE=problem.load_MLE,
            expert_MLGS=placement.expert_NGS.reshape(M, L, G, S),
            quota_MLGS=placement.quotas_NGS.reshape(M, L, G, S),
            transfers=TransferList.none(),
            order_M=np.arange(M, dtype=np.int32) if order_M is None else order_M,
            cost_ML=price_rows(problem, placement).reshape(M, L),
            bound_ML=bound_N.reshape(M, L),
            load_bound_ML=load_bound_N.reshape(M, L),
            stop_ML=stop_N.reshape(M, L),
            resident_LGS=problem.resident_LGS,
        )  # fmt: skip
        if not self.keeps_homes:
            return plan
        plan = plan.rederived()
        if order_M is not None:
            plan = dataclasses.replace(plan, cost_ML=cost_as_sent(problem, placement, plan.transfers).reshape(M, L))
        return dataclasses.replace(plan, transfers=self.path.solve(problem, plan.transfers))
