"""Memory of a rank: the bytes that a stage keeps on every rank, by part, and a check of whether they fit.

Planner, simulator, report and command line all use this definition. The definition leaves out what the model does not know: the
accelerator's context, communication buffers, fragmentation, logits, and activations of shared experts, of dense layers and of
tensor parallelism.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.model import Model
from foremoe.machine.trainer import Trainer
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase, Schedule

# Letters: N rows, G ranks, U uses, L layers.

# Default number of rows whose replica gradients may be in flight, as in the prefetch of `transfer.Engine`.
PREFETCH = 2
RETURN_BYTES = 2**30
"""Default limit, in bytes, for arriving replica gradients that a rank stages at once (see `transfer.Engine`)."""


class Memory(NamedTuple):
    """Memory in bytes on every rank. A part is an integer, or an array int64 [G] if ranks differ.

    Attributes:
        weights: Weights of experts at home, attention and shared experts. The embedding and the head are included if the problem
            has the first or last layers of the model.
        gradients: Main gradients of these weights in the update stage.
        optimizer: Share of the optimizer state that this rank keeps in the update stage.
        slots: Buffers of redundant slots, with gradient buffers in the update stage. It is 0 if no slot is used.
        staging_G: Replica gradients that have arrived but have not been added yet.
        activations_G: Peak memory of activations.
    """

    weights: int
    gradients: int
    optimizer: int
    slots: int
    staging_G: Array
    activations_G: Array

    @property
    def peak_G(self) -> Array:
        """Sum of all parts, int64 [G]."""
        return self.weights + self.gradients + self.optimizer + self.slots + self.staging_G + self.activations_G

    def parts(self) -> dict[str, int]:
        """Returns the bytes of each part on the fullest rank, keyed by its name."""
        fullest = int(np.argmax(self.peak_G))
        parts = {name.removesuffix("_G"): value for name, value in self._asdict().items()}
        return {name: int(np.broadcast_to(value, self.peak_G.shape)[fullest]) for name, value in parts.items()}


class Fit(NamedTuple):
    """Comparison of the fullest rank's memory with the memory of a rank.

    Attributes:
        peak_bytes: Peak memory of the fullest rank.
        reforward_bytes: Peak memory with activation recomputation of every layer. None if recomputation is already on or if there
            is no backward pass.
        memory_bytes: Memory of one rank.
    """

    peak_bytes: int
    reforward_bytes: int | None
    memory_bytes: int

    @property
    def fits(self) -> bool:
        """True if the peak does not exceed the memory."""
        return self.peak_bytes <= self.memory_bytes

    @classmethod
    def worst(cls, fits: Sequence["Fit"]) -> Self:
        """Combines the results of several groups or pipeline ranks into one, with the largest peaks and the smallest memory."""
        again = [fit.reforward_bytes for fit in fits if fit.reforward_bytes is not None]
        memory_bytes = min(fit.memory_bytes for fit in fits)
        return cls(max(fit.peak_bytes for fit in fits), max(again) if again else None, memory_bytes)

    def text(self, held: str = "") -> str:
        """Returns a line such as ``does not fit: 179 of 80 GB; with activation recomputation 23 GB``. `held` follows 80 GB."""
        peak, memory = gigabytes(self.peak_bytes), gigabytes(self.memory_bytes)
        if peak == memory and not self.fits:  # equal after rounding to whole numbers
            peak = f"{self.peak_bytes / 1e9:.2f}"
        fits = "fits, but tight" if self.peak_bytes > 0.9 * self.memory_bytes else "fits"
        verdict = f"{fits if self.fits else 'does not fit'}: {peak} of {memory} GB{held}"
        if self.fits or self.reforward_bytes is None:
            return verdict
        return f"{verdict}; with activation recomputation {gigabytes(self.reforward_bytes)} GB"


def gigabytes(num_bytes: float) -> str:
    """Formats a number of bytes as whole gigabytes, or with three digits if it is below 10 GB."""
    return f"{num_bytes / 1e9:.0f}" if num_bytes >= 9.995e9 else f"{num_bytes / 1e9:.3g}"


def rank_memory(problem: Problem, placement: Placement, *, trainer: Trainer | None = None) -> Memory:
    """Returns the memory of every rank in a stage that runs with `placement`.

    Args:
        problem: Problem that the stage runs.
        placement: Experts and quotas of all slots.
        trainer: Optimizer state and the number of EP groups that share it. Defaults to Adam and one group.
    """
    model, trainer = problem.model, trainer or Trainer()
    trains = problem.stage == "update"
    expert_params, dense_params = rank_params(problem)
    gradient = model.bytes_per_gradient if trains else 0.0
    params = expert_params + dense_params
    # Every rank of every group has all parameters except experts, so all ranks share the optimizer state of these.
    shared = expert_params / trainer.data_parallel + dense_params / (trainer.data_parallel * problem.G)
    used = (placement.quotas_NGS[..., problem.B :] > 0).any()
    return Memory(
        weights=math.ceil(params * model.bytes_per_weight), gradients=math.ceil(params * gradient),
        optimizer=math.ceil(shared * trainer.optimizer_bytes) if trains else 0,
        slots=buffer_bytes(problem, problem.R) if used else 0,
        staging_G=staging_bytes(problem, placement), activations_G=activation_peak(problem, placement),
    )  # fmt: skip


def buffer_bytes(problem: Problem, redundant: int) -> int:
    """Returns the bytes of weights and, in the update stage, of gradients in the buffers of `redundant` slots on a rank."""
    per_buffer = problem.model.expert_bytes + (problem.model.gradient_bytes if problem.stage == "update" else 0)
    return redundant * problem.slot_depth * per_buffer


def fit(problem: Problem, placement: Placement, *, trainer: Trainer | None = None) -> Fit:
    """Checks whether the fullest rank fits, with and without recomputing single layers. Takes the arguments of `rank_memory`."""
    memory = rank_memory(problem, placement, trainer=trainer)
    peak, again = int(memory.peak_G.max()), None
    if problem.schedule.trains and not problem.schedule.reforward:
        varied = dataclasses.replace(problem, schedule=dataclasses.replace(problem.schedule, reforward=True))
        less_G = memory.activations_G - activation_peak(varied, placement)
        again = int((memory.peak_G - less_G).max())
    return Fit(peak, again, problem.cluster.memory_bytes)


def rank_params(problem: Problem) -> tuple[int, int]:
    """Returns the number of weights in a rank's experts at home, and the number of all its other weights.

    The second number includes the embedding if the problem has the first layer of the model, and the head if it has the last.
    """
    model, layer_L = problem.model, problem.moe_layer_L
    last = model.first_moe_layer + model.num_layers - 1
    ends = int(layer_L[0] == model.first_moe_layer) + int(layer_L[-1] == last)
    dense = problem.L * (model.attention_params + model.shared_params) + ends * model.vocab_size * model.hidden_size
    return problem.B * problem.L * model.expert_params, dense


def staging_bytes(problem: Problem, placement: Placement) -> Array:
    """Returns the bytes of replica gradients that wait to be added at home, int64 [G]: `PREFETCH` + 1 rows, up to a limit."""
    if problem.stage != "update" or not problem.R:
        return np.zeros(problem.G, np.int64)
    row_Z, rank_Z, slot_Z = np.nonzero(placement.quotas_NGS[..., problem.B :] > 0)
    expert_Z = placement.expert_NGS[row_Z, rank_Z, slot_Z + problem.B].astype(np.int64)
    home_Z = problem.home_LE[row_Z % problem.L, expert_Z].astype(np.int64) // problem.B
    away = home_Z != rank_Z
    arrive_NG = np.bincount((row_Z * problem.G + home_Z)[away], minlength=problem.N * problem.G).reshape(problem.N, problem.G)
    gradient_bytes = problem.model.gradient_bytes
    bound = max(RETURN_BYTES // gradient_bytes, 1) * gradient_bytes
    return np.minimum((PREFETCH + 1) * arrive_NG.max(axis=0) * gradient_bytes, bound)


def pair_activation_bytes(model: Model) -> float:
    """Returns the bytes kept for the backward pass of one pair: input, output and the results of the expert's matrices."""
    return model.bytes_per_activation * (2 * model.hidden_size + model.num_matrices * model.ffn_size)


def token_activation_bytes(model: Model) -> float:
    """Returns the bytes that one token keeps for the backward pass of a layer, without the bytes of its pairs.

    These are the inputs of attention, its norm, the second norm and the router. Flash attention also keeps the queries
    and the output. Keys and values are left out, because they have fewer heads.
    """
    return model.bytes_per_activation * (4 * model.hidden_size + model.num_heads * (model.qk_head_dim + model.v_head_dim))


def activation_peak(problem: Problem, placement: Placement) -> Array:
    """Returns the peak memory of activations over the schedule's uses in bytes, int64 [G].

    A forward pass keeps the activations that its backward pass needs. With recomputation, a forward pass keeps only the input of
    every layer or of the first layer of every block. The other activations exist from the recomputation of a layer to the end of
    its backward pass. A forward-only stage keeps nothing.
    """
    schedule, uses = problem.schedule, problem.schedule.uses(problem.L)
    row_U = uses.micro_step_U.astype(np.int64) * problem.L + uses.layer_U
    tokens_MG = np.zeros((problem.M, problem.G)) if problem.tokens_MG is None else problem.tokens_MG
    tokens_NG = np.repeat(tokens_MG, problem.L, axis=0).astype(np.float64)
    work_NG = placement.load_NG() * pair_activation_bytes(problem.model) + tokens_NG * token_activation_bytes(problem.model)
    input_NG = tokens_NG * float(problem.model.token_bytes)
    keeps, again, inputs = _kept(schedule, uses.phase_U, uses.layer_U, problem.L)
    change_UG = keeps[:, None] * work_NG[row_U] + inputs[:, None] * input_NG[row_U]
    before_UG = np.cumsum(change_UG, axis=0) - change_UG
    return np.ceil((before_UG + again[:, None] * work_NG[row_U]).max(axis=0)).astype(np.int64)


def _kept(schedule: Schedule, phase_U: Array, layer_U: Array, num_layers: int) -> tuple[Array, Array, Array]:
    """Returns, per use, the change of kept activations (1, 0, -1), temporary activations (1, 0), and kept inputs (1, 0, -1)."""
    backward_U, forward_U, zero_U = phase_U == Phase.BACKWARD, phase_U == Phase.FORWARD, np.zeros(len(phase_U), np.int64)
    if not schedule.trains:
        return zero_U, np.ones(len(phase_U), np.int64), zero_U
    direction_U = forward_U.astype(np.int64) - backward_U
    if not schedule.reforward:
        return direction_U, forward_U.astype(np.int64), zero_U
    block_L = np.arange(num_layers) if schedule.block_L is None else schedule.block_L
    first_L = np.diff(block_L, prepend=block_L[0] - 1) != 0
    alone_L = np.bincount(block_L, minlength=block_L.max() + 1)[block_L] == 1
    in_block_U = ~alone_L[layer_U]
    made_U = forward_U | (phase_U == Phase.REFORWARD) | (backward_U & ~in_block_U)
    keeps_U = (phase_U == Phase.REFORWARD).astype(np.int64) - (backward_U & in_block_U)
    return keeps_U, made_U.astype(np.int64), direction_U * first_L[layer_U]
