"""DeepEpEngine over a stand-in of DeepEP's buffer: the uses, weights and gradients that every engine must give."""

import dataclasses

import pytest
import torch
from engine_util import SIZES, a_plan, check_grads, run_uses, values
from ep_buffer import EPBuffer
from hypothesis import given, note
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe.base.errors import InputError
from foremoe.distributed.group import ThreadGroup
from foremoe.testing import describe, plans, problems
from foremoe.testing.ranks import run_threads
from foremoe.transfer.deepep import DeepEpEngine

WIDTH = 8  # elements that an expert's tensors take: 32 bytes
DTYPE = torch.float32


class Stacked:
    """`StackedBuffers` of one rank, with the experts of engine_util.py."""

    def __init__(self, plan, rank, ep):
        head = plan.header
        self.num_buffers, self.dtype = head.num_buffers, DTYPE
        self._plan, self._rank = plan, rank
        shape = (plan.L, plan.B, WIDTH)
        self._homes, self._grads = ([torch.zeros(shape, dtype=DTYPE) for _ in SIZES] for _ in range(2))
        self.slots, self.slot_grads = ([ep.allocate((self.num_buffers, WIDTH), DTYPE) for _ in SIZES] for _ in range(2))
        self.update(0)

    def homes(self, layer):
        return [of[layer] for of in self._homes]

    def main_grads(self, layer):
        return [of[layer] for of in self._grads]

    def home(self, layer, expert):
        return self._cut(self.homes(layer), self._plan.home_LE[layer, expert] % self._plan.B)

    def main_grad(self, layer, expert):
        return self._cut(self.main_grads(layer), self._plan.home_LE[layer, expert] % self._plan.B)

    def slot(self, buffer):
        return self._cut(self.slots, buffer)

    def slot_grad(self, buffer):
        return self._cut(self.slot_grads, buffer)

    @property
    def grads(self):
        """(layer, expert) -> gradients, as engine_util checks them."""
        return {(layer, e): self.main_grad(layer, e) for layer, e in self._own()}

    def update(self, version):
        """What an optimizer does."""
        for layer, e in self._own():
            for old, new in zip(self.home(layer, e), values(layer, e, version, DTYPE), strict=True):
                old.copy_(new)

    def _own(self):
        plan = self._plan
        return [(i, e) for i in range(plan.L) for e in range(plan.E) if plan.home_LE[i, e] // plan.B == self._rank]

    @staticmethod
    def _cut(stacked, i):
        return [of[i, :n] for of, n in zip(stacked, SIZES, strict=True)]


def domains_of(plan):
    """Rank -> its group in its NVLink domain."""
    node_G, groups = plan.header.cluster.node_of_rank_G.tolist(), {}
    for node in set(node_G):
        ranks = [g for g, at in enumerate(node_G) if at == node]
        groups |= dict(zip(ranks, ThreadGroup.of(len(ranks), timeout_s=20.0), strict=True))
    return groups


def stage(group, plan, domains, stages=1):
    ep = EPBuffer(domains[group.rank])
    buffers = Stacked(plan, group.rank, ep)
    engine = DeepEpEngine(buffers, ep, group)
    for version in range(stages):
        engine.begin(plan)
        assert run_uses(engine, plan, group, version=version) == []
        engine.end()
        buffers.update(version + 1)
    if plan.header.schedule.trains:
        check_grads(plan, buffers, stages=stages)
    return ep.calls


@examples(60)
@given(st.data())
def test_uses_find_their_replicas_and_gradients_get_home(data):
    problem = data.draw(problems(max_ranks=4, max_layers=4, max_micro_steps=3))
    problem = dataclasses.replace(problem, replicas="node")
    note(describe(problem))
    plan = data.draw(plans(problem))
    run_threads(stage, problem.G, plan, domains_of(plan), 2)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_use_is_one_call_and_what_a_buffer_still_holds_is_not_sent_again(depth):
    plan = a_plan(micro_steps=2, layers=2, slot_depth=depth)
    num_filled, num_rows = len(set(plan.transfers.need_C.tolist())), plan.M * plan.L
    assert num_filled == num_rows if depth == 4 else num_filled > num_rows
    for calls in run_threads(stage, plan.G, plan, domains_of(plan)):
        assert calls == {"lb_prefetch_weights": num_filled, "lb_reduce_grads": len(SIZES) * num_rows}


def test_replicas_in_another_domain_are_refused_on_all_ranks():
    plan = a_plan(ranks=4)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=4, ranks_per_node=2)
    plan = dataclasses.replace(plan, header=dataclasses.replace(plan.header, cluster=cluster)).rederived()

    def begin(group, domains):
        ep = EPBuffer(domains[group.rank])
        with pytest.raises(InputError) as refused:
            DeepEpEngine(Stacked(plan, group.rank, ep), ep, group).begin(plan)
        return str(refused.value)

    assert all('plan with replicas="node"' in said for said in run_threads(begin, 4, domains_of(plan)))


def test_uses_out_of_turn_are_refused():
    plan = a_plan()

    def wrong(group, domains):
        ep = EPBuffer(domains[group.rank])
        engine = DeepEpEngine(Stacked(plan, group.rank, ep), ep, group)
        with pytest.raises(InputError, match="is not the next use of a plan that has begun"):
            engine.prepare(0, 0, 0)
        engine.begin(plan)
        with pytest.raises(InputError, match="is not the next use"):
            engine.weights(1, 1, 0)

    run_threads(wrong, plan.G, domains_of(plan))
