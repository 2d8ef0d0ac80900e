"""Toy experts for the engine, each two small tensors with numbers of its own; uses that add known gradients; plans to run."""

import numpy as np
import torch

import foremoe
from foremoe.problem.schedule import Phase
from foremoe.transfer.engine import Engine

# Letters: S slots of a rank.

SIZES = (5, 3)


class ToyBuffers:
    """Buffers of one rank; weights are a function of (layer, expert, version)."""

    def __init__(self, plan, rank, *, num_buffers=None, dtype=torch.float64):
        head = plan.header
        own = head.num_buffers if head.redundant else 0
        self.num_buffers = own if num_buffers is None else num_buffers
        self.dtype, self.rank = dtype, rank
        self.homes = {
            (layer, e): values(layer, e, 0, dtype)
            for layer in range(plan.L)
            for e in range(plan.E)
            if plan.home_LE[layer, e] // plan.B == rank
        }
        self.grads = {key: [torch.zeros_like(x) for x in tensors] for key, tensors in self.homes.items()}
        self.slots = [[torch.zeros(n, dtype=dtype) for n in SIZES] for _ in range(self.num_buffers)]
        self.slot_grads = [[torch.zeros(n, dtype=dtype) for n in SIZES] for _ in range(self.num_buffers)]

    def home(self, layer, expert):
        return self.homes[layer, expert]

    def slot(self, buffer):
        return self.slots[buffer]

    def main_grad(self, layer, expert):
        return self.grads[layer, expert]

    def slot_grad(self, buffer):
        return self.slot_grads[buffer]

    def update(self, version):
        """What an optimizer does."""
        for (layer, e), tensors in self.homes.items():
            for old, new in zip(tensors, values(layer, e, version, self.dtype), strict=True):
                old.copy_(new)


def values(layer, expert, version, dtype):
    base = 1000.0 * version + 100.0 * layer + expert
    return [torch.arange(n, dtype=dtype) * 0.25 + base + i for i, n in enumerate(SIZES)]


def gradient(m, layer, expert, rank):
    """What the slot of a rank contributes: a number exact in floating point, so that sums can be compared with ==."""
    return float(1 + m * 64 + layer * 8 + rank) + expert / 16.0


def expected_grads(plan, *, fell_back=()):
    """(layer, expert) -> the sum over the rows and slots that serve it."""
    total = {}
    for m in range(plan.M):
        for layer in range(plan.L):
            for g in range(plan.G):
                for s in range(plan.S):
                    e = int(plan.expert_MLGS[m, layer, g, s])
                    served = s < plan.B or (plan.quota_MLGS[m, layer, g, s] > 0 and (m, layer) not in fell_back)
                    if served and e >= 0:
                        total[layer, e] = total.get((layer, e), 0.0) + gradient(m, layer, e, g)
    return total


def run_uses(engine, plan, group, *, version=0, stop=None, on_use=None):
    """Runs all uses (up to `stop`) and checks what slots hold; rows whose replicas are missing anywhere fall back."""
    fell_back = []
    for u, (m, layer, phase) in enumerate(uses_of(plan)):
        if u == stop:
            break
        if on_use is not None:
            on_use(u)
        complete = engine.prepare(m, layer, phase)
        if phase == Phase.FORWARD and not all(group.gather(complete)):
            engine.fall_back(m, layer)
            fell_back.append((m, layer))
        found = engine.weights(m, layer, phase)
        check(plan, found, m, layer, group.rank, version, engine.buffers.dtype, at_home=(m, layer) in fell_back)
        if phase == Phase.BACKWARD:
            for s, e in enumerate(found.expert_S):
                if e >= 0:
                    for grad in found.grads_S[s]:
                        grad += gradient(m, layer, e, group.rank)
            engine.gradients(m, layer)
        engine.release(m, layer, phase)
        engine.launch()
    return fell_back


def uses_of(plan):
    """(micro-step, layer, phase) in the order of the plan's schedule."""
    uses = plan.header.schedule.uses(plan.L)
    for m, layer, phase in zip(uses.micro_step_U.tolist(), uses.layer_U.tolist(), uses.phase_U.tolist(), strict=True):
        yield m, layer, Phase(phase)


def run_products(engine, plan, products):
    """All uses in the order of a layer's calls; experts compute `products(micro-step, layer, phase, residency)`."""
    for m, layer, phase in uses_of(plan):
        engine.prepare(m, layer, phase)
        products(m, layer, phase, engine.weights(m, layer, phase))
        if phase == Phase.BACKWARD:
            engine.gradients(m, layer)
        engine.release(m, layer, phase)
        engine.launch()


def run_plan(engine, plan, group, *, same_weights=False, **options):
    """A plan from begin to end; returns (fell back, timeline)."""
    engine.begin(plan, same_weights=same_weights)
    fell_back = run_uses(engine, plan, group, **options)
    return fell_back, engine.end()


def run_stage(
    group, plan, backends, *, timeout_s=2.0, stop_rank=None, stop_use=None, debug=True, prefetch=2, stages=1, buffers=None
):  # fmt: skip
    """Stages of a plan, with an optimizer step after each, or the begin of one on one rank; the last's (fell back, timeline)."""
    buffers = buffers or ToyBuffers(plan, group.rank)
    engine = Engine(buffers, group=group, backends=backends, prefetch=prefetch, timeout_s=timeout_s, debug=debug)
    try:
        for version in range(stages):
            engine.begin(plan)
            fell_back = run_uses(engine, plan, group, version=version, stop=stop_use if group.rank == stop_rank else None)
            if group.rank == stop_rank:
                return None
            timeline = engine.end()
            buffers.update(version + 1)
    finally:
        engine.close()
    if plan.header.schedule.trains:
        check_grads(plan, buffers, stages=stages, fell_back=fell_back)
    return fell_back, timeline


def check(plan, found, m, layer, rank, version, dtype, *, at_home):
    for s in range(plan.S):
        e = int(plan.expert_MLGS[m, layer, rank, s])
        if s >= plan.B and (at_home or plan.quota_MLGS[m, layer, rank, s] == 0):
            assert found.weights_S[s] is None and found.expert_S[s] == -1
        else:
            assert found.expert_S[s] == e
            for have, want in zip(found.weights_S[s], values(layer, e, version, dtype), strict=True):
                assert torch.equal(have, want), f"micro-step {m}, layer {layer}, rank {rank}, slot {s}, expert {e}"


def check_grads(plan, buffers, *, stages=1, fell_back=()):
    total = expected_grads(plan, fell_back=fell_back)
    for (layer, e), tensors in buffers.grads.items():
        for grad in tensors:
            assert (grad == stages * total.get((layer, e), 0.0)).all(), f"layer {layer}, expert {e}"


def a_plan(*, redundant=1, micro_steps=3, layers=2, ranks=3, slot_depth=3, stage="update", seed=0):
    """A plan with replicas in every row, of another expert in each."""
    rng = np.random.default_rng(seed)
    load_MLGE = rng.integers(1, 20, (micro_steps, layers, ranks, 2 * ranks))
    for m, layer in np.ndindex(micro_steps, layers):
        load_MLGE[m, layer, :, (m * layers + layer) % (2 * ranks)] += 60
    model = foremoe.Model(
        name="toy", num_layers=layers, num_experts=2 * ranks, num_topk=1, hidden_size=4, ffn_size=8, first_moe_layer=0,
        attention_params=64, num_heads=1, qk_head_dim=4, v_head_dim=4, source="made up for tests",
    )  # fmt: skip
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=1, stage=stage)
    problem = foremoe.Problem.of(
        work,
        foremoe.Cluster.preset("8xh100", num_ranks=ranks, host_store=True),
        model=model,
        redundant=redundant,
        cost=foremoe.CostModel(objective="balance"),
        slot_depth=slot_depth,
    )
    plan, _ = foremoe.Planner().plan(problem)
    assert (plan.quota_MLGS[..., plan.B :] > 0).any(axis=(2, 3)).all()
    return plan
