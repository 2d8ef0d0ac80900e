"""Planner: runs the levels to make one plan, and keeps for each row the best result of any level."""

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Self

import numpy as np

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.errors import InputError
from foremoe.base.parallel import row_runner
from foremoe.base.version import __version__
from foremoe.levels import HomeSolver, PackSolver, PathSolver, RankSolver, SplitSolver
from foremoe.plan.header import PlanHeader, PlanKey
from foremoe.plan.plan import Plan
from foremoe.planner.answers import homes_of, placement_of, slots_of
from foremoe.planner.assembly import assemble
from foremoe.planner.best import BestRows
from foremoe.planner.start import pack_that_ran, require_decided, served, starting_placement, whole_step, with_quotas
from foremoe.planner.summary import PlanSummary, Stopwatch, count_stops, unknown_share
from foremoe.problem.foresight import Foresight, Rerouted, foreseen, require_foresight
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.solvers.home.keep import Keep
from foremoe.solvers.path.deadline import Deadline
from foremoe.solvers.robust.robust import Robust
from foremoe.solvers.search.search import Search
from foremoe.solvers.split.exact import ExactSplit
from foremoe.workload.packing import AsGiven
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, N = M*L rows, E experts, G ranks, S slots.

# Default rank levels. They are recognised by identity, so that `dataclasses.replace` of the foresight alone also changes them.
_KNOWN: tuple[RankSolver, ...] = (Search(),)
_FORESEEN: tuple[RankSolver, ...] = (Robust(),)


@dataclass(frozen=True, slots=True)
class Planner:
    """A composition of levels. Every level is a solver instance, and the planner's repr is its name in tables and files.

    Attributes:
        pack: Level that assigns sequences to micro-steps and source ranks, run by `workload`.
        home: Level that chooses the homes of experts for a step, run by `homes`.
        rank: Solvers of the node and rank levels. Each solver starts from the result of the solver before it. Defaults to
            ``(Search(),)`` if foresight is "exact" or `Rerouted`, and otherwise to ``(Robust(),)``.
        split: Level that splits every expert's pairs over its replicas. If None, the quotas of the solvers are kept, and missing
            quotas are split exactly.
        path: Level that chooses the link of every copy.
        foresight: Load that the levels see (`foresight.foreseen`). After the levels have run, quotas are split on the real load.
            With `Rerouted`, the real load is instead served as a runtime would serve it.
        guard: Whether each row gets the best of the static placement, the start and the result of every level. With objective
            "time", `foremoe.price` compares them.

    Raises:
        InputError: A level has the wrong type, or two levels cannot be combined.

    Example:
        >>> foremoe.Planner().rank
        (Search(effort=None),)
        >>> foremoe.Planner(rank=(foremoe.solvers.Quota(),), guard=False).plan(problem)[0]
        Plan(4 micro-steps, 4 layers, 8 ranks, 32 experts, R=1, 74 replicas, stage='update', objective='time')
    """

    pack: PackSolver = field(default_factory=AsGiven)
    home: HomeSolver = field(default_factory=Keep)
    rank: tuple[RankSolver, ...] = field(default_factory=lambda: _KNOWN)
    split: SplitSolver | None = None
    path: PathSolver = field(default_factory=Deadline)
    foresight: Foresight = "exact"
    guard: bool = True

    def __post_init__(self) -> None:
        require_foresight(self.foresight)
        if self.rank is _KNOWN or self.rank is _FORESEEN:
            known = self.foresight == "exact" or isinstance(self.foresight, Rerouted)
            object.__setattr__(self, "rank", _KNOWN if known else _FORESEEN)
        for name, kind in (("pack", PackSolver), ("home", HomeSolver), ("path", PathSolver)):
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"{name} must be a {kind.__name__}; got {getattr(self, name)!r}.")
        if not isinstance(self.split, SplitSolver | None):
            raise InputError(f"split must be a SplitSolver or None; got {self.split!r}.")
        if not isinstance(self.rank, tuple) or not all(isinstance(s, RankSolver) for s in self.rank):
            raise InputError(f"rank must be a tuple of Solvers such as (Search(),); got {self.rank!r}.")
        if not isinstance(self.guard, bool):
            raise InputError(f"guard must be True or False; got {self.guard!r}.")

    @property
    def keeps_homes(self) -> bool:
        """True if every rank solver leaves experts at home in their base slots, so that plans are executable."""
        return all(solver.keeps_homes for solver in self.rank)

    def refusal(self, problem: Problem) -> str | None:
        """Returns the reason why a rank solver cannot plan `problem`, for example a missing module. None if all solvers can."""
        missing = [name for solver in self.rank for name in solver.requires if importlib.util.find_spec(name) is None]
        if missing:
            return f"needs {', '.join(missing)}; pip install 'foremoe[exact]'"
        return next((reason for solver in self.rank if (reason := solver.refusal(problem)) is not None), None)

    def using(self, *solvers: Any) -> Self:
        """Returns the planner with some levels replaced. Each solver replaces its own `level`. Rank solvers keep their order.

        Example:
            >>> foremoe.Planner().using(foremoe.solvers.Greedy(), foremoe.solvers.Even()).rank
            (Greedy(),)
        """
        changed: dict[str, Any] = {}
        for solver in solvers:
            level = getattr(solver, "level", None)
            if level == "rank":
                changed[level] = (*changed.get(level, ()), solver)
            elif level in ("pack", "home", "split", "path"):
                changed[level] = solver
            else:
                raise InputError(f"{solver!r} has no level; derive it from one of the classes in foremoe.solvers.base.")
        return dataclasses.replace(self, **changed)

    def workload(self, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, **options: Any) -> Workload:
        """Packs a trace with the pack level and returns the resulting counts. `options` are those of `Workload.from_trace`."""
        return Workload.from_trace(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, packer=self.pack, **options)

    def homes(self, *problems: Problem, num_threads: int | None = None) -> Array:
        """Chooses home slots for a whole step from the loads of all its stages. `plan` never calls this method.

        Args:
            problems: One problem per stage. An InputError is raised unless all problems have the same layers, experts and ranks.
            num_threads: Number of threads, which does not change the result. Defaults to all cores.

        Returns:
            Home slot g*B + b of every expert, int32 [L, E], as `Problem.of` takes it in ``home_LE``.
        """
        with row_runner(num_threads):
            return homes_of(self.home, whole_step(problems))

    def plan(
        self, problem: Problem, start: Plan | Placement | None = None, *, key: PlanKey | None = None,
        history_LE: Array | None = None, num_threads: int | None = None,
        progress: Callable[[int, int], None] | None = None, cancel: Event | None = None,
    ) -> tuple[Plan, PlanSummary]:  # fmt: skip
        """Plans every layer of every micro-step with the levels *rank*, *split* and *path*.

        A problem that is hard to solve never raises an error. If a limit or `cancel` ends planning early, each row holds the best
        valid placement found, and ``Plan.stop_ML`` gives the reason. The methods `workload` and `homes` run the other two levels.

        Args:
            problem: Problem to plan.
            start: Plan or placement to start from. The quotas of the start are split again if they do not fit the load. Defaults
                to the static placement, with every expert at home.
            key: Position of the plan in training. Defaults to step 0 of the problem's stage.
            history_LE: Load of an earlier step for foresight "previous", int32 [L, E].
            num_threads: Number of planning threads. Defaults to all cores.
            progress: Callback that gets (rows done, number of rows).
            cancel: Event that stops planning early when it is set.

        Returns:
            The plan, whose header names the levels that ran, and a summary of how it was planned.

        Raises:
            InputError: The start or history does not fit, or the pack or home level of this planner has not run (see `what_ran`).
            PlanError: The result of a solver breaks a law.

        Example:
            >>> found, how = foremoe.Planner().plan(problem)
            >>> how.rows
            16
            >>> found.check(problem)
        """
        watch, warnings = Stopwatch(), list[str]()
        if not isinstance(problem, Problem):
            raise InputError(f"a planner plans a Problem, not a {type(problem).__name__}; give Problem.of(workload, cluster).")
        if key is not None and key.stage != problem.stage:
            raise InputError(f"the key is of stage {key.stage} but the problem of stage {problem.stage}; make them equal.")
        with row_runner(num_threads) as runner:
            ran = self.what_ran(problem)
            if history_LE is not None:
                history_LE = frozen_array(history_LE, np.int32, "history_LE", (problem.L, problem.E))
            seen = foreseen(problem, self.foresight, history_LE)
            current = starting_placement(seen, start, self.split or ExactSplit())
            solvers = self.rank if problem.R >= 1 and problem.G >= 2 else ()
            # A start may be worse than the static placement. With the guard, the result is not worse than either.
            best = BestRows(seen, current, seen.static() if self.guard and start is not None else None)
            count = _counter(progress, max(1, len(solvers)) * problem.N)
            for solver in solvers:
                if cancel is not None and cancel.is_set():
                    best.stop_N[:] = Stop.CANCELLED
                    warnings.append(f"cancelled before {solver!r} ran.")
                    break
                level = Stopwatch()
                with row_runner(runner.num_threads, count, cancel):
                    current = self._completed(solver, seen, slots_of(solver, seen, solver.solve(seen, current)))
                spent = level.spent()
                placement_of(solver, seen, current, self.keeps_homes)
                # The guard sees only one foreseen load, so it cannot judge a solver that considers several.
                best.take(solver, current, spent, guard=self.guard and not (solver.foresees and seen is not problem))
            if (num_cancelled := int((best.stop_N == Stop.CANCELLED).sum())) and not warnings:
                warnings.append(f"cancelled; {num_cancelled} of {problem.N} rows hold the placement from which they started.")
            header = ran.header(problem, key)
            if seen is problem:
                plan = assemble(header, self.path, problem, best.placement, best.stop_N, proven_N=best.proven_N)
            else:
                # A proof for a predicted load proves nothing about the real one.
                placement = self._on_real_load(problem, seen, best.placement, history_LE)
                plan = assemble(header, self.path, problem, placement, _unproven(best.stop_N))
        return plan, PlanSummary(
            plan_s=watch.spent()[0], levels=tuple(best.levels), rows=problem.N, rows_kept_at_start=int(best.kept_N.sum()),
            stops=count_stops(plan.stop_ML), warnings=tuple(warnings), unknown_share=unknown_share(problem),
            compile_s=watch.compile_s(),
        )  # fmt: skip

    def what_ran(self, problem: Problem) -> Self:
        """Returns the planner with the pack and home levels that made `problem`. The header of a plan records this planner.

        The pack level is left out if the problem does not record one. The home level counts as run if the homes are no longer in
        order or if the level would leave them in order.

        Raises:
            InputError: Another pack level packed this problem, or the home level would move experts but has not run.
        """
        require_decided(self.home, problem)
        return dataclasses.replace(self, pack=pack_that_ran(self.pack, problem))

    def header(self, problem: Problem, key: PlanKey | None) -> PlanHeader:
        """Returns the header of a plan that this planner makes."""
        return PlanHeader(
            key=key if key is not None else PlanKey(stage=problem.stage),
            planner=repr(self), model=problem.model, cluster=problem.cluster, cost=problem.cost,
            schedule=problem.schedule, redundant=problem.R, slot_depth=problem.slot_depth, replicas=problem.replicas,
            keeps_homes=self.keeps_homes, moe_layer_L=problem.moe_layer_L, trace_id=problem.trace_id, dealt=problem.dealt,
            foremoe=__version__,
        )  # fmt: skip

    def _completed(self, solver: RankSolver, problem: Problem, placement: Placement) -> Placement:
        """Returns the placement of a level, with quotas from the split level if it needs them."""
        if placement.quota_NGS is None or self.split is not None:
            return with_quotas(problem, placement, self.split or ExactSplit(), solver.keeps_homes)
        return placement

    def _on_real_load(self, problem: Problem, seen: Problem, placement: Placement, history_LE: Array | None) -> Placement:
        """Returns the placement with its quotas split on the real load, or served if routing is predicted by `Rerouted`."""
        if isinstance(self.foresight, Rerouted) and self.keeps_homes:
            return served(problem, seen, placement)
        expert_NGS = placement.expert_NGS
        if self.foresight == "previous" and history_LE is None:
            expert_NGS = expert_NGS.copy()
            expert_NGS[: problem.L] = problem.static().expert_NGS[: problem.L]
        placement = Placement(expert_NGS=expert_NGS)
        return with_quotas(problem, placement, self.split or ExactSplit(), self.keeps_homes, copied=True)


def _unproven(stop_N: Array) -> Array:
    return np.where(stop_N == Stop.OPTIMAL, Stop.DONE, stop_N)


def _counter(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Returns a function that adds up finished rows and reports them."""
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(min(done, total), total)

    return count
