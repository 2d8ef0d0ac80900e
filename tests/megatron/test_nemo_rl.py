"""NeMo-RL: its sequence of calls runs by plans, with the losses and gradients of the run without foremoe.

The sequence is that of NVIDIA-NeMo/RL at 7ea279ab: nemo_rl/models/megatron/train.py (`megatron_forward_backward`,
`forward_with_post_processing_fn`), data.py (`make_processed_microbatch_iterator`), and router_replay.py, which runs itself where
FOREMOE_NEMO_RL names a checkout. NeMo-RL needs CUDA and Megatron-Bridge, which do not install here.
"""

import contextlib
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import stand_ins
import torch
from layouts import Case
from program import VOCABULARY, Layout, Program

from foremoe.base.errors import InputError
from foremoe.integrations import nemo_rl

CHECKOUTS = stand_ins.checkouts("FOREMOE_NEMO_RL", "NVIDIA-NeMo/RL")


def build_router_replay_assignments(model, routed_experts):
    """Routers of the model with what they replay, int64 [T, K], from [B, S, L, K] over all MoE layers."""
    frequency = model.module.config.moe_layer_freq
    moe_layers = [number for number, is_moe in enumerate(frequency, 1) if is_moe]
    topk_TLK = routed_experts.transpose(0, 1).flatten(0, 1)
    routers = [module for module in model.modules() if hasattr(module, "router_replay")]
    return [(r.router_replay, topk_TLK[:, moe_layers.index(r.layer_number)].long().contiguous()) for r in routers]


# Parts of ``policy`` with which no job starts, and what the driver is told to write.
REFUSED = [
    ({"foremoe": {"redundant": 1.5}}, "redundant must be a whole number"),
    ({"foremoe": {"replicas": "rack"}}, 'replicas must be "any" or "node"'),
    (
        {"megatron_cfg": {"moe_token_dispatcher_type": "allgather"}},
        "; write ++policy.megatron_cfg.moe_token_dispatcher_type=alltoall.",
    ),
    ({"megatron_cfg": {"expert_tensor_parallel_size": 2}}, "; write ++policy.megatron_cfg.expert_tensor_parallel_size=1."),
    (
        {"megatron_cfg": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}},
        "; write ++policy.megatron_cfg.sequence_parallel=true.",
    ),
    ({"megatron_cfg": {"fp8_cfg": {"enabled": True, "fp8": "e4m3"}}}, "; write ++policy.megatron_cfg.fp8_cfg.enabled=false."),
    ({"megatron_cfg": {"peft": {"enabled": True}}}, "; write ++policy.megatron_cfg.peft.enabled=false."),
    (
        {"megatron_cfg": {"model_overrides": {"moe_expert_capacity_factor": 1.0}}},
        "; write ++policy.megatron_cfg.moe_expert_capacity_factor=null.",
    ),
]


@contextlib.contextmanager
def nemo_rl_of(checkout):
    """Gives NeMo-RL's module that asks Megatron for its function, and what lays out its routing."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    train = {"get_forward_backward_func": get_forward_backward_func}
    replay = {"build_router_replay_assignments": build_router_replay_assignments}
    if checkout:
        trace = dict.fromkeys(("trace_router_replay_action", "trace_router_replay_assignment"), lambda **_: None)
        needed = {
            "nemo_rl__models__generation__interfaces": {"ROUTED_EXPERTS_MISSING_ROUTE_SENTINEL": -1},
            "nemo_rl__models__policy": {"PolicyConfig": dict},
            "nemo_rl__utils__r3_trace": trace,
        }
        with stand_ins.modules(**needed):
            replay = vars(stand_ins.own_file(checkout, "nemo_rl/models/megatron/router_replay.py"))
    with stand_ins.modules(nemo_rl__models__megatron__train=train, nemo_rl__models__megatron__router_replay=replay):
        import nemo_rl.models.megatron.train as module

        yield module, replay["build_router_replay_assignments"]


def step_of(_group, case, checkout, planned):
    """Reference, log-probability and training passes: losses, gradients, and what foremoe logged."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from foremoe.integrations import compiling

    program, losses = Program(case.layout), []
    batch, sequence = case.layout.batch, case.layout.sequence
    position = torch.arange(sequence).repeat(batch, 1)
    mask = ~torch.ones(batch, 1, sequence, sequence).tril().bool()
    generator = torch.Generator().manual_seed(program.ps.get_data_parallel_rank())
    texts = torch.randint(0, VOCABULARY, (case.layout.M, batch, sequence), generator=generator)
    routed_MBSLK = program.routing(0).unflatten(1, (sequence, batch)).transpose(1, 2).to(torch.int16)

    with contextlib.ExitStack() as stack:
        train, assignments = stack.enter_context(nemo_rl_of(checkout))
        stack.enter_context(patch.object(compiling, "_ready", True))
        logged = stack.enter_context(stand_ins.figures())
        if planned:
            nemo_rl.install({"foremoe": {"cost": "balance"}, "router_replay": {"enabled": True}})(program.chunks[0])

        def forward_step(iterator, model, use_router_replay, router_replay_train):
            micro_batch = next(iterator)
            for replay, topk_TK in assignments(model, micro_batch.routed_experts_cp_sharded) if use_router_replay else ():
                replay.set_target_indices(topk_TK)
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            output = model(micro_batch.input_ids, position, mask, labels=micro_batch.input_ids)
            if use_router_replay:
                RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            return output, program.loss

        for forward_only, replays in ((True, False), (True, True), (False, True)):
            program.zero()
            pairs = zip(texts, routed_MBSLK, strict=True)
            found = train.get_forward_backward_func()(
                forward_step_func=partial(forward_step, use_router_replay=replays, router_replay_train=not forward_only),
                data_iterator=(SimpleNamespace(input_ids=t, routed_experts_cp_sharded=r) for t, r in pairs),
                model=program.chunks[0], num_microbatches=case.layout.M, seq_length=sequence, micro_batch_size=batch,
                decoder_seq_length=sequence, forward_only=forward_only,
            )  # fmt: skip
            RouterReplay.clear_global_indices()
            RouterReplay.clear_global_router_replay_action()
            losses += [float(x["loss"]) for x in found]
    return losses, program.main_grads(), list(logged)


@pytest.mark.parametrize("checkout", CHECKOUTS)
@pytest.mark.parametrize("case", [Case(2, Layout(recompute="full")), Case(4, Layout(pp=2, num_layers=4, dense=(2, 3)))], ids=str)
def test_nemo_rl_s_sequence_of_calls(pool, case, checkout):
    """In the second layout the last pipeline rank has no MoE layers."""
    alone, planned = (pool.run(step_of, case, checkout, planned, num_ranks=case.num_ranks) for planned in (False, True))
    assert [stage for stage, _ in planned[0][2]] == ["recompute", "update"]
    assert all(metrics["replicas"] and not metrics["drift"] for _, metrics in planned[0][2])
    for (losses, grads, _), (losses_alone, grads_alone, logged) in zip(planned, alone, strict=True):
        assert losses == pytest.approx(losses_alone, abs=1e-6) and not logged
        for name, grad in grads_alone.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_missing_routes_stay_unknown():
    routes = torch.tensor([[[[1, 2]], [[-1, -1]]]], dtype=torch.int16)
    replay = {"build_router_replay_assignments": lambda model, routed: [(None, routed.transpose(0, 1).flatten(0, 1)[:, 0])]}
    call = {
        "forward_step_func": partial(print, use_router_replay=True), "model": None, "num_microbatches": 2,
        "data_iterator": iter([SimpleNamespace(routed_experts_cp_sharded=routes)] * 3),
    }  # fmt: skip
    with stand_ins.modules(nemo_rl__models__megatron__router_replay=replay):
        first, second = nemo_rl.routing_of(call)
    assert np.array_equal(first, [[[1, 2]], [[-1, -1]]]) and np.array_equal(first, second)
    assert len(list(call["data_iterator"])) == 2


def test_routers_of_multi_token_prediction_are_left_out():
    model, mine, predicting = torch.nn.Module(), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    model.mtp = torch.nn.ModuleList([predicting])
    mine.router_replay, predicting.router_replay = object(), object()
    routes = torch.tensor([[1, 2], [3, 4]])
    pairs = [(mine.router_replay, routes), (predicting.router_replay, routes + 1)]
    call = {
        "forward_step_func": partial(print, use_router_replay=True), "model": model, "num_microbatches": 1,
        "data_iterator": iter([SimpleNamespace(routed_experts_cp_sharded=None)]),
    }  # fmt: skip
    replay = {"build_router_replay_assignments": lambda *_: pairs}
    with stand_ins.modules(nemo_rl__models__megatron__router_replay=replay):
        (found,) = nemo_rl.routing_of(call)
    assert np.array_equal(found, routes[:, None])


def test_foremoe_s_worker_is_chosen_where_the_policy_says_so():
    environments = {nemo_rl.THEIRS: "its python"}
    lm_policy = {"resolve_policy_worker_cls": lambda default, config: "Quantized" if config.get("quant_cfg") else default}
    registry = {"ACTOR_ENVIRONMENT_REGISTRY": environments}
    with stand_ins.modules(
        nemo_rl__models__policy__lm_policy=lm_policy, nemo_rl__distributed__ray_actor_environment_registry=registry
    ):
        from nemo_rl.models.policy import lm_policy as module

        nemo_rl.register()
        choose = module.resolve_policy_worker_cls
    for settings, said in REFUSED:
        with pytest.raises(InputError, match=re.escape(said)):
            choose(nemo_rl.THEIRS, {"foremoe": {}} | settings)
    assert choose(nemo_rl.THEIRS, {"foremoe": {}}) == nemo_rl.OURS and environments[nemo_rl.OURS] == "its python"
    assert choose(nemo_rl.THEIRS, {}) == nemo_rl.THEIRS and choose("DTensor", {"foremoe": {}}) == "DTensor"
    assert choose(nemo_rl.THEIRS, {"foremoe": {}, "quant_cfg": "fp8"}) == "Quantized"


def test_the_worker_installs_foremoe_before_it_builds_anything_and_attaches_then():
    done = []

    def init(self, config, name):
        done.append(name)
        self.model = "its model"

    own = type("MegatronPolicyWorkerImpl", (), {"__init__": init})
    ray = {"remote": lambda **options: lambda cls: cls}
    with stand_ins.modules(
        ray=ray, nemo_rl__models__policy__utils={"get_runtime_env_for_policy_worker": lambda name: {}},
        nemo_rl__models__policy__workers__megatron_policy_worker={"MegatronPolicyWorkerImpl": own},
    ), patch.object(nemo_rl, "install", lambda config: done.append(config) or done.append):  # fmt: skip
        from foremoe.integrations.nemo_rl_worker import MegatronPolicyWorker

        MegatronPolicyWorker({"foremoe": {}}, name="worker")
    assert (
        done == [{"foremoe": {}}, "worker", "its model"]
        and f"{MegatronPolicyWorker.__module__}.MegatronPolicyWorker" == nemo_rl.OURS
    )
