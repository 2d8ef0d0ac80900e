"""Warnings, given when attaching, about options of Megatron-Core that foremoe neither tests nor refuses."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import megatron.core
from megatron.core.transformer.transformer_config import TransformerConfig

from foremoe.integrations.once import warn_once

_logger = logging.getLogger(__name__)

WORDS = "moe|expert|activation|linear|bias|glu|ffn|gemm|fp8|fp4|quant|lora|kitchen|wgrad|fuser|accumulation|gtp"
"""Pattern in the names of options that may affect experts."""

# Options that give equal results, are refused, or do not affect experts, in megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2.
_TABLE = """
_cpu_offloading_context activation_func activation_func_clamp_value activation_func_fp8_input_store
activation_offload_fraction add_bias_linear add_qkv_bias bf16 bias_activation_fusion bias_dropout_fusion cpu_offloading
cpu_offloading_activations cuda_graph_impl defer_embedding_wgrad_compute delay_offload_until_cuda_graph delay_wgrad_compute
deterministic_mode disable_parameter_transpose_cache distribute_saved_activations dsa_indexer_rotate_activation
expert_gtp_weight_remat_size expert_model_parallel_size expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size
ffn_hidden_size fine_grained_activation_offloading fp4 fp4_param fp4_quantizer_factory fp4_recipe fp8 fp8_amax_compute_algo
fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin fp8_multi_head_attention fp8_output_proj fp8_param
fp8_quantizer_factory fp8_recipe fp8_wgrad gated_linear_unit glu_linear_offset gradient_accumulation_fusion
gtp_weight_remat_size hidden_size inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
inference_moe_token_dispatcher_type init_method kitchen_attention_backend linear_attention_freq linear_conv_kernel_dim
linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim moe_apply_probs_on_input
moe_aux_loss_coeff moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_expert_capacity_factor
moe_expert_rank_capacity_factor moe_extended_tp moe_ffn_hidden_size moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
moe_grad_scale_func moe_grouped_gemm moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_input_jitter_eps moe_latent_size
moe_layer_freq moe_layer_recompute moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy
moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_paged_stash
moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
moe_per_layer_logging moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_bias_update_rate moe_router_dtype
moe_router_enable_expert_bias moe_router_force_biased moe_router_force_load_balancing moe_router_fusion
moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups moe_router_padding_for_fp8
moe_router_padding_for_quantization moe_router_pre_softmax moe_router_quantile_balancing_ema moe_router_score_function
moe_router_topk moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_shared_expert_gate
moe_shared_expert_glu_interleave_size moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_single_grouped_bias
moe_single_grouped_weight moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping moe_use_legacy_grouped_gemm
moe_virtual_expert_load_balance moe_z_loss_coeff num_microbatches_with_partial_activation_checkpoints num_moe_experts
offload_modules output_layer_init_method overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm
params_dtype perform_initialization quant_recipe recompute_granularity recompute_modules sequence_parallel
tensor_model_parallel_size tp_comm_bulk_wgrad transformer_impl use_cpu_initialization use_fused_weighted_squared_relu
use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_kitchen use_kitchen_attention use_te_activation_func
use_transformer_engine_op_fuser wgrad_deferral_limit
"""
JUDGED = frozenset(_TABLE.split())


def unjudged(config: Any, names: frozenset[str] | None = None) -> dict[str, Any]:
    """Returns the values of options that may affect experts, differ from their default and are not in `names`.

    Args:
        config: Megatron's `TransformerConfig`.
        names: Options that are known to work or that foremoe refuses. Defaults to `JUDGED`.
    """
    names, found = JUDGED if names is None else names, {}
    for field in dataclasses.fields(TransformerConfig):
        if field.name in names or not re.search(WORDS, field.name):
            continue
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        value = getattr(config, field.name, made)
        if value is not made and value != made:
            found[field.name] = value
    return found


def warn_of_unjudged(config: Any) -> None:
    """Logs a warning about the options that `unjudged` returns for the config, if there are any."""
    found = unjudged(config)
    if found:
        shown = ", ".join(f"{name}={value!r}" for name, value in found.items())
        warn_once(
            _logger,
            f"foremoe is not tested with {shown} of megatron-core {megatron.core.__version__}; compare a step with and "
            "without foremoe, or leave these options at their defaults.",
        )
