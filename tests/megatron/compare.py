"""How close a run by plans must be to one without, and whether it is.

One step from equal weights. With `cpu.steady_rows` an expert's output and input gradient for a token do not depend on the tokens
beside it. Moving tokens to replicas then changes nothing in a forward pass, and in a backward pass nothing but the gradients of
expert weights; a token's two experts may be added in the other order, which gives the same number. So losses and all other
gradients are equal bit by bit.

An element of an expert's weight gradient is a sum of n products x*g, one per token and micro-step, over all ranks that reduce
it. In floating point, with u = 2^-24, summing n products in any order, partial sums included, gives sum x*g*(1 + d) with
|d| <= gamma_k = k*u/(1 - k*u), where k counts the roundings that a product goes through: one of its own, at most n - 1 in sums,
and a few for scaling and for adding partial sums. Two orders thus differ by at most 2 gamma_k A with A = sum |x*g|, which the
run without foremoe records (`Magnitudes`). In bf16 each partial sum is rounded to bf16 (u = 2^-8) once before it is added to the
float32 main gradient: once per micro-step without replicas, once per micro-step and slot with them. Whatever the parts, these
roundings sum up to at most 2^-8 (1 + gamma_k) A in each arm. Fused experts add to float32 and round nothing, replicas' neither.

Main gradients in bf16 (`grad_reduce_in_fp32=False`) are rounded by every micro-step that adds to them, by the reduction and by
scaling. Replicas' are summed in float32 and add one rounding more, so a product goes through at most M + D + 4 of them, with D
data-parallel ranks, and each arm is off by at most gamma_{M+D+4} A with u = 2^-8.

Several steps. Adam turns differences of rounding into differences of weights that no simple bound follows. So the run by plans
must end no further from the run without foremoe than twice as far as a control that only sums in another order.
"""

import functools
from dataclasses import dataclass

import numpy as np
import program_arms as arms
import torch
from magnitudes import Magnitudes

# Letters: M micro-steps, L MoE layers of this rank, G ranks of the EP group, S slots.

EXTRA_ROUNDINGS = 64  # scaling by 1/M and 1/DP, and one addition per micro-step, slot and data-parallel rank


@dataclass
class Verdict:
    """One rank's comparison of steps from equal weights.

    Attributes:
        loss, other: largest difference of a loss, of a gradient that is not an expert's; must be 0.
        expert: largest difference of an expert gradient as a multiple of its bound; must be at most 1.
        served: whether every slot served its quota.   drift: pairs that the plan did not know.
        as_expected: whether slots served, and layers drifted, as `program_arms.expected_service` says.
        load_ML: pairs that this rank served, by step.   skew_ML: the plans'.
        replicas, cross_node: replicas of the plans, and those on another node than their home.
        distinct: whether every row of a plan has a placement or quotas of its own.
        fell_back: rows that ran at home for want of a replica.   backends: (kind of copy, backend) that arrived here.
        served_skew_ML: as reported, by step; None with replay.
        known: rows that went by known routes, by step.
        copies: weights that arrived here, less those that the plans send.   returns: gradients that arrived here.
    """

    loss: float
    other: float
    expert: float
    served: bool
    as_expected: bool
    load_ML: np.ndarray
    skew_ML: np.ndarray
    drift: int
    replicas: int
    cross_node: int
    distinct: bool
    fell_back: int
    backends: tuple
    copies: int
    returns: int
    served_skew_ML: np.ndarray | None
    known: tuple

    @property
    def equal(self):
        return self.loss == 0 and self.other == 0 and self.expert <= 1  # False for NaN


def one_step(
    _group, case, breakage="", unplanned=0, alike=False, options_of=None, hint=None, wrapped=False, unknown=0, padded=0
):  # fmt: skip
    """Compares two steps from the same weights, the second with what DDP learnt in the first; runs on a rank.

    Args:
        breakage, unplanned, alike, hint, wrapped, unknown, padded: of `program_arms.run`.
        options_of: a function that gives options of `attach`, or None.
    """
    options = options_of() if options_of else {}
    plain = _alone(case, unplanned, alike, hint, padded)
    planned = arms.run(
        case, 2, planned=True, update=False, breakage=breakage, unplanned=unplanned, alike=alike, hint=hint, wrapped=wrapped,
        unknown=unknown, padded=padded, **options,
    )  # fmt: skip
    losses, other, expert = [0.0], [0.0], [0.0]
    for step in range(2):
        losses += [abs(a - b) for a, b in zip(plain.losses[step], planned.losses[step], strict=True)]
        magnitudes = plain.magnitudes[step]
        for name, grad in plain.grads[step].items():
            error = (grad.double() - planned.grads[step][name].double()).abs()
            if name in magnitudes:
                bound = relative_bound(case, name) * magnitudes[name]
                expert.append(float(torch.where(error == 0, 0.0, error / bound).max()))
            else:
                other.append(float(error.max()))
    reports = planned.reports
    return Verdict(
        loss=float(np.max(losses)), other=float(np.max(other)), expert=float(np.max(expert)),
        served=all(np.array_equal(r.served_MLS, r.plan.quota_MLGS[:, :, planned.ep_rank]) for r in reports),
        as_expected=all(
            np.array_equal(r.served_MLS, served_MLS) and np.array_equal(r.drift_ML, drift_ML)
            for r, (served_MLS, drift_ML) in zip(reports, planned.expected, strict=True)
        ),
        load_ML=np.stack([r.served_MLS.sum(axis=2) for r in reports]), skew_ML=np.stack([r.plan.skew_ML for r in reports]),
        drift=sum(int(r.drift_ML.sum()) for r in reports), replicas=sum(r.plan.num_replicas for r in reports),
        cross_node=sum(_cross_node(case, r.plan) for r in reports), distinct=all(_distinct(r.plan) for r in reports),
        fell_back=sum(len(r.fell_back) for r in reports),
        copies=sum(
            r.timeline.to_dict()["weight_copies"] - int((r.plan.transfers.dst_C == planned.ep_rank).sum()) for r in reports
        ),
        returns=sum(r.timeline.to_dict()["gradient_returns"] for r in reports),
        known=tuple(r.known_rows for r in reports),
        served_skew_ML=None if hint is None else np.stack([r.served_skew_ML for r in reports]),
        backends=tuple(sorted({(e.kind, e.backend) for r in reports for e in r.timeline.events if e.outcome == "done"})),
    )  # fmt: skip


@functools.lru_cache(maxsize=4)
def _alone(case, unplanned, alike, hint, padded):
    """The run without foremoe; kept, as many comparisons in a row are with the same one. Ranks keep the same ones."""
    return arms.run(case, 2, update=False, watch=Magnitudes, unplanned=unplanned, alike=alike, hint=hint, padded=padded)


def relative_bound(case, name):
    """How far an element of an expert gradient may be off, as a multiple of its A; only weights' are fused."""
    layout = case.layout
    data_parallel = case.num_ranks // (layout.pp * layout.tp)
    k = layout.M * layout.T * data_parallel + EXTRA_ROUNDINGS  # no expert has more pairs than there are tokens
    gamma = k * 2.0**-24 / (1 - k * 2.0**-24)
    rounds = layout.bf16 and (layout.engine != "Fused" or "bias" in name)
    if layout.narrow:
        narrow = (layout.M + data_parallel + 4) * 2.0**-8
        return 2 * (gamma + narrow / (1 - narrow) * (1 + gamma))
    return 2 * (gamma + rounds * 2.0**-8 * (1 + gamma))


def _cross_node(case, plan):
    node_G = arms.cluster_of(case).node_of_rank_G
    at = np.argwhere(plan.quota_MLGS[..., plan.B :] > 0)
    homes = [plan.home_LE[layer, plan.expert_MLGS[m, layer, g, plan.B + s]] // plan.B for m, layer, g, s in at]
    return int((node_G[homes] != node_G[at[:, 2]]).sum())


def _distinct(plan):
    rows = np.concatenate([plan.expert_MLGS, plan.quota_MLGS], axis=3).reshape(plan.N, -1)
    return len(np.unique(rows, axis=0)) == plan.N


def several_steps(_group, case, num_steps, breakage="", steady=True):
    """Squared distances from the run without foremoe, of the run by plans and of the control; runs on a rank.

    Returns:
        kind ("losses", "weights", "checkpoint") -> (planned, control), and what differs in the checkpoints besides content.
    """
    plain = arms.run(case, num_steps, steady=steady)
    planned = arms.run(case, num_steps, planned=True, breakage=breakage, steady=steady)
    control = arms.run(case, num_steps, halves=True, steady=steady)
    of = {
        "losses": lambda run: {str(i): torch.tensor(losses) for i, losses in enumerate(run.losses)},
        "weights": lambda run: run.weights,
        "checkpoint": lambda run: {key: content for key, (_, content) in run.checkpoint.items() if content is not None},
    }
    found = {kind: tuple(_squares(get(plain), get(run)) for run in (planned, control)) for kind, get in of.items()}
    where = {key: place for key, (place, _) in plain.checkpoint.items()}
    other = {key: place for key, (place, _) in planned.checkpoint.items()}
    assert where, "the checkpoint is empty"
    return found, sorted(key for key in where.keys() | other.keys() if where.get(key) != other.get(key))


def _squares(one, other):
    return sum(float((one[key].double() - other[key].double()).square().sum()) for key in one)


def further_than_control(answers):
    """Kind -> how many times further than the control; over all ranks. Losses are told apart by their float32 spacing only."""
    out = {}
    for kind in answers[0][0]:
        planned, control = (sum(found[kind][i] for found, _ in answers) ** 0.5 for i in range(2))
        floor = 4 * 2.0**-22 if kind == "losses" else 0.0
        out[kind] = 0.0 if planned <= floor else planned / control if control else float("inf")
    return out
