"""The program in arms, on one rank: as Megatron runs it, by plans, and with sums in another order."""

import contextlib
import dataclasses
from dataclasses import dataclass, field
from unittest.mock import patch

import cpu
import numpy as np
import torch
import torch.distributed as dist
from breakages import BREAKAGES
from program import Program

from foremoe.machine.cluster import Cluster
from foremoe.problem.cost import CostModel
from foremoe.problem.foresight import Rerouted

# Letters: M micro-steps, L MoE layers of this rank, G ranks of the EP group, S slots of a rank, T tokens, K top-k.


@dataclass
class Run:
    """What one arm did on one rank, step by step.

    Attributes:
        losses, grads: of each step; gradients before the optimizer.   weights: name -> tensor, at the end.
        checkpoint: see `checkpoint_of`.   reports: of foremoe; empty without it.   expected: see `expected_service`.
        magnitudes: of each step, if watched.
    """

    ep_rank: int
    losses: list = field(default_factory=list)
    grads: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)
    checkpoint: dict = field(default_factory=dict)
    reports: list = field(default_factory=list)
    magnitudes: list = field(default_factory=list)
    expected: list = field(default_factory=list)


def run(
    case,
    num_steps,
    *,
    planned=False,
    update=True,
    halves=False,
    steady=True,
    breakage="",
    watch=None,
    unplanned=0,
    alike=False,
    unknown=0,
    padded=0,
    hint=None,
    wrapped=False,
    **options,
):
    """Runs the program for some optimizer steps.

    Args:
        planned: with foremoe.   update: whether the optimizer steps; without it all steps start from the same weights.
        halves: the control, see `in_halves`.   steady: products of matrices as `cpu.steady_rows` has them.
        breakage: name of what is broken on purpose.   watch: `Magnitudes`, or None.
        unplanned: rows at the end of every sequence that are routed otherwise than plans know.   alike: the experts that are
            popular among the others are so among these.
        unknown: rows at the end of every sequence of which plans know nothing.
        padded: rows at the beginning of every sequence that have one expert, as often as others have experts.
        hint: routers route by themselves; plans are made from this share of choices changed.
        wrapped: plans are made by `forward_backward`, around Megatron's own function.
        options: of `attach`.
    """
    program = Program(case.layout)
    found = Run(ep_rank=program.ps.get_expert_model_parallel_rank())
    with contextlib.ExitStack() as stack:
        moe = stack.enter_context(attached(program, case, **options)) if planned else None
        stack.enter_context(cpu.steady_rows() if steady else contextlib.nullcontext())
        stack.enter_context(in_halves(program) if halves else contextlib.nullcontext())
        stack.enter_context(BREAKAGES[breakage]() if breakage else contextlib.nullcontext())
        magnitudes = stack.enter_context(watch(program)) if watch else None
        for step in range(num_steps):
            program.zero()
            topk_MTLK = program.routing(step) if hint is None else program.own_routing(step, forward_only=True)[0]
            topk_MTLK[:, : padded * case.layout.batch, :, 1:] = topk_MTLK[:, : padded * case.layout.batch, :, :1]
            known = topk_MTLK if hint is None else changed(topk_MTLK, hint, program)
            if unknown:
                known = known.clone()
                known[:, -unknown * case.layout.batch :] = -1
            work = moe.plan([topk_TLK.numpy() for topk_TLK in known]) if moe else None
            if unplanned:  # the last tokens, since these are sorted by their place in the sequence
                last = slice(-unplanned * case.layout.batch, None)
                topk_MTLK[:, last] = program.routing(step, seed=7, popular=0 if alike else 7)[:, last]
            around = wrapped_calls(moe, known) if wrapped else moe.stage(work, replay=hint is None) if moe else None
            with around or contextlib.nullcontext():
                if hint is None:
                    found.losses.append(program.forward_backward(step, topk_MTLK))
                else:
                    topk_MTLK, losses = program.own_routing(step)
                    found.losses.append(losses)
            found.grads.append(program.main_grads())
            if magnitudes:
                found.magnitudes.append(magnitudes.take())
            if moe:
                found.reports.append(moe.report)
                found.expected.append(expected_service(program, work, topk_MTLK))
            if update:
                program.optimizer.step()
        if update:  # before its first step an optimizer has no state to save
            found.weights, found.checkpoint = program.weights(), checkpoint_of(program)
    return found


def changed(topk_MTLK, share, program):
    """The routing with a share of the (token, layer) choices changed: one expert of each is another, drawn by load."""
    seed = program.ps.get_data_parallel_rank()
    return torch.stack([torch.from_numpy(Rerouted(share, seed=seed).choices(topk_TLK.numpy())) for topk_TLK in topk_MTLK])


@contextlib.contextmanager
def wrapped_calls(moe, topk_MTLK):
    """Whoever asks Megatron for its forward-backward function gets one that plans from this routing."""
    from megatron.core import pipeline_parallel

    from foremoe.integrations.megatron import forward_backward

    run = forward_backward(moe, lambda call: [topk_TLK.numpy() for topk_TLK in topk_MTLK])
    with patch.object(pipeline_parallel, "get_forward_backward_func", lambda: run):
        yield run


@contextlib.contextmanager
def attached(program, case, **options):
    """foremoe attached to a program, on the cluster of the case."""
    from foremoe.integrations.megatron import attach

    # At toy sizes no replica is worth its transfer: plan for balance alone.
    options = {"cost": CostModel(objective="balance"), "slot_depth": case.slot_depth, "cluster": cluster_of(case)} | options
    moe = attach(program.chunks, **options)
    try:
        yield moe
    finally:
        moe.detach()


def cluster_of(case):
    ep = case.layout.ep
    node_of_rank_G = (np.arange(ep) * case.nodes // ep).astype(np.int32)
    return dataclasses.replace(Cluster.preset("8xh100", num_ranks=ep, host_store=True), node_of_rank_G=node_of_rank_G)


@contextlib.contextmanager
def in_halves(program):
    """The control: every expert computes its tokens in two batches, the second half of each first.

    The same products and sums in real numbers. A weight gradient becomes the sum of two partial sums, as it does when a replica
    serves a part of the tokens; and BLAS may choose other kernels for the smaller batches.
    """
    modules = [layer.mlp.experts for m in program.bare for layer in m.decoder.layers if hasattr(layer.mlp, "router")]

    def forward_of(experts):
        def forward(x_YH, num_B, probs_Y):
            expert_Y = torch.repeat_interleave(torch.arange(len(num_B)), num_B)
            first_Y = torch.arange(len(expert_Y)) - (num_B.cumsum(0) - num_B)[expert_Y] < num_B[expert_Y] // 2
            order, outputs = [], []
            for mine_Y in (~first_Y, first_Y):
                order.append(mine_Y.nonzero()[:, 0])
                num = torch.bincount(expert_Y[mine_Y], minlength=len(num_B))
                outputs.append(type(experts).forward(experts, x_YH[mine_Y], num, probs_Y[mine_Y])[0])
            return torch.cat(outputs)[torch.cat(order).argsort()], None

        return forward

    for experts in modules:
        experts.forward = forward_of(experts)
    try:
        yield
    finally:
        for experts in modules:
            del experts.forward


def expected_service(program, planned, topk_MTLK):
    """What slots of this rank should serve, [M, L, S], and pairs of this rank that the plan did not know, [M, L]; collective.

    Of a source's pairs of an expert each slot serves its share, as far as they go; what no slot was to serve goes home.
    """
    plan = planned.plan
    served_MLP = torch.zeros(planned.split_MLP.shape, dtype=torch.int64)
    drift_ML = np.zeros(served_MLP.shape[:2], np.int64)
    places = [program.layout.moe_layers.index(number) for number in plan.header.moe_layer_L.tolist()]
    for m, layer in np.ndindex(*drift_ML.shape):
        expert_P = plan.expert_MLGS[m, layer].ravel()
        topk_TK = topk_MTLK[m, :, places[layer]]
        pairs_TE = torch.zeros(len(topk_TK), plan.E, dtype=torch.bool).scatter_(1, topk_TK, True)  # an expert serves a token once
        for e, left in enumerate(pairs_TE.sum(0).tolist()):
            for p in np.flatnonzero(expert_P == e).tolist():
                here = min(left, int(planned.split_MLP[m, layer, p]))
                served_MLP[m, layer, p] += here
                left -= here
            rank, slot = divmod(int(plan.home_LE[layer, e]), plan.B)
            served_MLP[m, layer, rank * plan.S + slot] += left
            drift_ML[m, layer] += left
    dist.all_reduce(served_MLP, group=program.ps.get_expert_model_parallel_group())
    rank = program.ps.get_expert_model_parallel_rank()
    return served_MLP.numpy()[:, :, rank * plan.S : (rank + 1) * plan.S], drift_ML


def checkpoint_of(program):
    """Key -> (where the tensor lies in the whole, its content or None), of model and optimizer."""
    model = {f"model{c}": module.sharded_state_dict() for c, module in enumerate(program.bare)}
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    whole = model["model0"] if len(model) == 1 else model
    state = model | {"optimizer": program.optimizer.sharded_state_dict(whole, metadata=metadata)}
    return {name: _described(part) for name, part in _flat(state)}


def _flat(state, name=""):
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _flat(value, f"{name}/{key}")
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from _flat(value, f"{name}/{i}")
    else:
        yield name, state


def _described(part):
    if isinstance(part, torch.Tensor):
        return ("tensor", tuple(part.shape), str(part.dtype)), part.detach().clone()
    where = tuple(
        str(getattr(part, a, None)) for a in ("key", "global_shape", "global_offset", "local_shape", "replica_id", "dtype")
    )
    data = getattr(part, "data", part)
    where = (type(part).__name__, *where)
    if isinstance(data, torch.Tensor):
        return where, data.detach().clone()
    return where, None
