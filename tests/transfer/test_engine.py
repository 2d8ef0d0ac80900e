"""Engine: uses find their replicas and gradients get home, in any schedule and with any slot_depth."""

import numpy as np
import torch
from engine_util import SIZES, ToyBuffers, a_plan, expected_grads, run_products, run_stage, run_uses, uses_of, values
from flaky import Late
from hypothesis import given, note
from hypothesis import strategies as st
from profiles import examples

from foremoe.plan.programme import Programme
from foremoe.problem.schedule import Phase
from foremoe.testing import describe, plans, problems
from foremoe.testing.ranks import run_threads
from foremoe.transfer.contents import digest
from foremoe.transfer.engine import Engine
from foremoe.transfer.local import Local

few = examples(60)
PROBLEMS = problems(max_ranks=4, max_layers=4, max_micro_steps=3)


@few
@given(st.data())
def test_uses_find_their_replicas_and_gradients_get_home(data):
    problem = data.draw(PROBLEMS)
    note(describe(problem))
    plan = data.draw(plans(problem))
    options = {"prefetch": data.draw(st.integers(0, 4)), "debug": data.draw(st.booleans()), "stages": 2}
    results = run_threads(lambda group: run_stage(group, plan, (Local(),), **options), problem.G)
    copies = sum(e.kind == "weights" for _, t in results for e in t.events)
    assert copies == len(plan.transfers)
    if problem.schedule.trains:
        returned = sum(e.kind == "gradient" for _, t in results for e in t.events)
        assert returned == plan.num_replicas


@examples(25)
@given(st.data())
def test_copies_may_be_read_and_land_long_after_their_start(data):
    """A backend that reads sources late sees every source, gradient buffer and home that is written too early."""
    problem = data.draw(problems(max_ranks=3, max_layers=2, max_micro_steps=2, min_redundant=1, stages=("update",)))
    note(describe(problem))
    plan = data.draw(plans(problem))
    options = {"prefetch": data.draw(st.integers(0, 4)), "debug": False, "stages": 2}
    results = run_threads(lambda group: run_stage(group, plan, (Late(),), **options), problem.G)
    assert not any(t.fell_back for _, t in results)


def test_sums_come_out_the_same_in_every_run():
    plan = a_plan(micro_steps=4)

    def summed(group):
        buffers = ToyBuffers(plan, group.rank, dtype=torch.float32)
        engine = Engine(buffers, group=group, backends=(Local(),))
        engine.begin(plan)

        def products(m, layer, phase, found):
            for s, e in enumerate(found.expert_S if phase == Phase.BACKWARD else ()):
                if e >= 0:
                    generator = torch.Generator().manual_seed(m * 1000 + layer * 100 + e * 10 + group.rank)
                    for grad in found.grads_S[s]:
                        grad += torch.randn(grad.shape, generator=generator) * 10.0 ** float(3 * group.rank)

        run_products(engine, plan, products)
        engine.end()
        engine.close()
        return {key: torch.cat(grads) for key, grads in buffers.grads.items()}

    first = run_threads(summed, plan.G)
    for _ in range(2):
        again = run_threads(summed, plan.G)
        assert all(torch.equal(a[key], b[key]) for a, b in zip(first, again, strict=True) for key in a)


def test_gradients_are_summed_in_float32_for_narrow_weights():
    plan = a_plan()

    def narrow(group):
        buffers = ToyBuffers(plan, group.rank, dtype=torch.bfloat16)
        for grads in (buffers.grads.values(), buffers.slot_grads):
            for tensors in grads:
                tensors[:] = [x.float() for x in tensors]
        run_stage(group, plan, (Local(),), buffers=buffers)

    run_threads(narrow, plan.G)


def test_replica_gradients_are_added_once_to_bf16_main_gradients():
    """One by one, most of them would be lost: next to 1024, bf16 has nothing smaller than 8."""
    plan = a_plan(micro_steps=4)

    def narrow(group, settle):
        buffers = ToyBuffers(plan, group.rank, dtype=torch.bfloat16)
        for tensors in buffers.slot_grads:
            tensors[:] = [x.float() for x in tensors]
        for tensors in buffers.grads.values():
            for x in tensors:
                x.fill_(1024.0)
        engine = Engine(buffers, group=group, backends=(Local(),), debug=True)
        engine.begin(plan)
        for m, layer, phase in uses_of(plan):
            found = engine.weights(m, layer, phase)
            if phase == Phase.BACKWARD:
                for s, e in enumerate(found.expert_S[plan.B :], plan.B):
                    for grad in found.grads_S[s] if e >= 0 else ():
                        grad += 1.25
                engine.gradients(m, layer)
            engine.release(m, layer, phase)
            engine.launch()
            if settle and phase == Phase.BACKWARD and m == plan.M - 1:
                engine.settle(layer)
        engine.end()
        engine.close()
        num_LE = np.zeros((plan.L, plan.E), np.int64)
        for m, layer, g, s in np.argwhere(plan.quota_MLGS[..., plan.B :] > 0):
            num_LE[layer, plan.expert_MLGS[m, layer, g, plan.B + s]] += 1
        assert num_LE.max() > 2
        for (layer, e), tensors in buffers.grads.items():
            wanted = torch.tensor(1024.0 + 1.25 * num_LE[layer, e]).bfloat16()
            assert all((x == wanted).all() for x in tensors), (layer, e)
        gets = sum(num_LE[key] > 0 for key in buffers.grads)
        assert engine.sum_bytes <= gets * 4 * sum(SIZES) and (engine.sum_bytes > 0) == (gets > 0)

    for settle in (False, True):
        run_threads(narrow, plan.G, settle)


def test_no_copy_starts_before_its_buffer_is_free_nor_earlier_than_prefetch():
    """Back-pressure: the destination's buffer still holds what the last use reads."""
    plan = a_plan(micro_steps=4, slot_depth=1)
    for prefetch in (0, 1, 8):
        results = run_threads(lambda group, prefetch=prefetch: run_stage(group, plan, (Local(),), prefetch=prefetch), plan.G)
        assert all(t.events for _, t in results)
        programme = Programme.of(plan, 0, prefetch)
        uses = plan.header.schedule.uses(plan.L)
        after_C = np.where(plan.transfers.after_C < 0, -1, np.searchsorted(uses.use_U, plan.transfers.after_C))
        assert (programme.start_C > after_C).all() and (programme.start_C <= programme.need_C).all()
        assert (programme.need_C - programme.start_C <= prefetch).all()


def test_released_memory_is_filled_with_nan_in_debug():
    plan = a_plan(slot_depth=1, micro_steps=2)

    def released(group):
        buffers = ToyBuffers(plan, group.rank)
        engine = Engine(buffers, group=group, backends=(Local(),), debug=True, prefetch=0)
        engine.begin(plan)
        assert all(torch.isnan(x).all() for tensors in buffers.slot_grads for x in tensors)
        run_uses(engine, plan, group)
        engine.end()
        assert all(torch.isnan(x).all() for tensors in buffers.slot_grads for x in tensors)
        engine.close()

    run_threads(released, plan.G)


def test_toys_differ_between_experts_and_versions():
    assert not torch.equal(values(0, 1, 0, torch.float64)[0], values(0, 2, 0, torch.float64)[0])
    assert expected_grads(a_plan())


def test_fingerprints_of_weights_leave_their_memory_to_who_offloads_it():
    weight = torch.arange(4.0)
    assert digest([weight]) == digest([weight.clone()]) != digest([weight + 1])
    weight.untyped_storage().resize_(0)
