"""Chunks of `HybridModel`, which takes the place of GPTModel from Megatron-Core 0.19 on; no part of foremoe.

Its layers stand in a pattern: ``*`` is attention, ``E`` experts, ``-`` a dense layer; ``|`` ends a model chunk, and ``/`` comes
before a layer of multi-token prediction. State-space layers need kernels for GPUs.
"""

import importlib.util

ATTENTION, MOE, DENSE, CHUNK, PREDICTION = "*E-|/"
HAS_HYBRID = importlib.util.find_spec("megatron.core.models") and importlib.util.find_spec("megatron.core.models.hybrid")


def pattern_of(layout):
    """The pattern of a layout's layers: each of them is one of attention and one of experts, or a dense one."""
    layers = [ATTENTION + (DENSE if i in layout.dense else MOE) for i in range(layout.num_layers)]
    num_chunks = layout.pp * (layout.vpp or 1)
    per_chunk = layout.num_layers // num_chunks
    main = CHUNK.join("".join(layers[c * per_chunk : (c + 1) * per_chunk]) for c in range(num_chunks))
    return main + (PREDICTION + ATTENTION + MOE) * layout.num_predicting


def hybrid_chunk(config, layout, norm, use_experts, **options):
    """A chunk of `HybridModel` over Megatron's own layers without Transformer Engine.

    Args:
        norm: class of norms.
        use_experts: called with the spec of a MoE layer.
        options: of `HybridModel`.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer, TransformerLayerSubmodules

    hybrid_block.TENorm = norm  # the last norm, which no spec names
    dense = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    moe = get_gpt_layer_local_spec(
        num_experts=layout.num_experts, moe_grouped_gemm=layout.grouped, normalization="RMSNorm"
    ).submodules
    use_experts(moe.mlp)

    def mlp_layer(module, of):
        return ModuleSpec(module, submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=of.mlp, mlp_bda=of.mlp_bda))

    attention = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=dense.self_attention, self_attn_bda=dense.self_attn_bda
    )
    prediction = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=norm
    )
    predictions = mtp.MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=prediction)]
    )
    stack = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention), mlp_layer=mlp_layer(MLPLayer, dense),
        moe_layer=mlp_layer(MoETransformerLayer, moe),
        mtp_block_spec=ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=predictions),
    )  # fmt: skip
    spec = ModuleSpec(hybrid_block.HybridStack, submodules=stack)
    return HybridModel(config, spec, hybrid_layer_pattern=pattern_of(layout), **options)
