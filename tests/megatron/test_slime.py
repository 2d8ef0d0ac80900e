"""slime: its sequence of calls runs by plans, with the losses and gradients of the run without foremoe.

The sequence is that of THUDM/slime at 624b824a: slime/backends/megatron_utils/actor.py (`train_actor`, `fill_routing_replay`),
model.py (`forward_only`, `train_one_step`), initialize.py, and slime/utils/routing_replay.py, which runs itself where
FOREMOE_SLIME names a checkout. slime needs CUDA, Ray and SGLang, none of which installs here.
"""

import contextlib
import os
import re
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import patch

import pytest
import stand_ins
import torch
from layouts import Case
from program import Layout, Program

from foremoe.base.errors import InputError

CHECKOUTS = stand_ins.checkouts("FOREMOE_SLIME", "THUDM/slime")


class Lazy:
    """An entry that is made when it is asked for, and may be asked once in each stage."""

    def __init__(self, topk_TK):
        self.topk_TK, self.asked = topk_TK, set()

    def materialize_for_routing_replay(self, stage):
        assert stage in ("forward", "backward") and stage not in self.asked
        self.asked.add(stage)
        return self.topk_TK


class RoutingReplay:
    """A router's routing of all micro-batches, with a place for forwards and one for re-forwards."""

    all_routing_replays: ClassVar = []

    def __init__(self):
        self.all_routing_replays.append(self)
        self.clear()

    def clear(self):
        self.top_indices_list, self.forward_index, self.backward_index = [], 0, 0

    def record(self, topk_TK):
        self.top_indices_list.append(topk_TK)

    def pop_forward(self):
        self.forward_index += 1
        return self.read(self.top_indices_list[self.forward_index - 1], "forward")

    def pop_backward(self):
        self.backward_index += 1
        return self.read(self.top_indices_list[self.backward_index - 1], "backward")

    @staticmethod
    def read(entry, stage):
        return entry if torch.is_tensor(entry) else entry.materialize_for_routing_replay(stage)

    @classmethod
    def clear_all_forward(cls):
        for replay in cls.all_routing_replays:
            replay.forward_index = 0

    @classmethod
    def clear_all(cls):
        for replay in cls.all_routing_replays:
            replay.clear()


@contextlib.contextmanager
def slime_of(checkout):
    """Gives slime's replay class and the module in which it asks Megatron for its function."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = {"get_forward_backward_func": get_forward_backward_func, "setup_model_and_optimizer": lambda args, role: (args, role)}
    replay = {"RoutingReplay": RoutingReplay}
    if checkout:
        accelerator = {"current_device": lambda: "cpu"}
        with stand_ins.modules(slime__utils={"accelerator": SimpleNamespace(**accelerator)}):
            replay = vars(stand_ins.own_file(checkout, "slime/utils/routing_replay.py"))
    with stand_ins.modules(slime__utils__routing_replay=replay, slime__backends__megatron_utils__model=model):
        import slime.backends.megatron_utils.model as module

        replay["RoutingReplay"].all_routing_replays.clear()
        yield replay["RoutingReplay"], module


def rollout(_group, case, checkout, mode):
    """One rollout of slime's actor, two updates: its losses, gradients of the last update, and what foremoe logged.

    Args:
        mode: "alone", "R3" (``--use-rollout-routing-replay``), "lazy", where entries are made when they are asked for, or "R2"
            (``--use-routing-replay``).
    """
    from megatron.core import pipeline_parallel
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from foremoe.integrations import compiling, slime

    program, losses = Program(case.layout), []
    routers = [pair for chunk in program.routers for pair in chunk]
    with contextlib.ExitStack() as stack:
        replay_class, model = stack.enter_context(slime_of(checkout))
        environ = stack.enter_context(patch.dict(os.environ, {"ENABLE_ROUTING_REPLAY": "1"}))
        stack.enter_context(patch.object(compiling, "_ready", True))
        stack.enter_context(
            patch.object(pipeline_parallel, "get_forward_backward_func", lambda: model.get_forward_backward_func())
        )
        logged = stack.enter_context(stand_ins.figures())
        if mode != "alone":
            slime.install(arguments(foremoe={"cost": "balance"}))
            for role in ("critic", "actor"):
                assert model.setup_model_and_optimizer(program.chunks, role) == (program.chunks, role)
                attached = ["_foremoe" in vars(m) for m in program.bare[0].modules()]
                assert any(attached) == (role == "actor" and bool(program.routers[0])), "when the model is built"
        replays = [replay_class() for _ in routers]
        for (_, router), mine in zip(routers, replays, strict=True):
            router.routing_replay = mine

        def feed(router, _):
            """As slime's patch of Megatron's top-k does, by its own class."""
            index = [router is mine for _, mine in routers].index(True)
            if environ["ROUTING_REPLAY_STAGE"] == "fallthrough":
                return router.router_replay.clear_router_replay_action()
            in_backward = torch._C._current_graph_task_id() != -1
            topk_TK = replays[index].pop_backward() if in_backward else replays[index].pop_forward()
            router.router_replay.set_target_indices(topk_TK.long())
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

        def passes(stage, **options):
            environ["ROUTING_REPLAY_STAGE"] = stage
            for step in range(2):
                program.zero()
                losses.extend(program.forward_backward(step, None, **options))

        for _, router in routers:
            router.register_forward_pre_hook(feed)
        for step in range(2):
            for topk_TLK in program.routing(step):
                for (place, _), mine in zip(routers, replays, strict=True):
                    topk_TK = topk_TLK[:, place].to(torch.int32).contiguous()
                    mine.record(Lazy(topk_TK) if mode == "lazy" else topk_TK)
        passes("fallthrough", forward_only=True)  # the reference model
        passes("record" if mode == "R2" else "replay_forward", forward_only=True)
        replay_class.clear_all_forward()
        passes("replay_backward")
        consumed = {(len(mine.top_indices_list), mine.forward_index) for mine in replays}
        replay_class.clear_all()
    return losses, program.main_grads(), list(logged), consumed


def arguments(**given):
    """Some of slime's, as Megatron's parser has them."""
    return SimpleNamespace(use_routing_replay=True, moe_token_dispatcher_type="alltoall", **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"foremoe": {"redundant": -1}}, "redundant must be"),
        ({"moe_token_dispatcher_type": "allgather"}, "; write --moe-token-dispatcher-type alltoall."),
        ({"moe_expert_capacity_factor": 1.0}, "; write no --moe-expert-capacity-factor."),
        ({"fp8": "e4m3"}, "; write no --fp8-format."),
        (
            {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "sequence_parallel": False},
            "; write --sequence-parallel.",
        ),
        ({"tensor_model_parallel_size": 4}, "; write --expert-tensor-parallel-size 1."),
        ({"expert_tensor_parallel_size": 4}, "; write --expert-tensor-parallel-size 1."),
        ({"cuda_graph_impl": "local"}, "; write --cuda-graph-impl none."),
        (
            {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
            "; write no --overlap-moe-expert-parallel-comm, no --delay-wgrad-compute.",
        ),
    ],
    ids=str,
)
def test_what_foremoe_cannot_run_with_ends_the_job_before_it_has_a_model(given, said):
    from foremoe.integrations import slime

    args = arguments()
    vars(args).update(given)
    with pytest.raises(InputError, match=re.escape(said)):
        slime.install(args)


CASES = [
    Case(2, Layout()),
    Case(4, Layout(pp=2, num_layers=4, dense=(0,), recompute="full")),
    # As many routers as layers: a dense layer has none, and multi-token prediction has one.
    Case(2, Layout(num_layers=3, dense=(0,), options=(("mtp_num_layers", 1),))),
]


@pytest.mark.parametrize("checkout", CHECKOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_slime_s_sequence_of_calls(pool, case, checkout):
    alone = pool.run(rollout, case, checkout, "alone", num_ranks=case.num_ranks)
    both = ["recompute"] * 2 + ["update"] * 2
    for mode, stages in (("R3", both), ("lazy", both), ("R2", ["update"] * 2)):
        # An entry of multi-token prediction is not read ahead, and here it is asked for in two passes.
        if (mode != "R3" and case.num_ranks > 2) or (mode == "lazy" and case.layout.num_predicting):
            continue
        planned = pool.run(rollout, case, checkout, mode, num_ranks=case.num_ranks)
        assert [stage for stage, _ in planned[0][2]] == stages
        assert all(metrics["replicas"] and not metrics["drift"] for _, metrics in planned[0][2] if metrics)
        for (losses, grads, _, consumed), (losses_alone, grads_alone, logged, _) in zip(planned, alone, strict=True):
            assert losses == pytest.approx(losses_alone, abs=1e-6) and not logged and consumed == {(8, 8)}
            for name, grad in grads_alone.items():
                torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
