"""`choose_slots`: finds the number of redundant slots that pays off, from simulated stages of sampled rows."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foremoe.advice.sample import sample, whole_stage
from foremoe.base.errors import InputError
from foremoe.machine.trainer import Trainer
from foremoe.planner.planner import Planner
from foremoe.problem.memory import RETURN_BYTES, Fit, buffer_bytes, fit, gigabytes
from foremoe.problem.problem import Problem
from foremoe.simulate.pipeline import on_pipeline
from foremoe.simulate.stage import simulate

LEAST_GAIN = 0.01
"""A slot pays if the simulated stage is shorter by this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOption:
    """One number of redundant slots per rank.

    Attributes:
        redundant: R, the number of redundant slots per rank.
        stage_s: Time of the whole stage in seconds, estimated from the simulated sample.
        speedup: Speed-up over the stage without redundant slots.
        buffer_bytes: Memory of the buffers on every rank in bytes. They hold weights and, in update stages, float32 gradients.
        fits: Whether the buffers fit into a rank's memory.
    """

    redundant: int
    stage_s: float
    speedup: float
    buffer_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChoice:
    """The result of `choose_slots`.

    Attributes:
        problem: The problem with the chosen number of slots.
        options: All numbers that were tried, ascending.
    """

    problem: Problem
    options: tuple[SlotOption, ...]

    @property
    def redundant(self) -> int:
        """The chosen number of redundant slots per rank, R."""
        return self.problem.R

    def __str__(self) -> str:
        tried = ", ".join(f"{o.redundant}: {o.speedup:.2f}x{'' if o.fits else ', does not fit'}" for o in self.options)
        each = next((f"; {gigabytes(o.buffer_bytes // o.redundant)} GB per slot" for o in self.options if o.redundant), "")
        return f"slots: R = {self.redundant}, from a sample of rows ({tried}{each})"


def choose_slots(
    problem: Problem, *, trainer: Trainer | None = None, pp: int = 1, num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SlotChoice:  # fmt: skip
    """Chooses the number of redundant slots per rank: 0, a power of two, or a number halfway between two of them, such as 6.

    For each number, plans and simulates a sample of 6 micro-steps and 12 layers, without moving homes. A larger number is chosen
    if each further slot shortens the simulated stage by `LEAST_GAIN` and the buffers fit into a rank's memory.

    Powers of two are tried first, until one is not chosen. With several nodes, a few slots may gain nothing although more slots
    gain much. The search then also tries the next power, and all powers up to B, the number of experts at home on a rank. Then
    the numbers halfway below a power are tried if they may be better.

    Args:
        problem: Problem to choose slots for. The number of slots that it has is ignored.
        trainer: Optimizer state and number of EP groups that share it, as for `rank_memory`.
        pp: Number of pipeline ranks over which the layers are split.
        progress: Callback that gets (numbers tried, numbers to try at most).

    Raises:
        InputError: The problem has no counts by source rank, which the simulator needs.

    Example:
        >>> chosen = foremoe.choose_slots(problem)
        >>> chosen.redundant
        1
    """
    if not isinstance(problem, Problem):
        raise InputError(f"slots are chosen for a Problem, not a {type(problem).__name__}; give Problem.of(workload, cluster).")
    if problem.load_MLGE is None:
        raise InputError("slots are chosen by simulated stages, which need counts by source rank; give redundant a number.")
    bare = dataclasses.replace(problem, redundant=0)
    part, trainer, ranks = sample(bare), trainer or Trainer(), on_pipeline(bare, pp)
    whole = fit_at_home(ranks, trainer)
    most = max(1, bare.E - bare.B)
    numbers = [0, *(2**k for k in range(16) if 2**k <= most)]
    options, best, vain = dict[int, SlotOption](), 0, False

    def attempt(redundant: int) -> SlotOption:
        varied = dataclasses.replace(part, redundant=redundant)
        run = simulate(varied, Planner().plan(varied, num_threads=num_threads)[0])
        stage_s = whole_stage(bare, part, run, trainer, ranks).seconds(bare.M)
        buffers = buffer_bytes(problem, redundant)
        staging = min(RETURN_BYTES, buffers) if problem.stage == "update" else 0
        # If the stage does not fit even without slots, a smaller number of slots does not help.
        fits = not redundant or not whole.fits or whole.peak_bytes + buffers + staging <= whole.memory_bytes
        speedup = over(options[0].stage_s, stage_s) if redundant else 1.0
        options[redundant] = SlotOption(
            redundant=redundant, stage_s=stage_s, speedup=speedup, buffer_bytes=buffers, fits=fits
        )  # fmt: skip
        if progress is not None:
            progress(len(options), max(len(options), len(numbers)))
        return options[redundant]

    def pays(fewer: int, more: int, stage_s: float) -> bool:
        return options[fewer].stage_s - stage_s >= LEAST_GAIN * (more - fewer) * stage_s

    attempt(0)
    for redundant in numbers[1:]:
        option = attempt(redundant)
        if not option.fits or not option.stage_s:
            break
        if pays(best, redundant, option.stage_s):
            best, vain = redundant, False
        elif bare.cluster.num_nodes == 1 or bare.replicas == "node" or (vain and redundant >= bare.B):
            break
        else:
            vain = True
    power = best
    for more in [redundant for redundant in options if redundant > power]:
        between = more * 3 // 4
        # The stage with fewer slots than `more` is not expected to be shorter.
        if between not in options and pays(best, between, options[more].stage_s):
            option = attempt(between)
            best = between if option.fits and pays(best, between, option.stage_s) else best
    fewer = power * 3 // 4
    if best == power and fewer not in options:
        attempt(fewer)
        best = power if pays(fewer, power, options[power].stage_s) else fewer
    in_order = tuple(option for _, option in sorted(options.items()))
    return SlotChoice(problem=dataclasses.replace(problem, redundant=best), options=in_order)


def fit_at_home(ranks: Sequence[Problem], trainer: Trainer) -> Fit:
    """Checks whether the fullest rank of the pipeline `ranks` fits with all experts at home."""
    return Fit.worst([fit(rank, rank.static(), trainer=trainer) for rank in ranks])


def over(base_s: float, seconds: float) -> float:
    """Returns the speed-up of `seconds` over `base_s`, or 1 if `seconds` is 0."""
    return base_s / seconds if seconds > 0.0 else 1.0
