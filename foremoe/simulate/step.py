"""Time of a stage outside its MoE layers and gains over a whole training step, in closed form.

These times are the same for every planner, so they dilute gains. They are assumed not to overlap with other work. If a trainer
overlaps the reduction with the backward pass, `reduction_seconds` is an upper bound.
"""

from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.trainer import Trainer, step_speedups
from foremoe.machine.window import dense_layer_seconds
from foremoe.plan.figures import traffic
from foremoe.plan.plan import Plan
from foremoe.problem.memory import rank_params
from foremoe.problem.problem import Problem

# Letters: M micro-steps, G ranks, D ranks of all EP groups that train together.


def head_seconds(problem: Problem) -> Array:
    """Returns the seconds of one forward pass of the head and the dense layers before the first MoE layer, float64 [M, G].

    The head takes 2 FLOPs per weight and token, at the efficiency of attention. Parts of the model count 0 if the problem does
    not have them or if their sizes are not known. The embedding look-up takes no time.
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
    """Returns the seconds that ranks with the same parameters take to reduce gradients and gather new weights.

    Gradients are reduce-scattered and weights are all-gathered. Among n ranks, each of these operations sends (n - 1)/n of the
    bytes. Experts are reduced between EP groups (n is `trainer.data_parallel`), and every rank uses its own NIC. All other
    parameters are reduced between all D ranks, over peer links inside nodes and over all NICs in parallel between nodes. Returns
    0 in the recompute stage.
    """
    if problem.stage != "update":
        return 0.0
    cluster, model = problem.cluster, problem.model
    groups, num_ranks = trainer.data_parallel, trainer.data_parallel * problem.G
    per_param = model.bytes_per_gradient + model.bytes_per_weight
    expert_bytes, dense_bytes = (per_param * params for params in rank_params(problem))
    near = min(cluster.ranks_per_node, num_ranks)
    num_nodes = cluster.num_nodes * groups
    # EP groups that share a node would need fewer NICs. Presets fill nodes, and a smaller group is counted as a separate node.
    expert_s = expert_bytes * (groups - 1) / groups / cluster.rdma_bytes_per_s_per_rank
    inside_s = dense_bytes * (near - 1) / near / cluster.peer_bytes_per_s
    between_s = dense_bytes * (num_nodes - 1) / num_nodes / (cluster.rdma_bytes_per_s_per_rank * near)
    return expert_s + max(inside_s, between_s)


def optimizer_seconds(problem: Problem, trainer: Trainer) -> float:
    """Returns the seconds that a rank's optimizer takes to read and write state, gradients and weights at memory bandwidth.

    Returns 0 in the recompute stage, if the state is in host memory, or if the memory bandwidth of the cluster is not known.
    """
    bandwidth = problem.cluster.memory_bytes_per_s
    if problem.stage != "update" or bandwidth is None or not trainer.optimizer_bytes:
        return 0.0
    expert_params, dense_params = rank_params(problem)
    params = expert_params / trainer.data_parallel + dense_params / (trainer.data_parallel * problem.G)
    model = problem.model
    return params * (2.0 * trainer.optimizer_bytes + model.bytes_per_gradient + model.bytes_per_weight) / bandwidth


def against(stage_s: float | None, static_s: float | None, balanced_s: float | None, trainer: Trainer) -> dict[str, Any]:
    """Returns figures that compare a stage with static placement and even routing. Figures that are not known are None."""
    figures = dict[str, Any].fromkeys(("speedup_vs_static", "step_speedup", "step_speedup_at", "share_of_balanced"))
    if stage_s is not None and static_s is not None:
        figures["speedup_vs_static"] = static_s / stage_s
        figures["step_speedup"] = trainer.step_speedup(stage_s, static_s)
        figures["step_speedup_at"] = step_speedups(stage_s, static_s)
    if stage_s is not None and balanced_s is not None:
        figures["share_of_balanced"] = balanced_s / stage_s
    return figures


def replacement_seconds(problem: Problem, plan: Plan) -> float:
    """Returns the seconds to move weights and, in an update, gradients for a plan that moves homes between micro-steps.

    Each slot whose expert changes from one micro-step to the next is one move. Moves are spread evenly over all links and do not
    overlap with compute. Returns 0 for plans that keep homes, because the timeline contains the copies of such plans.
    """
    if plan.executable:
        return 0.0
    cluster, model, (_, bytes_by_link) = problem.cluster, problem.model, traffic(problem, plan)
    seconds = bytes_by_link["peer"] / cluster.peer_bytes_per_s + bytes_by_link["rdma"] / cluster.rdma_bytes_per_s_per_rank
    gradients = model.gradient_bytes if problem.stage == "update" else 0
    return seconds * (model.expert_bytes + gradients) / model.expert_bytes * plan.N / plan.G
