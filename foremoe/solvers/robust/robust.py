"""`Robust`: places replicas for loads that are only predicted."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.fields import real, whole
from foremoe.levels import RankSolver
from foremoe.problem.estimate import problem_rates, row_times
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers.base import edit_rows, require_start
from foremoe.solvers.robust.kernels import Loads, Options, robust_rows

# Letters: N rows, X scenarios, K samples, E experts.


@dataclass(frozen=True)
class Robust(RankSolver):
    """Places replicas for a load that is known only as a distribution. Quotas are split later, when the load itself is known.

    If the scenarios are samples (`Problem.scenarios_complete` is False), experts get copies in proportion to their expected load
    plus a share of the mean. Thus cold experts, which may become hot, get copies too. The expected load is the mean of the
    problem's load and the average scenario. Slots are assigned by load per copy. Copies are placed heaviest first on the least
    loaded rank, so that many ranks can exchange load later.

    If one of the scenarios is certain to occur, replicas are added until each scenario can be balanced. The scenario with the
    worst balance gets the next replica.

    Under the objective ``"time"``, copies have a price. The maximum numbers of copies to or from one rank, inside and between
    nodes, are raised as long as the expected time of a row falls. This time is computed for the scenarios, or for samples around
    the expected load. The method is our own.

    Attributes:
        spread: Load that is added to every expert, as a multiple of the mean expert load, at least 0. With n known scenarios, it
            is multiplied by sqrt(1 + 1/n).
        noise: Standard deviation of the logarithm of the ratio between samples and the expected load, from 0 to 100.
        samples: Number of samples for which the time of replicas is computed, at least 1.
    """

    spread: float = 0.7
    noise: float = 0.5
    samples: int = 4

    foresees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        real(self.spread, "spread of Robust", open_low=False)
        real(self.noise, "noise of Robust", 0.0, 100.0, open_low=False)
        whole(self.samples, "samples of Robust", 1, 10**4)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows. Rows without load and rows that a cancellation skips keep that of `start`."""
        require_start(problem, start)
        if _is_one_placement(problem):
            first = self.solve(problem[:1], start.cut(N=slice(0, problem.L)))
            return first.cut(N=np.tile(np.arange(problem.L), problem.M))
        scenario_XNE, priced = problem.load_NE[None], problem
        if problem.scenario_XMLE is not None:
            scenario_XNE = problem.scenario_XMLE.reshape(-1, problem.N, problem.E)
            # Copies overlap with the compute of one micro-step, not of all micro-steps whose loads are summed here.
            known_XML = problem.scenario_XMLE.any(axis=3)
            num_ML1 = np.maximum(1, known_XML.sum(axis=0))[:, :, None]
            mean_MLE = np.rint(problem.scenario_XMLE.sum(axis=0) / num_ML1).astype(np.int32)
            priced = dataclasses.replace(problem, load_MLE=mean_MLE, load_MLGE=None)
        factor_KE = np.exp(self.noise * np.random.default_rng(0).standard_normal((self.samples, problem.E)))
        loads = Loads(problem.load_NE, scenario_XNE, factor_KE)
        timed = problem.cost.objective == "time"
        options = Options(
            problem.cluster.node_of_rank_G, problem.B, problem_rates(priced), row_times(priced), problem.replicas == "node",
            float(self.spread), timed, problem.scenarios_complete,
        )  # fmt: skip

        def edit(low: int, high: int, expert_NGS: Array, quota_NGS: Array) -> None:
            robust_rows(low, high, loads, options, expert_NGS, quota_NGS)

        return edit_rows(start, edit)


def _is_one_placement(problem: Problem) -> bool:
    """Returns whether all micro-steps have the same scenarios, one of which will occur, and so get the same replicas."""
    scenario_XMLE, load_MLE = problem.scenario_XMLE, problem.load_MLE
    if scenario_XMLE is None or not problem.scenarios_complete or problem.M == 1:
        return False
    return bool((load_MLE == load_MLE[:1]).all() and (scenario_XMLE == scenario_XMLE[:, :1]).all())
