"""Replicas compute what Megatron's own experts compute, whatever these are configured to be; else attaching refuses."""

import contextlib
import dataclasses
import types

import grouped_linear
import pytest
import torch
from process_groups import lay_out
from program import Layout, Program, model_config
from torch.nn import functional

from foremoe.base.errors import InputError

KINDS = ("sequential", "grouped", "engine")
PLAIN = {"gated_linear_unit": False}


QUICK = {"activation_func": "quick_gelu", "activation_func_clamp_value": 0.3, "glu_linear_offset": 1.0}
SQUARED = {"activation_func": "squared_relu", **PLAIN}
VARIANTS = (
    {}, {"activation_func": functional.gelu}, {"activation_func": functional.gelu, **PLAIN}, SQUARED,
    {**SQUARED, "use_fused_weighted_squared_relu": True}, {"activation_func_clamp_value": 0.3}, {"glu_linear_offset": 1.0},
    QUICK, {**QUICK, "bias_activation_fusion": True}, {"bias_activation_fusion": True},
    {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True}, {"moe_latent_size": 8},
    {"bias_activation_fusion": True, "activation_func_fp8_input_store": True}, {"use_te_activation_func": True},
    {"add_bias_linear": True}, {**QUICK, "add_bias_linear": True},
    {"moe_mlp_glu_interleave_size": 4}, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
)  # fmt: skip


def experts_of(kind, options):
    """Megatron's experts module of a rank, or why Megatron does not have it."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    if not options.keys() <= known or (kind == "grouped" and not hasattr(experts, "GroupedMLP")):
        return "not of this version"
    named = {"squared_relu": "megatron.core.activations", "quick_gelu": "megatron.core.fusions.fused_bias_geglu"}
    options = {k: getattr(__import__(named[v], fromlist=[v]), v) if v in tuple(named) else v for k, v in options.items()}
    layout = Layout(ep=1, bf16=True, grouped=kind != "sequential", options=tuple(options.items()))
    lay_out(layout)
    groups = ProcessGroupCollection()
    groups.ep, groups.expt_tp = (
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )
    groups.expt_dp = parallel_state.get_expert_data_parallel_group()
    try:
        config = model_config(layout)
        if kind == "grouped":
            return experts.GroupedMLP(4, config, groups)
        if kind == "engine":
            parts, linear = getattr(experts, "GroupedMLPSubmodules", mlp.MLPSubmodules), grouped_linear.GroupedLinear
            parts = parts(linear_fc1=linear, linear_fc2=linear, activation_func=grouped_linear.Activation)
            return experts.TEGroupedMLP(4, config, parts, groups)
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        parts = mlp.MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=grouped_linear.Activation
        )
        return experts.SequentialMLP(4, config, parts, groups)
    except (AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def gradients(module, forward, inputs, backward):
    """Output and gradients of a forward pass."""
    wanted = [*(tensor.clone().requires_grad_() for tensor in inputs), *module.parameters()]
    output = forward(*wanted[:2])
    if not backward:
        return [output, *torch.autograd.grad(output, wanted, torch.ones_like(output))]
    output.backward(torch.ones_like(output))
    return [output, *(tensor.grad for tensor in wanted)]


def as_replicas(_group, kind, options):
    """The largest difference of any output or gradient, by the module and by its replicas."""
    import cpu

    cpu.run_on_cpu()
    from megatron.core.tensor_parallel import random

    from foremoe.integrations.megatron.checks import difference_of, fault_of_experts
    from foremoe.integrations.megatron.experts import kind_of

    torch.manual_seed(1)
    lay_out(Layout(ep=1))
    random.model_parallel_cuda_manual_seed(1)
    # Megatron's recomputation of activations asks for these names even without fp8.
    random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
    module = experts_of(kind, options)
    if isinstance(module, str):
        return module
    for name, param in module.named_parameters():
        if "bias" in name:  # Megatron begins with zeros
            torch.nn.init.normal_(param)
    found = kind_of(module)
    assert (fault_of_experts(found, trains=False), difference_of(found)) == ("", "")
    num = [3, 1, 5, 2]
    inputs = (
        4 * torch.randn(sum(num), options.get("moe_latent_size") or module.config.hidden_size).bfloat16(),
        torch.rand(sum(num)),
    )
    if kind == "sequential" and options.get("add_bias_linear"):
        return "alone it adds biases to a view in place, which autograd forbids; test_megatron_layouts.py has them"
    own = gradients(module, lambda x, probs: module(x, torch.tensor(num), probs)[0], inputs, True)
    flat = lambda b: [view.reshape(-1) for view in found.views(b)]  # noqa: E731
    replica = gradients(module, lambda x, probs: found.compute([flat(b) for b in range(4)], x, probs, num), inputs, False)
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(own, replica, strict=True))


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(f"{k}" for k in options) or "plain")
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_are_the_module_itself(pool, kind, options):
    (difference,) = pool.run(as_replicas, kind, options, num_ranks=1)
    if isinstance(difference, str):
        pytest.skip(f"Megatron has no such experts: {difference}")
    assert difference <= 1e-6  # of the router's probabilities; all else is equal


def said_when_attaching(group, layout, change):
    """What attaching says to experts that are changed first, on the last rank alone; empty if nothing."""
    from foremoe.integrations.megatron import attach

    program = Program(layout)
    experts = program.bare[0].decoder.layers[1].mlp.experts
    params = list(experts.parameters())
    if group.rank < group.size - 1:
        pass
    elif change == "option":
        program.config.fp8 = "hybrid"
    elif change == "replaced":
        experts.forward = experts.forward
    elif change == "frozen":
        params[0].requires_grad_(False)
    elif change == "main gradients":
        params[0].main_grad = params[0].main_grad.half()
    elif change == "patched":
        own = experts.local_experts[1].linear_fc1.forward
        experts.local_experts[1].linear_fc1.forward = lambda x: (own(x)[0] * 1.02, None)
    try:
        attach(program.chunks).detach()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        (Layout(), "frozen", "local_experts.0.linear_fc1.weight is frozen"),
        (Layout(bf16=True), "main gradients", "set grad_reduce_in_fp32=True"),
        (Layout(), "patched", "differ from the module itself by"),
        (Layout(), "replaced", "the forward of this SequentialMLP was replaced"),
        (Layout(), "option", "set fp8=None"),
        (Layout(bf16=True, engine="LoRA"), "", "does not belong to a single expert, as in an adapter (LoRA)"),
        (Layout(bf16=True, engine="Adapted"), "", "linear_fc1.adapter does not belong to a single expert"),
        (Layout(bf16=True, engine="Quantized"), "", ""),
        (Layout(bf16=True, engine="GroupedLinear"), "", ""),
    ],
    ids=lambda x: str(x) or "as it is",
)
def test_other_experts_are_refused_on_all_ranks(pool, layout, change, said):
    for answer in pool.run(said_when_attaching, layout, change, num_ranks=2):
        assert said in answer and bool(answer) == bool(said) and answer.count(". ") == 0, answer
