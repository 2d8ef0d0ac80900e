"""Reference executor, which runs any plan and schedule on toy experts. It is simple and slow, and has buffers for each rank.

An expert is two small matrices and a tanh in float64. Layers do not depend on each other. Every (token, expert) pair has its own
input and output gradient, so that an error affects only the row in which it occurs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.problem.schedule import Phase
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks (source and server), E experts, B base slots, S slots, C copies, H hidden size,
# Z pairs of the whole stage, in the order (micro-step, layer, source rank, expert) of load_MLGE.

HIDDEN = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceResult:
    """Results of one stage in float64.

    Attributes:
        output_ZH: Outputs of all pairs.
        input_grad_ZH: Gradients of the inputs of all pairs, which are zero without a backward pass.
        weight_grad_LE: Weight gradients [L, E, 2, H, H], summed over micro-steps.
    """

    output_ZH: Array
    input_grad_ZH: Array
    weight_grad_LE: Array

    def difference(self, other: ReferenceResult) -> float:
        """Returns the largest absolute difference between the results, or infinity if any value is NaN."""
        names = ("output_ZH", "input_grad_ZH", "weight_grad_LE")
        worst = [float(np.abs(getattr(self, name) - getattr(other, name)).max(initial=0.0)) for name in names]
        return float("inf") if np.isnan(worst).any() else max(worst)


def run_reference(plan: Plan, workload: Workload | Array, *, seed: int = 0, land: str = "late") -> ReferenceResult:
    """Executes `plan` on toy experts, one pass after the other.

    Args:
        plan: Plan that keeps homes in their base slots.
        workload: Counts for which the plan was made, as a workload or as its load_MLGE.
        seed: Seed of weights, inputs and output gradients.
        land: Time at which copies land. With ``"early"``, a copy lands as soon as the use `after` is over. With ``"late"``, it
            lands just before the use `need`. If `after` is wrong, a result is wrong in one of the two modes.

    Raises:
        InputError: The plan moves homes, or was made for other counts.
    """
    if land not in ("early", "late") or not plan.executable:
        raise InputError(f'land must be "early" or "late" and homes must stay; got {land!r}, homes stay: {plan.executable}.')
    head, t, L, G, B, S = plan.header, plan.transfers, plan.L, plan.G, plan.B, plan.S
    if not isinstance(workload, Workload):
        workload = Workload.from_counts(workload, num_topk=head.model.num_topk, stage=head.key.stage)
    split_G = [plan.rows_for(workload, g) for g in range(G)]
    input_ZH, output_grad_ZH, weight_LE, result = _make_toys(workload.load_MLGE, seed, head.schedule.trains)
    buffer_G = np.full((G, head.num_buffers, 2, HIDDEN, HIDDEN), np.nan)
    slot_grad_G = np.full_like(buffer_G, np.nan)
    reads: dict[tuple[int, int, int], int] = {}  # (rank, layer, expert) -> buffer from which its weights are read

    def home_weights(rank: int, layer: int, expert: int) -> Array:
        """Returns the weights of an expert, or NaN if the expert is not at home on `rank`. Rank -1 is the host store."""
        return weight_LE[layer, expert] if rank in (-1, plan.home_LE[layer, expert] // B) else weight_LE[0, 0] * np.nan

    apart = {(layer, phase) for _, _, layer, phase, _ in zip(*head.schedule.uses(L), strict=True)}
    activation_ZH, landed_C = np.full_like(input_ZH, np.nan), np.zeros(len(t), bool)
    for use, m, layer, phase, _ in zip(*head.schedule.uses(L), strict=True):
        due_C = (t.need_C <= use) | ((t.after_C < use) & (land == "early"))
        for c in np.flatnonzero(due_C & ~landed_C).tolist():
            buffer_G[t.dst_C[c], t.buffer_C[c]] = home_weights(t.src_C[c], t.layer_C[c], t.expert_C[c])
        landed_C |= due_C
        for c in np.flatnonzero(t.need_C == use).tolist():
            reads[t.dst_C[c], t.layer_C[c], t.expert_C[c]] = t.buffer_C[c]
        returns = []
        for slot, pairs_Z in sorted(_deal(plan, workload, split_G, m, layer).items()):
            g, e = slot // S, plan.expert_MLGS[m, layer].ravel()[slot]
            buffer = -1 if slot % S < B else reads.get((g, layer, e), -1)
            weights = buffer_G[g, buffer] if buffer >= 0 else home_weights(g, layer, e)
            gradient = result.weight_grad_LE[layer, e]
            if buffer >= 0:
                slot_grad_G[g, buffer], gradient = 0.0, slot_grad_G[g, buffer]
                returns.append((e, g, buffer))
            if phase == Phase.FORWARD:
                result.output_ZH[pairs_Z], activation_ZH[pairs_Z] = _forward(input_ZH[pairs_Z], weights)
            elif phase == Phase.REFORWARD:
                activation_ZH[pairs_Z] = _forward(input_ZH[pairs_Z], weights)[1]
            else:
                if head.schedule.reforward and (layer, Phase.REFORWARD) not in apart:
                    activation_ZH[pairs_Z] = _forward(input_ZH[pairs_Z], weights)[1]
                back = _backward(input_ZH[pairs_Z], activation_ZH[pairs_Z], output_grad_ZH[pairs_Z], weights)
                result.input_grad_ZH[pairs_Z] = back[0]
                gradient += back[1]
        for e, g, buffer in returns:  # added at home in a fixed order; zero in a forward pass
            result.weight_grad_LE[layer, e] += slot_grad_G[g, buffer]
    return result


def dense_reference(load_MLGE: Array, *, seed: int = 0, backward: bool = True) -> ReferenceResult:
    """Computes the result that `run_reference` should have, expert by expert, without ranks, slots or copies."""
    input_ZH, output_grad_ZH, weight_LE, result = _make_toys(load_MLGE, seed, backward)
    end_MLGE = np.cumsum(load_MLGE).reshape(load_MLGE.shape)
    for (m, layer, source, e), count in np.ndenumerate(load_MLGE):
        z = slice(end_MLGE[m, layer, source, e] - count, end_MLGE[m, layer, source, e])
        result.output_ZH[z], activation = _forward(input_ZH[z], weight_LE[layer, e])
        if backward:
            back = _backward(input_ZH[z], activation, output_grad_ZH[z], weight_LE[layer, e])
            result.input_grad_ZH[z], result.weight_grad_LE[layer, e] = back[0], result.weight_grad_LE[layer, e] + back[1]
    return result


def _make_toys(load_MLGE: Array, seed: int, backward: bool) -> tuple[Array, Array, Array, ReferenceResult]:
    """Returns inputs [Z, H], output gradients [Z, H], weights [L, E, 2, H, H], and a result filled with NaN, to be written."""
    pairs, weights = (int(load_MLGE.sum()), HIDDEN), (load_MLGE.shape[1], load_MLGE.shape[3], 2, HIDDEN, HIDDEN)
    rng, input_grad_ZH = np.random.default_rng(seed), np.full(pairs, np.nan if backward else 0.0)
    result = ReferenceResult(output_ZH=np.full(pairs, np.nan), input_grad_ZH=input_grad_ZH, weight_grad_LE=np.zeros(weights))
    return rng.standard_normal(pairs), rng.standard_normal(pairs), rng.standard_normal(weights), result


def _deal(plan: Plan, work: Workload, split_G: list[Array], m: int, layer: int) -> dict[int, Array]:
    """Returns a mapping from slots to their pairs. Each source assigns an expert's pairs in order according to its split."""
    served: dict[int, Array] = {}
    start_MLGE = (np.cumsum(work.load_MLGE) - work.load_MLGE.ravel()).reshape(work.load_MLGE.shape)
    for source, split_MLP in enumerate(split_G):
        for slot in np.flatnonzero(split_MLP[m, layer]).tolist():
            e, count = plan.expert_MLGS[m, layer].ravel()[slot], split_MLP[m, layer, slot]
            pairs_Z = start_MLGE[m, layer, source, e] + np.arange(count)
            served[slot] = np.concatenate([served.get(slot, pairs_Z[:0]), pairs_Z])
            start_MLGE[m, layer, source, e] += count
    return served


def _forward(x: Array, weights: Array) -> tuple[Array, Array]:
    activation = np.tanh(x @ weights[0])
    return activation @ weights[1], activation


def _backward(x: Array, activation: Array, output_grad: Array, weights: Array) -> tuple[Array, Array]:
    inner_grad = (output_grad @ weights[1].T) * (1.0 - activation**2)
    return inner_grad @ weights[0].T, np.stack([x.T @ inner_grad, activation.T @ output_grad])
