"""Time of a stage outside its MoE layers, and its share of a training step, in closed form.

These terms are the same for every planner, so they dilute gains. No overlap between them is assumed: if a trainer overlaps the
reduction with backward, `reduction_seconds` is an upper bound.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.trainer import Trainer, step_speedups
from foremoe.machine.window import dense_layer_seconds
from foremoe.plan.figures import traffic
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.problem.memory import rank_params
from foremoe.problem.problem import Problem
from foremoe.simulate.stage import force_balanced, simulate
from foremoe.solvers.home.anneal import Anneal
from foremoe.solvers.home.price import price_L

# Letters: M micro-steps, G ranks, D ranks of all EP groups that train together.


def head_seconds(problem: Problem) -> Array:
    """Returns the seconds of one forward of the head and of the dense layers before the first MoE layer, float64 [M, G].

    The head takes 2 FLOPs per weight and token, at attention's efficiency. Parts of the model that the problem does not have, or
    whose sizes are not known, count 0. Looking up the embedding takes no time.
    """
    model, cluster = problem.model, problem.cluster
    out_MG = np.zeros((problem.M, problem.G))
    if problem.tokens_MG is None:
        return out_MG
    if problem.moe_layer_L[0] == model.first_moe_layer:
        squares_MG = 0.0 if problem.attention_MG is None else problem.attention_MG
        out_MG += model.first_moe_layer * dense_layer_seconds(model, cluster, problem.tokens_MG, squares_MG)
    if problem.moe_layer_L[-1] == model.first_moe_layer + model.num_layers - 1:
        flops_per_token = 2.0 * model.hidden_size * model.vocab_size
        out_MG += problem.tokens_MG * (flops_per_token / cluster.attention_flops_per_s)
    return out_MG


def reduction_seconds(problem: Problem, trainer: Trainer) -> float:
    """Returns the seconds of reducing gradients and gathering new weights between ranks that hold the same parameters.

    Gradients are reduce-scattered and weights all-gathered, (n - 1)/n of their bytes each. Experts are reduced between EP groups
    (n is `trainer.data_parallel`), every rank over its own NIC; all else between all D ranks, inside nodes by peer links and in
    parallel between nodes over all NICs of a node. 0 in the recompute stage.
    """
    if problem.stage != "update":
        return 0.0
    cluster, model = problem.cluster, problem.model
    groups, num_ranks = trainer.data_parallel, trainer.data_parallel * problem.G
    per_param = model.bytes_per_gradient + model.bytes_per_weight
    expert_bytes, dense_bytes = (per_param * params for params in rank_params(problem))
    near = min(cluster.ranks_per_node, num_ranks)
    num_nodes = cluster.num_nodes * groups
    # EP groups that share a node would need fewer NICs; presets fill nodes, and smaller groups are counted as nodes of their own.
    expert_s = expert_bytes * (groups - 1) / groups / cluster.rdma_bytes_per_s_per_rank
    inside_s = dense_bytes * (near - 1) / near / cluster.peer_bytes_per_s
    between_s = dense_bytes * (num_nodes - 1) / num_nodes / (cluster.rdma_bytes_per_s_per_rank * near)
    return expert_s + max(inside_s, between_s)


def optimizer_seconds(problem: Problem, trainer: Trainer) -> float:
    """Returns the optimizer's seconds on one rank: reading and writing state, gradient and weight at memory bandwidth.

    0 in the recompute stage, if the state is in host memory, and if the cluster does not know the bandwidth.
    """
    bandwidth = problem.cluster.memory_bytes_per_s
    if problem.stage != "update" or bandwidth is None or not trainer.optimizer_bytes:
        return 0.0
    expert_params, dense_params = rank_params(problem)
    params = expert_params / trainer.data_parallel + dense_params / (trainer.data_parallel * problem.G)
    model = problem.model
    return params * (2.0 * trainer.optimizer_bytes + model.bytes_per_gradient + model.bytes_per_weight) / bandwidth


def compare_steps(rows: Sequence[MutableMapping[str, Any]], *, static_s: float | None, balanced_s: float | None,
                  trainer: Trainer) -> None:  # fmt: skip
    """Fills in each line's gain over static placement and its share of even routing; None if a figure is missing."""
    for row in rows:
        stage_s = row["simulated_stage_s"]
        if stage_s is None:
            row.update(dict.fromkeys(("speedup_vs_static", "step_speedup", "step_speedup_at", "share_of_balanced")))
            continue
        row["speedup_vs_static"] = None if static_s is None else static_s / stage_s
        row["step_speedup"] = None if static_s is None else trainer.step_speedup(stage_s, static_s)
        row["step_speedup_at"] = None if static_s is None else step_speedups(stage_s, static_s)
        row["share_of_balanced"] = None if balanced_s is None else balanced_s / stage_s


def replacement_seconds(problem: Problem, plan: Plan) -> float:
    """Returns the seconds that a plan which re-places experts needs to move weights and, in update, gradients.

    Every slot whose expert changes from one micro-step to the next counts; moves are spread evenly over all links, and none
    overlaps with compute. 0 for plans that keep homes, whose copies the timeline has.
    """
    if plan.executable:
        return 0.0
    cluster, model, (_, bytes_by_link) = problem.cluster, problem.model, traffic(problem, plan)
    seconds = bytes_by_link["peer"] / cluster.peer_bytes_per_s + bytes_by_link["rdma"] / cluster.rdma_bytes_per_s_per_rank
    gradients = model.gradient_bytes if problem.stage == "update" else 0
    return seconds * (model.expert_bytes + gradients) / model.expert_bytes * plan.N / plan.G


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The gain of a plan, for summaries, tables, pages and examples.

    Attributes:
        static_s: Seconds of the simulated stage with every expert at home.
        planned_s: Seconds with the plan and every move of homes.
        balanced_s: Seconds with even routing: the time of perfect balance alone.
        standing: Whether the cluster's constants are calibrated (`Cluster.standing`).
    """

    static_s: float
    planned_s: float
    balanced_s: float
    standing: str

    @property
    def speedup(self) -> float:
        """Speed-up of the stage over experts at home."""
        return self.static_s / self.planned_s

    @property
    def share_of_balanced(self) -> float:
        """Throughput as a share of throughput with even routing."""
        return self.balanced_s / self.planned_s

    def __str__(self) -> str:
        seconds = f"{self.static_s:.3g} s at home, {self.planned_s:.3g} s by plan, {self.balanced_s:.3g} s with even routing"
        return f"simulated stage: {self.speedup:.2f}x ({seconds}; {self.standing})"


def gain(problem: Problem, plan: Plan, *, posed: Problem | None = None, trainer: Trainer | None = None) -> Gain:
    """Simulates the whole stage with experts at home, with the plan, and with even routing.

    The stage has its MoE layers, attention, head, gradient reduction, optimizer, and every move of homes.

    Args:
        plan: A plan of `problem`.
        posed: `problem` with the homes before a home level moved any. Default: `problem`.
        trainer: Optimizer, EP groups and time outside the stage. Default: ``Trainer()``.

    Raises:
        InputError: As for `simulate`.

    Example:
        >>> found = foremoe.gain(problem, plan)
        >>> f"{found.speedup:.2f}"
        '1.40'
    """
    judge = Judge.of(posed or problem, trainer)
    return Gain(
        static_s=judge.static_s, planned_s=judge(problem, plan)["simulated_stage_s"], balanced_s=judge.balanced_s,
        standing=problem.cluster.standing,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judge:
    """Simulates plans of one problem and returns their gain; pass it as `judge` to `foremoe.compare`.

    Attributes:
        problem: The original problem, before home levels move anything.
        trainer: Optimizer, EP groups and time outside the stage.
        static_s: Seconds of its stage with static placement.
        balanced_s: Seconds of its stage with even routing.
    """

    FIGURES: ClassVar = ("simulated_stage_s", "speedup_vs_static", "step_speedup", "step_speedup_at", "share_of_balanced")

    problem: Problem
    trainer: Trainer
    static_s: float
    balanced_s: float

    @classmethod
    def of(cls, problem: Problem, trainer: Trainer | None = None) -> "Judge":
        """Makes the judge of a problem, which must have counts by source rank."""
        trainer = trainer or Trainer()
        fixed_s, head_s_MG = _fixed(problem, trainer), head_seconds(problem)
        static = simulate(problem, Planner(rank=()).plan(problem)[0], outside_s_MG=head_s_MG)
        return cls(problem, trainer, static.total_s + fixed_s, force_balanced(problem, outside_s_MG=head_s_MG).total_s + fixed_s)

    def __call__(self, posed: Problem, plan: Plan) -> Mapping[str, Any]:
        """``simulated_stage_s``, ``speedup_vs_static``, ``step_speedup``, ``step_speedup_at`` and ``share_of_balanced``.

        Moves of homes count as experts with all their state, spread as `Trainer.micro_steps` says; a plan that re-places experts
        bears its `replacement_seconds`.
        """
        simulation = simulate(posed, plan, outside_s_MG=head_seconds(posed))
        moves_s = float(price_L(self.problem, posed.home_LE, Anneal().state_bytes).sum())
        moves_s = moves_s * self.trainer.share_of_step(posed.M) + replacement_seconds(posed, plan)
        row: dict[str, Any] = {"simulated_stage_s": simulation.total_s + moves_s + _fixed(posed, self.trainer)}
        compare_steps([row], static_s=self.static_s, balanced_s=self.balanced_s, trainer=self.trainer)
        return row


def _fixed(problem: Problem, trainer: Trainer) -> float:
    """Seconds at the end of the stage, whatever the plan."""
    return reduction_seconds(problem, trainer) + optimizer_seconds(problem, trainer)
