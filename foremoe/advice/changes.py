"""`advise`: simulates stages with possible changes and recommends one of the changes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from foremoe.advice.sample import sample, whole_stage
from foremoe.advice.slots import LEAST_GAIN, SlotChoice, choose_slots, fit_at_home, over
from foremoe.base.arrays import Array
from foremoe.machine.trainer import Trainer
from foremoe.planner.planner import Planner
from foremoe.problem.memory import Fit, buffer_bytes, fit, gigabytes
from foremoe.problem.problem import Problem
from foremoe.simulate.pipeline import on_pipeline
from foremoe.simulate.stage import even_routing, force_balanced, simulate
from foremoe.solvers.home.anneal import Anneal
from foremoe.solvers.home.price import price_L

# Letters: L layers, E experts.

LEAST_USE = 0.02
"""Smallest share by which foremoe must shorten the stage to be worth setting up."""


class Case(NamedTuple):
    """A problem, with the trainer around it and the number of pipeline ranks over which its layers are split."""

    problem: Problem
    trainer: Trainer
    pp: int = 1

    def ranks(self) -> list[Problem]:
        """Returns the problems of the pipeline ranks."""
        return on_pipeline(self.problem, self.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One possible change, with the gain that the simulated stage shows.

    Attributes:
        name: The change in words, for example ``"R = 2"``.
        speedup: Throughput with the change divided by throughput without it. The default `Planner` plans both.
        cost: Cost or requirement of the change, in words.
        case: The case after the change.
        fits: Whether the changed case fits into the memory of a rank.
    """

    name: str
    speedup: float
    cost: str
    case: Case
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Recommended change with the figures on which `advise` bases it.

    Attributes:
        speedup: Speed-up of the planned case over static placement without redundant slots.
        even_gain: Relative throughput that even routing would add to the planned case.
        fit: Memory of the fullest rank, including buffers. If the case does not fit with all experts at home, but may fit with an
            even load, this is the memory with the default plan.
        fits_bare: Whether the case fits into memory without redundant slots. If it does not, fewer slots do not help.
        changes: All changes that were tried. Changes of the number of slots come first, followed by all other changes in order of
            gain.
        slots: Result of `choose_slots`.
    """

    speedup: float
    even_gain: float
    fit: Fit
    fits_bare: bool
    changes: tuple[Change, ...]
    slots: SlotChoice

    @property
    def best(self) -> Change | None:
        """The recommended change, or None if no change gains 1 % (a layout: 5 %).

        A change that makes the case fit into memory has priority, first of all activation recomputation. The number of slots
        comes next, then the change with the largest gain. Slots have priority over other changes because they work in every
        trainer. `choose_slots` finds the number of slots. Layouts that do not fit are not recommended.
        """
        if not self.fit.fits:
            cures = [change for change in self.changes if change.fits and (change.name == RECOMPUTE or change.cost in REDEALT)]
            if cures:
                return min(cures, key=lambda change: change.name != RECOMPUTE)
        memory, fits = (RECOMPUTE, DO_NOT_RECOMPUTE), self.fit.fits or self.fits_bare
        possible = [c for c in self.changes if c.fits or not (fits or c.name in memory or c.cost in REDEALT)]
        paying = [change for change in possible if change.speedup >= 1.0 + _least(change)]
        slots = [change for change in paying if change.name == f"R = {self.slots.redundant}"]
        others = [change for change in paying if not _of_slots(change)]
        return next(iter(slots or others), None)

    def of_stage(self, speedup: float | None, share_of_balanced: float | None) -> Self:
        """Returns the advice with the figures of the simulated whole stage in place of the sample's, unless they are None."""
        even_gain = self.even_gain if share_of_balanced is None else 1.0 / share_of_balanced - 1.0
        return self if speedup is None else dataclasses.replace(self, speedup=speedup, even_gain=even_gain)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row for each entry of `changes`, with ``change``, ``speedup``, ``fits`` and ``cost``."""
        return [{"change": c.name, "speedup": c.speedup, "fits": c.fits, "cost": c.cost} for c in self.changes]

    @property
    def beside_even(self) -> str:
        """Returns a sentence that compares the case with even routing."""
        if self.even_gain <= -0.0005:
            return f"the plan is {1.0 / (1.0 + self.even_gain) - 1.0:.1%} faster than even routing without slots"
        return f"even routing would gain {max(self.even_gain, 0.0):.1%} more"

    def __str__(self) -> str:
        best, most = self.best, self.speedup * max((c.speedup for c in self.changes if _of_slots(c)), default=1.0)
        most = max(self.speedup, most)
        if most < 1.0 + LEAST_USE:
            longer = f"the stage would take {over(1.0, self.speedup) - 1.0:.1%} longer"
            return f"do not use foremoe here: {longer if self.speedup < 1.0 else f'it would gain {most - 1.0:.1%}'}"
        if best is not None and not self.fit.fits and (best.name == RECOMPUTE or best.cost in REDEALT):
            return f"{best.name}: the stage does not fit without it ({best.cost})"
        needs = self.fit.text().partition(";")[0].replace("fit: ", "fit: needs ")
        unfit = "" if self.fit.fits else f"{needs}, and no change that was tried makes it fit; "
        if best is None:
            where = "" if any(change.cost in REDEALT for change in self.changes) else " with these micro-steps and ranks"
            return f"{unfit or f'nothing to change{where}: '}{self.beside_even}"
        # Changes of the number of slots, among which `choose_slots` chooses, come first in `changes`.
        other = next((c for c in self.changes if not _of_slots(c) and c.fits and c.speedup >= best.speedup + _least(c)), None)
        larger = "" if other is None else f"; {other.name} would gain {other.speedup - 1.0:.1%} ({other.cost})"
        return f"{unfit}{best.name}: {best.speedup - 1.0:.1%} more tokens per second ({best.cost}){larger}"


LAYOUT_ERROR = 0.05
"""Largest error of an estimated layout (docs/advice.md). A layout that gains less is not recommended."""
LAYOUT, LONGER = f"another layout, ±{LAYOUT_ERROR * 100:.0f} %", "other micro-steps"
REDEALT = (LAYOUT, LONGER)  # costs of the cases in `redealt`, which not every command tries
RECOMPUTE, DO_NOT_RECOMPUTE = "turn on activation recomputation", "turn off activation recomputation"


def advise(
    problem: Problem, *, trainer: Trainer | None = None, pp: int = 1, slots: SlotChoice | None = None,
    redealt: Mapping[str, Case] | None = None, num_threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Advice:  # fmt: skip
    """Tries changes of the current case one at a time and recommends one of them.

    The changes are other numbers of redundant slots, homes from `Anneal`, the other dispatch, activation recomputation on or off,
    and the cases in `redealt`. If experts get other homes, the time to move weights and optimizer state counts once per stage.
    For each change, the default planner plans a sample of the stage, which is then simulated.

    Args:
        problem: The current case.
        trainer: Optimizer, number of EP groups and time outside the stage. Defaults to ``Trainer()``.
        pp: Number of pipeline ranks over which the layers are split.
        slots: Result of `choose_slots` for this problem and trainer. If None, `choose_slots` is called.
        redealt: Further cases, keyed by name, with the same routing but other micro-steps, EP degrees or pipeline ranks. They are
            compared by tokens per second and rank.
        num_threads: Number of planning threads. Defaults to all cores.
        progress: Callback that gets (change, changes done, number of changes).

    Raises:
        InputError: The problem has no counts by source rank.

    Example:
        >>> print(foremoe.advise(problem))
        nothing to change with these micro-steps and ranks: even routing would gain 2.2% more
    """
    trainer = trainer or Trainer()
    case = Case(problem, trainer, pp)
    if slots is None:
        slots = choose_slots(problem, trainer=trainer, pp=pp, num_threads=num_threads)
    of_slots_s = {f"R = {option.redundant}": option.stage_s for option in slots.options}  # simulated already
    tried = list(_changes(case, slots))
    for name, other in (redealt or {}).items():
        tried.append((name, LONGER if (other.problem.G, other.pp) == (problem.G, pp) else LAYOUT, other))
    now_s, changes = stage_seconds(case, case, num_threads=num_threads), list[Change]()
    bare = case._replace(problem=dataclasses.replace(problem, redundant=0))
    for i, (name, cost, other) in enumerate(tried):
        other_s = of_slots_s[name] if name in of_slots_s else stage_seconds(other, case, num_threads=num_threads)
        changes.append(Change(name=name, speedup=over(now_s, other_s), cost=cost, case=other, fits=_fit(other, num_threads).fits))
        if progress is not None:
            progress(name, i + 1, len(tried))
    changes.sort(key=lambda change: (not _of_slots(change), -change.speedup))
    return Advice(
        speedup=over(slots.options[0].stage_s, now_s),
        even_gain=over(now_s, stage_seconds(case, case, even=True)) - 1.0,
        fit=_fit(case, num_threads), fits_bare=_fit(bare).fits, changes=tuple(changes), slots=slots,
    )  # fmt: skip


def _fit(case: Case, num_threads: int | None = None) -> Fit:
    ranks, buffers = case.ranks(), buffer_bytes(case.problem, case.problem.R)
    at_home = fit_at_home(ranks, case.trainer)
    again = at_home.reforward_bytes
    found = Fit(at_home.peak_bytes + buffers, None if again is None else again + buffers, at_home.memory_bytes)
    if found.fits or not case.problem.R or not fit_at_home([even_routing(rank) for rank in ranks], case.trainer).fits:
        return found
    placements = [Planner().plan(rank, num_threads=num_threads)[0].placement for rank in ranks]
    return Fit.worst([fit(rank, placement, trainer=case.trainer) for rank, placement in zip(ranks, placements, strict=True)])


def _least(change: Change) -> float:
    return LAYOUT_ERROR if change.cost == LAYOUT else LEAST_GAIN


def _of_slots(change: Change) -> bool:
    return change.name.startswith("R = ")


def stage_seconds(
    case: Case, of: Case, *, even: bool = False, num_threads: int | None = None, state_bytes: float = Anneal().state_bytes
) -> float:
    """Returns the time in seconds that `case` takes to train as many tokens per rank as `of` has.

    The time includes moves of experts to other homes. `state_bytes` is the size of the optimizer state that moves with every
    weight.
    """
    problem = case.problem
    # Other homes have other skews, but the same rows must be compared.
    same = of.problem if (problem.M, problem.L) == (of.problem.M, of.problem.L) else problem
    part = sample(problem, skewed=same)
    run = force_balanced(part) if even else simulate(part, Planner().plan(part, num_threads=num_threads)[0])
    whole = whole_stage(problem, part, run, case.trainer, case.ranks())
    moves_s = 0.0
    if problem.L == of.problem.L and problem.G == of.problem.G and (problem.home_LE != of.problem.home_LE).any():
        moves_s = float(price_L(of.problem, problem.home_LE, state_bytes).sum()) * of.trainer.share_of_step(problem.M) / case.pp
    return whole.seconds(problem.M * over(_tokens(of), _tokens(case))) + moves_s


def _tokens(case: Case) -> float:
    """Returns the number of tokens per rank over the stage, or the number of pairs if tokens are not counted."""
    counts = case.problem.load_MLE if case.problem.tokens_MG is None else case.problem.tokens_MG
    return float(counts.sum(dtype=np.int64)) / (case.problem.G * case.pp)


def _changes(case: Case, slots: SlotChoice) -> Iterator[tuple[str, str, Case]]:
    """Yields name, cost and case of every change that keeps the routing and the ranks."""
    problem, trainer = case.problem, case.trainer
    for option in slots.options:
        if option.redundant != problem.R:
            size = gigabytes(option.buffer_bytes)
            changed = dataclasses.replace(problem, redundant=option.redundant)
            yield f"R = {option.redundant}", f"{size} GB a rank for buffers", case._replace(problem=changed)
    home_LE = Anneal().solve(problem)
    moved = experts_moved(problem, home_LE)
    if moved:
        there = case._replace(problem=dataclasses.replace(problem, home_LE=home_LE))
        yield "homes by Anneal", f"{moved} of {problem.E} experts of a layer move, with optimizer state", there
    other = "pairs" if problem.cluster.dispatch == "node" else "node"
    if problem.cluster.num_nodes > 1:
        cluster = dataclasses.replace(problem.cluster, dispatch=other)
        needs = "DeepEP or HybridEP" if other == "node" else "the plain all-to-all"
        yield f"dispatch {other}", f"needs {needs}", case._replace(problem=dataclasses.replace(problem, cluster=cluster))
    schedule = problem.schedule
    if schedule.trains:
        again = dataclasses.replace(schedule, reforward=not schedule.reforward, block_L=None)
        changed = dataclasses.replace(problem, schedule=again)
        there = case._replace(problem=changed)
        peak = gigabytes(fit_at_home(there.ranks(), trainer).peak_bytes)
        yield DO_NOT_RECOMPUTE if schedule.reforward else RECOMPUTE, f"then {peak} GB a rank at home", there


def experts_moved(problem: Problem, home_LE: Array) -> str:
    """Returns text with the mean number of experts per layer that move to another rank, or an empty string if none do."""
    moved = float((problem.home_LE // problem.B != home_LE // problem.B).sum()) / problem.L
    return f"{moved:.0f}" if moved >= 1.0 else f"{moved:.1f}" if moved >= 0.1 else "under 0.1" if moved else ""
