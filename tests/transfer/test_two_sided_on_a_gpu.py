"""Stages over a pretended NCCL as late as it may be: weights, host stores and gradients are right all the same."""

import dataclasses
import functools
from functools import partial

import late_nccl
import numpy as np
import pretend_gpu
import pytest
import torch
from engine_util import a_plan, expected_grads, gradient, run_products, values
from late_nccl import LateNccl, OverNccl
from pretend_gpu import gpu, raw
from test_faults import by_host
from test_order_on_a_gpu import OnGpu

from foremoe.problem.schedule import Phase
from foremoe.testing.ranks import run_threads
from foremoe.transfer.cupy_peer import CupyPeer
from foremoe.transfer.engine import Engine
from foremoe.transfer.pinned_host import PinnedHost

STAGES = 3


@pytest.fixture(params=["late", "early"], autouse=True)
def order(request, monkeypatch):
    pretend_gpu.install(monkeypatch, request.param)
    late_nccl.install(monkeypatch)
    monkeypatch.setattr(CupyPeer, "requires", ())
    return request.param


@functools.cache
def plans():
    """Gradients every way: with a ring that is overwritten all the time, with one that holds all, and with four ranks."""
    return {
        "one buffer": a_plan(ranks=3, slot_depth=1),
        "three buffers": a_plan(ranks=3),
        "buffers for all": a_plan(ranks=3, slot_depth=8),
        "four ranks": a_plan(ranks=4, redundant=2, micro_steps=4),
        "one home feeds two nodes": in_nodes_of_two(everywhere(ranks=4, micro_steps=6, stage="recompute", slot_depth=1)),
    }


def everywhere(*, ranks, micro_steps, stage, slot_depth):
    """Every row copies one expert to all other ranks."""
    plan = a_plan(ranks=ranks, micro_steps=micro_steps, stage=stage, slot_depth=slot_depth)
    expert_MLGS, quota_MLGS = plan.expert_MLGS.copy(), plan.quota_MLGS.copy()
    expert_MLGS[..., plan.B :], quota_MLGS[..., plan.B :] = -1, 0
    quota_MLGS[..., : plan.B] = np.take_along_axis(plan.load_MLE[:, :, None], expert_MLGS[..., : plan.B].astype(np.int64), 3)
    for m, layer in np.ndindex(plan.M, plan.L):
        e = (m * plan.L + layer) % plan.E
        home, b = divmod(int(plan.home_LE[layer, e]), plan.B)
        for g in set(range(ranks)) - {home}:
            expert_MLGS[m, layer, g, plan.B], quota_MLGS[m, layer, g, plan.B] = e, 2
            quota_MLGS[m, layer, home, b] -= 2
    zero = np.zeros_like(plan.bound_ML)
    return dataclasses.replace(
        plan, expert_MLGS=expert_MLGS, quota_MLGS=quota_MLGS, bound_ML=zero, load_bound_ML=zero, stop_ML=plan.stop_ML * 0
    ).rederived()


def in_nodes_of_two(plan):
    cluster = plan.header.cluster.with_ranks(plan.G, 2)
    return dataclasses.replace(plan, header=dataclasses.replace(plan.header, cluster=cluster)).rederived()


def stage(group, plan, backends, options):
    """Three stages; experts' kernels note weights that are wrong when they run, and add to gradients."""
    buffers, wrong = OnGpu(plan, group.rank), []
    engine = Engine(buffers, group=group, backends=tuple(backend() for backend in backends), **options)

    def products(version, m, layer, phase, found):
        for e, tensors, grads in zip(found.expert_S, found.weights_S, found.grads_S or [None] * plan.S, strict=True):
            for have, want in zip(tensors or (), values(layer, e, version, buffers.dtype) if e >= 0 else (), strict=False):
                if not torch.equal(raw(have), want):
                    wrong.append(("weights", group.rank, version, m, layer, e))
            for grad in grads or () if phase == Phase.BACKWARD and e >= 0 else ():
                raw(grad).add_(gradient(m, layer, e, group.rank))

    for version in range(STAGES):
        engine.begin(plan)
        run_products(engine, plan, lambda *use, v=version: torch.cuda.current_stream().put(partial(products, v, *use)))
        engine.end()
        for (layer, e), tensors in buffers.homes.items():  # weights move, and others write where they were
            for old in tensors:
                raw(old).fill_(float("nan"))
            buffers.homes[layer, e] = [stepped(new) for new in values(layer, e, version + 1, buffers.dtype)]
    torch.cuda.synchronize()
    group.barrier()
    engine.close()
    for (layer, e), grads in buffers.grads.items():
        for grad in grads:
            want = STAGES * expected_grads(plan).get((layer, e), 0.0) if plan.header.schedule.trains else 0.0
            if not (raw(grad) == want).all():
                wrong.append(("gradient", group.rank, layer, e, raw(grad)[0].item(), want))
    return wrong


def stepped(weight):
    """Memory to which a queued kernel of the optimizer writes."""
    new = gpu.allocate(torch.full_like(weight, float("nan")))
    gpu.stream().put(lambda: raw(new).data.copy_(weight))  # only a kernel's launch counts as a write to the weights
    return new


CASES = [(case, {}) for case in ("one buffer", "three buffers", "buffers for all", "four ranks", "one home feeds two nodes")]
CASES += [(case, options) for options in ({"prefetch": 0}, {"return_bytes": 1}) for case in ("three buffers", "four ranks")]


@pytest.mark.parametrize("backends", [(LateNccl,), (CupyPeer, LateNccl)], ids=["nccl", "cupy_peer and nccl"])
@pytest.mark.parametrize(("case", "options"), CASES, ids=str)
def test_weights_and_gradients_are_right(case, backends, options):
    plan = plans()[case]
    assert [wrong for rank in run_threads(stage, plan.G, plan, backends, options) for wrong in rank] == []


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}], ids=repr)
@pytest.mark.parametrize("node_G", [(0, 0, 1, 1), (0, 1, 0, 1)], ids=repr)
def test_host_stores_between_nodes_hold_right_weights(node_G, options):
    """Gradients go home by messages beside the exchanges that fill the stores."""
    plan = by_host(a_plan(ranks=4))

    def one(group):
        return stage(OverNccl(group), plan, (partial(PinnedHost, node_G), LateNccl), options)

    assert [wrong for rank in run_threads(one, plan.G) for wrong in rank] == []


def test_the_last_gradients_are_home_before_the_stream_goes_on():
    """What is queued behind `end` sees all sums."""
    plan, seen = a_plan(ranks=2), []

    def one(group):
        buffers = OnGpu(plan, group.rank)
        engine = Engine(buffers, group=group, backends=(LateNccl(),))
        engine.begin(plan)

        def products(m, layer, phase, found):
            for grads in found.grads_S if phase == Phase.BACKWARD else ():
                for grad in grads or ():
                    grad.add_(1.0)

        run_products(engine, plan, products)
        engine.end()
        total = {key: grads[0] for key, grads in buffers.grads.items()}
        gpu.stream().put(lambda: seen.append({key: raw(grad)[0].item() for key, grad in total.items()}))
        torch.cuda.current_stream().synchronize()
        group.barrier()
        engine.close()

    run_threads(one, 2)
    num = {}
    for m, layer, g, s in np.ndindex(plan.expert_MLGS.shape):
        e = int(plan.expert_MLGS[m, layer, g, s])
        if e >= 0 and (s < plan.B or plan.quota_MLGS[m, layer, g, s]):
            num[layer, e] = num.get((layer, e), 0.0) + 1.0
    assert {key: value for rank in seen for key, value in rank.items()} == num
