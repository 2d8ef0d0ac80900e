"""Engine: what is used wrongly, written at the wrong time or differs between ranks ends in one sentence on every rank."""

import dataclasses

import pytest
import torch
from engine_util import ToyBuffers, a_plan, run_plan, run_uses

from foremoe.base.errors import InputError, StaleWeights
from foremoe.problem.schedule import Phase
from foremoe.testing.ranks import run_threads
from foremoe.transfer.engine import Engine
from foremoe.transfer.local import Local


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.float16, r"main gradients are torch\.float16; keep them in float32"),
        (torch.bfloat16, r"gradients of replicas are torch\.bfloat16; keep them in float32"),
    ],
)
def test_narrow_gradients_are_refused(dtype, said):
    plan = a_plan()

    def narrow(group):
        engine = Engine(ToyBuffers(plan, group.rank, dtype=dtype), group=group, backends=(Local(),))
        with pytest.raises(InputError, match=said):
            engine.begin(plan)
        engine.close()

    run_threads(narrow, plan.G)


def test_misuse_ends_in_one_sentence():
    plan, other = a_plan(), a_plan(seed=1)
    moved = dataclasses.replace(plan, header=dataclasses.replace(plan.header, keeps_homes=False))

    def misuse(group):
        buffers = ToyBuffers(plan, group.rank)
        engine = Engine(buffers, group=group, backends=(Local(),))
        with pytest.raises(InputError, match="no plan is running"):
            engine.weights(0, 0, Phase.FORWARD)
        with pytest.raises(InputError, match="moves homes"):
            engine.begin(moved)
        with pytest.raises(InputError, match="rank 1 was given another plan"):
            engine.begin(other if group.rank == 1 else plan)
        with pytest.raises(InputError, match="a plan before"):
            engine.begin(plan, same_weights=True)
        with pytest.raises(InputError, match="the plan is for 2 ranks and the group has 3"):
            engine.begin(a_plan(ranks=2))
        engine.begin(plan)
        with pytest.raises(InputError, match="a plan is running"):
            engine.begin(plan)
        with pytest.raises(
            InputError, match=r"has forward of micro-step \d, layer 0 next; got forward of micro-step \d, layer 1"
        ):
            engine.weights(0, 1, Phase.FORWARD)
        with pytest.raises(InputError, match="which the plan does not have"):
            engine.weights(99, 0, Phase.FORWARD)
        with pytest.raises(InputError, match="released before"):
            engine.release(0, 0, Phase.FORWARD)
        with pytest.raises(InputError, match="uses were not run"):
            engine.end()
        run_uses(engine, plan, group)
        engine.end()
        engine.close()
        engine.close()
        with pytest.raises(InputError, match="it was closed"):
            engine.begin(plan)

    run_threads(misuse, plan.G)
    with pytest.raises(InputError, match="at least one transfer backend"):
        Engine(None, backends=())


def test_a_ring_too_small_for_the_plan_is_refused_on_all_ranks():
    plan = a_plan(slot_depth=3)

    def small(group):
        buffers = ToyBuffers(plan, group.rank, num_buffers=1 if group.rank == 2 else None)
        engine = Engine(buffers, group=group, backends=(Local(),))
        with pytest.raises(InputError, match=r"uses \d+ slot buffers per rank and there are 1; create more"):
            engine.begin(plan)
        engine.close()

    run_threads(small, plan.G)


def test_gradients_come_once_and_before_release():
    plan = a_plan()

    def forget(group):
        engine = Engine(ToyBuffers(plan, group.rank), group=group, backends=(Local(),))
        engine.begin(plan)
        run_uses(engine, plan, group, stop=plan.L)
        m, layer = 0, plan.L - 1
        with pytest.raises(InputError, match="between weights and release"):
            engine.gradients(m, layer)
        engine.weights(m, layer, Phase.BACKWARD)
        with pytest.raises(InputError, match="call it first"):
            engine.release(m, layer, Phase.BACKWARD)
        engine.gradients(m, layer)
        with pytest.raises(InputError, match="call gradients once"):
            engine.gradients(m, layer)
        group.barrier()
        engine.close()

    run_threads(forget, plan.G)


def test_same_weights_is_not_taken_on_trust():
    plan = a_plan(stage="recompute")

    def written(group):
        buffers = ToyBuffers(plan, group.rank)
        engine = Engine(buffers, group=group, backends=(Local(),))
        run_plan(engine, plan, group)
        if group.rank == 1:
            buffers.update(1)
        with pytest.raises(InputError, match="home weights were written since the last plan began"):
            engine.begin(plan, same_weights=True)
        engine.close()

    run_threads(written, plan.G)


def test_what_ranks_must_agree_on_is_compared():
    plan = a_plan()

    def differ(group):
        for options, said in (
            ({"prefetch": group.rank}, "rank 1 has prefetch=1, rank 0 has prefetch=0; give all ranks the same"),
            ({"debug": group.rank == 2}, "rank 2 has debug=True, rank 0 has debug=False"),
            ({"backends": (Local(),) * (1 + group.rank % 2)}, "rank 1 has backends=Local, Local, rank 0 has backends=Local;"),
        ):
            with pytest.raises(InputError, match=said):
                Engine(ToyBuffers(plan, group.rank), group=group, **({"backends": (Local(),)} | options))
        engine = Engine(ToyBuffers(plan, group.rank), group=group, backends=(Local(),), timeout_s=5.0 + group.rank)
        run_plan(engine, plan, group)
        with pytest.raises(InputError, match="another same_weights"):
            engine.begin(plan, same_weights=group.rank == 1)
        engine.close()
        buffers = ToyBuffers(plan, group.rank)
        if group.rank == 2:
            buffers.homes = {}
        engine = Engine(buffers, group=group, backends=(Local(),))
        with pytest.raises(InputError, match="plan for this model's homes"):
            engine.begin(plan)
        engine.close()

    run_threads(differ, plan.G)


def test_an_optimizer_step_inside_a_plan_is_an_error():
    plan = a_plan()

    def update_inside(group):
        buffers = ToyBuffers(plan, group.rank)
        engine = Engine(buffers, group=group, backends=(Local(),))
        engine.begin(plan)
        try:
            run_uses(engine, plan, group, on_use=lambda u: buffers.update(1) if u == 2 else None)
        finally:
            engine.close()

    with pytest.raises(StaleWeights, match="changed after the plan began"):
        run_threads(update_inside, plan.G)


@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on one rank"])
def test_a_plan_that_breaks_a_law_runs_nowhere(everywhere):
    """Weights from a rank that does not have them: without a check the step ends well, with wrong weights."""
    plan = a_plan(ranks=2)
    home_C = plan.home_LE[plan.transfers.layer_C, plan.transfers.expert_C]
    other_C = plan.expert_MLGS[0, plan.transfers.layer_C, home_C // plan.B, (home_C + 1) % plan.B]
    swapped = dataclasses.replace(plan, transfers=plan.transfers.replace(expert_C=other_C))
    assert plan.checked and not swapped.checked

    def begin(group):
        engine = Engine(ToyBuffers(plan, group.rank), group=group, backends=(Local(),))
        with pytest.raises(InputError, match="breaks a law" if everywhere else "was given another plan"):
            engine.begin(swapped if everywhere or group.rank == 1 else plan)
        run_plan(engine, plan, group)
        engine.close()

    run_threads(begin, plan.G)


def test_only_the_first_rank_checks_and_only_what_nobody_has_checked(monkeypatch):
    plan, seen = a_plan(), []
    monkeypatch.setattr(type(plan), "violations", lambda self, problem=None: seen.append(self) or [])

    def begin(group):
        for given in (plan, same[group.rank]):
            engine = Engine(ToyBuffers(plan, group.rank), group=group, backends=(Local(),))
            run_plan(engine, given, group)
            engine.close()

    same = [dataclasses.replace(plan) for _ in range(plan.G)]
    run_threads(begin, plan.G)
    assert seen == [same[0]] and [one.checked for one in same] == [True, False, False]
