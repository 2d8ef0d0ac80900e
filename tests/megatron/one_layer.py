"""A model of one MoE layer; no part of foremoe."""

import contextlib

import torch
from program import Layout, model_config


class OneLayer(torch.nn.Module):
    """A model of one MoE layer, as Megatron-Core's look from outside."""

    def __init__(self, moe):
        super().__init__()
        self.config = moe.config
        layer = torch.nn.Module()
        layer.mlp = moe
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])

    def forward(self, x):
        return self.decoder.layers[0].mlp(x)[0]


def layer_of(config):
    """A MoE layer as Megatron's local spec has it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    mlp = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False).submodules.mlp
    return MoELayer(config, mlp.submodules) if hasattr(mlp, "submodules") else mlp(config=config)  # a function from 0.18 on


def layers_of(num_ranks, dispatcher, number=2, options=()):
    """MoE layers of all ranks as one EP group, the same for each dispatcher.

    Args:
        options: of `Layout`.
    """
    import cpu
    import process_groups
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    cpu.run_on_cpu()
    process_groups.take_down(parallel_state, parallel_state.destroy_model_parallel)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(3)
    config = model_config(Layout(ep=num_ranks, dispatcher=dispatcher, options=options))
    layers = []
    for i in range(number):
        layers.append(layer_of(config))
        layers[-1].set_layer_number(i + 1)
    return layers


def run_layers(model, inputs, stage=None):
    """Accumulates gradients over micro-steps; outputs and gradients."""
    outputs = []
    with stage or contextlib.nullcontext():
        for x in inputs:
            y = model(x)
            y.square().sum().backward()
            outputs.append(y.detach().clone())
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return outputs, grads


def choices(model, inputs):
    """Experts [T, 1, K] that the first layer's router chooses by itself, for each micro-step."""
    router, found = model.decoder.layers[0].mlp.router, []
    hook = router.register_forward_hook(lambda _, args, out: found.append(out[1].nonzero()[:, 1].view(len(out[1]), 1, -1)))
    with torch.no_grad():
        for x in inputs:
            model(x)
    hook.remove()
    return [topk.numpy() for topk in found]
