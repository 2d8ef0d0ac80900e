"""Every option of Megatron that may touch experts has been looked at: equal, refused, or nothing to do with their mathematics.

An option may touch experts if the files that compute them name it, or if one of `WORDS` is in its name. Tables cover
megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2. For an option of a newer version, try it in test_megatron_experts.py; if
replicas differ, refuse it in layout.py.
"""

import ast
import dataclasses
import itertools
import pathlib
import re
from unittest.mock import patch

import megatron.core
from logged import logged
from megatron.core.transformer.transformer_config import TransformerConfig
from program import Layout, Program

from foremoe.integrations.megatron import options
from foremoe.integrations.megatron.options import JUDGED, WORDS, unjudged
from foremoe.integrations.once import warn_once

# File of megatron/core -> the class that counts in it, or None for all.
SOURCES = {
    "transformer/moe/experts.py": None, "transformer/moe/moe_layer.py": None, "transformer/mlp.py": None,
    "tensor_parallel/layers.py": None, "extensions/transformer_engine.py": "TEGroupedLinear",
}  # fmt: skip

# Equal, by the variants of test_megatron_experts.py and the layouts of program.py.
EQUAL = """
activation_func activation_func_clamp_value activation_func_fp8_input_store add_bias_linear bf16 bias_activation_fusion
expert_model_parallel_size ffn_hidden_size gated_linear_unit glu_linear_offset gradient_accumulation_fusion hidden_size
moe_apply_probs_on_input moe_enable_routing_replay moe_ffn_hidden_size moe_flex_dispatcher_backend moe_grouped_gemm
moe_latent_size moe_layer_freq moe_mlp_glu_interleave_size moe_router_pre_softmax moe_router_topk
moe_shared_expert_intermediate_size moe_token_dispatcher_type moe_virtual_expert_load_balance num_moe_experts params_dtype
recompute_granularity recompute_modules sequence_parallel tensor_model_parallel_size use_cpu_initialization
use_fused_weighted_squared_relu use_te_activation_func
"""
# Refused when attaching, by test_megatron_refusals.py; some of their values only.
REFUSED = """
cuda_graph_impl delay_wgrad_compute expert_gtp_weight_remat_size expert_tensor_parallel_size fp4 fp8
moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity moe_paged_stash
moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_single_grouped_weight
num_microbatches_with_partial_activation_checkpoints overlap_dispatch_backward_with_experts_wgrad
overlap_moe_expert_parallel_comm quant_recipe transformer_impl use_kitchen use_transformer_engine_op_fuser
"""
# No part of the mathematics of experts.
OTHER = {
    "nothing without an option that is refused": """
        expert_tensor_parallel_num_weight_shards fp4_param fp4_quantizer_factory fp4_recipe fp8_amax_compute_algo
        fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin fp8_multi_head_attention fp8_output_proj fp8_param
        fp8_quantizer_factory fp8_recipe fp8_wgrad moe_extended_tp moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
        moe_single_grouped_bias moe_token_drop_policy moe_token_dropping
    """,
    "chooses among the experts modules that are known": "moe_use_legacy_grouped_gemm",
    "the router's": """
        moe_aux_loss_coeff moe_grad_scale_func moe_input_jitter_eps moe_router_bias_update_rate moe_router_dtype
        moe_router_enable_expert_bias moe_router_force_biased moe_router_force_load_balancing moe_router_fusion
        moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups moe_router_quantile_balancing_ema
        moe_router_score_function moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_z_loss_coeff
    """,
    "the dispatcher's": """
        moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion moe_permute_fusion_into_hybridep
    """,
    "of attention, dense layers, shared experts or embeddings": """
        add_qkv_bias bias_dropout_fusion defer_embedding_wgrad_compute dsa_indexer_rotate_activation gtp_weight_remat_size
        kitchen_attention_backend linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim moe_shared_expert_gate moe_shared_expert_glu_interleave_size
        moe_shared_expert_overlap tp_comm_bulk_wgrad use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert
        use_kitchen_attention wgrad_deferral_limit
    """,
    "where activations lie, and when they are made again": """
        _cpu_offloading_context activation_offload_fraction cpu_offloading cpu_offloading_activations
        delay_offload_until_cuda_graph distribute_saved_activations fine_grained_activation_offloading moe_layer_recompute
        offload_modules
    """,
    "which kernels, with the same numbers": "deterministic_mode disable_parameter_transpose_cache",
    "weights as they begin": "init_method output_layer_init_method perform_initialization",
    "inference or logging alone": """
        inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging
    """,
}
TABLES = {"equal": EQUAL, "refused": REFUSED, **OTHER}
TRIED = {
    "equal": ("test_megatron_experts.py", "test_megatron_offload.py", "test_megatron_virtual.py", "program.py"),
    "refused": ("test_megatron_refusals.py",),
}


def options_of_experts():
    """The options of the installed version that may touch experts, by the rule above."""
    core, used = pathlib.Path(megatron.core.__path__[0]), set()
    for file, name in SOURCES.items():
        whole = ast.parse((core / file).read_text())
        parts = [node for node in ast.walk(whole) if name is None or (isinstance(node, ast.ClassDef) and node.name == name)]
        used |= {node.attr for part in parts for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    return {name for name in names if name in used or re.search(WORDS, name)}


def test_every_option_of_experts_has_been_looked_at():
    looked_at = {name for table in TABLES.values() for name in table.split()}
    assert options_of_experts() - looked_at == set(), f"new in megatron-core {megatron.core.__version__}; see above"


def test_tables_do_not_overlap_and_name_what_is_tried():
    for (one, a), (other, b) in itertools.combinations(TABLES.items(), 2):
        assert set(a.split()) & set(b.split()) == set(), (one, other)
    for verdict, files in TRIED.items():
        text = "".join(pathlib.Path(__file__).with_name(file).read_text() for file in files)
        assert [name for name in TABLES[verdict].split() if not re.search(rf"\b{name}\b", text)] == []


def test_what_attaching_warns_of_is_what_has_no_verdict():
    assert {name for table in TABLES.values() for name in table.split()} == JUDGED
    plain = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4, moe_z_loss_coeff=0.5)
    assert unjudged(plain) == {}
    assert unjudged(plain, JUDGED - {"moe_z_loss_coeff", "moe_router_topk"}) == {"moe_z_loss_coeff": 0.5}


@dataclasses.dataclass
class Newer(TransformerConfig):
    """With options of Megatron's main branch at d98e8a64 and of its dev branch that no release has."""

    moe_use_grouped_tensor: bool = False
    moe_dispatch_fwd_dtype: str = "bf16"
    moe_combine_bwd_dtype: str = "bf16"
    gtp_remat_opt_in_modules: list = dataclasses.field(default_factory=list)
    moe_hybridep_pad_variable_tokens: bool = False


def test_options_of_no_release_are_warned_of_where_they_are_used():
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 4}
    used = {
        "moe_use_grouped_tensor": True, "moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8",
        "gtp_remat_opt_in_modules": ["moe_latent_proj"], "moe_hybridep_pad_variable_tokens": True,
    }  # fmt: skip
    with patch.object(options, "TransformerConfig", Newer), logged() as said:
        warn_once.cache_clear()
        for values in ({}, used, used):
            config = Newer(**sizes)
            vars(config).update(values)
            assert unjudged(config) == values
            options.warn_of_unjudged(config)
    (message,) = [record.getMessage() for record in said]
    assert all(f"{name}={value!r}" in message for name, value in used.items())


def warned(group):
    """What two attachings warn of, where nobody has looked at an option."""
    from foremoe.integrations.megatron import attach

    warn_once.cache_clear()
    program = Program(Layout())
    with patch.object(options, "JUDGED", JUDGED - {"moe_router_load_balancing_type"}), logged() as said:
        for _ in range(2):
            attach(program.chunks).detach()
    return [record.getMessage() for record in said]


def test_an_option_without_a_verdict_is_one_warning(pool):
    first, *others = pool.run(warned, num_ranks=2)
    assert len(first) == 1 and "moe_router_load_balancing_type='none'" in first[0] and not any(others)
