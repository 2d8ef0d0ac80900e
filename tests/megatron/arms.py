"""One rank of a pipeline stage in two arms, from the same state: Megatron-Core as it is, and run by a plan."""

import warnings

import cpu
import torch
from torch.nn import functional

from foremoe.schedule import Phase

# Letters: M micro-steps, L layers, G ranks, T tokens of a source, K top-k, P physical slots of all ranks.

HIDDEN, FFN = 16, 24


def two_arms(_group, plan, split_GMLP, topk_MLGTK, debug):
    """Runs both arms on this rank.

    Args:
        _group: all ranks; EP groups of the plan's size are made of them in order.
        split_GMLP: what the plan gives to each source.   topk_MLGTK: the forced routing, int64.
        debug: of `Engine`.

    Returns:
        differences between the arms by kind, one per tensor, relative to its largest value; served_MLS of this rank; unplanned
        pairs; `Timeline.to_dict`.
    """
    warnings.simplefilter("ignore")  # what Megatron-Core says about missing CUDA libraries
    from foremoe.transfer.collective import Collective
    from foremoe.transfer.engine import Engine

    schedule = plan.header.schedule
    chunk = build(plan.L, plan.E, topk_MLGTK.shape[-1], plan.G, schedule.reforward)
    from planned import MegatronBuffers, Planned

    layers = list(chunk.module.layers)
    rank = layers[0].ep_group.rank()
    topk_MLTK = topk_MLGTK[:, :, rank]
    plain = step(chunk, schedule, plan.order_M, topk_MLTK, rank)

    buffers = MegatronBuffers(layers, plan.header.slots.num_buffers(plan.header.redundant, plan.L))
    engine = Engine(buffers, group=layers[0].ep_group, backends=(Collective(),), debug=debug)
    try:
        planned = Planned(layers, engine, plan, split_GMLP[rank])
        balanced = step(chunk, schedule, plan.order_M, topk_MLTK, rank, finish=planned.end)
    finally:
        engine.close()
    differences = {}
    for name in plain:
        largest = float(plain[name].abs().max())
        assert largest > 0, f"the {name} is zero everywhere, which compares nothing"
        difference = float((plain[name] - balanced[name]).abs().max()) / largest
        differences.setdefault(name.split()[0], []).append(difference)
    served_MLS = [[planned.served[m, layer] for layer in range(plan.L)] for m in range(plan.M)]
    return differences, served_MLS, planned.num_drift, planned.timeline.to_dict()


def build(num_layers, num_experts, num_topk, num_ranks, reforward):
    """A model chunk of MoELayers in Megatron's DDP, float64; the same routers on all ranks, experts by their number."""
    cpu.run_on_cpu()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks, expert_tensor_parallel_size=1)
    RouterReplay.clear_global_router_replay_instances()
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]} if reforward else {}
    config = TransformerConfig(
        num_layers=num_layers, hidden_size=HIDDEN, num_attention_heads=1, ffn_hidden_size=FFN, moe_ffn_hidden_size=FFN,
        num_moe_experts=num_experts, moe_router_topk=num_topk, moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none", moe_enable_routing_replay=True, add_bias_linear=False, gated_linear_unit=True,
        activation_func=functional.silu, bias_activation_fusion=False, params_dtype=torch.float64, use_cpu_initialization=True,
        expert_model_parallel_size=num_ranks, expert_tensor_parallel_size=1, **recompute,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False).submodules.mlp
    chunk = Chunk([build_module(spec, config=config, layer_number=1 + index) for index in range(num_layers)])
    with torch.no_grad():
        for index, moe in enumerate(chunk.layers):
            moe.router.weight.copy_(numbers(1, index, shape=moe.router.weight.shape))
            for e, expert in zip(moe.local_expert_indices, moe.experts.local_experts, strict=True):
                for i, p in enumerate(expert.parameters()):
                    p.copy_(numbers(2, index, e, i, shape=p.shape) / p.shape[1] ** 0.5)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), chunk)


class Chunk(torch.nn.Module):
    """What a pipeline stage holds, without attention."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for moe in self.layers:
            x = x + moe(x)[0]
        return x


def step(chunk, schedule, order_M, topk_MLTK, rank, finish=lambda: None):
    """All passes up to the optimizer: tensors by "kind ..." to compare.

    Args:
        finish: called when all passes are over, before gradients are reduced over data-parallel ranks.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    chunk.zero_grad_buffer()
    num_tokens = topk_MLTK.shape[2]
    found, inputs, outputs = {}, {}, {}
    for position, phase in zip(schedule.micro_step_X.tolist(), schedule.phase_X.tolist(), strict=True):
        m = int(order_M[position])
        if phase == Phase.FORWARD:
            RouterReplay.set_replay_data(list(torch.from_numpy(topk_MLTK[m])))
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            inputs[m] = numbers(3, m, rank, shape=(num_tokens // 2, 2, HIDDEN)).requires_grad_()
            outputs[m] = chunk(inputs[m])
            found[f"output of {m}"] = outputs[m].detach().clone()
        else:
            # Re-forwards come in the order of the forwards, for which Megatron keeps a queue of replayed choices.
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            loss = (outputs.pop(m) * numbers(4, m, rank, shape=inputs[m].shape)).square().sum()
            loss.backward()
            found[f"loss of {m}"] = loss.detach()
            found[f"input gradient of {m}"] = inputs.pop(m).grad
    RouterReplay.clear_global_indices()
    finish()
    for name, p in chunk.module.named_parameters():
        kind = "router" if "router" in name else "expert"
        found[f"{kind} gradient {name}"] = p.main_grad.clone()
    chunk.finish_grad_sync()
    for name, p in chunk.module.named_parameters():
        found[f"reduced {name}"] = p.main_grad.clone()
    return found


def numbers(*key, shape):
    """Standard normal numbers, a function of the key."""
    seed = 0
    for part in key:
        seed = 1000003 * seed + part + 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
