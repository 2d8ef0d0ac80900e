"""Models of config.json files: the presets, whose figures come from the same files, and the models that transformers builds."""

import dataclasses
import json

import pytest

from foremoe.base.errors import InputError
from foremoe.machine.model import Model

GQA = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
QWEN3 = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "decoder_sparse_step": 1, "mlp_only_layers": [], **GQA,
}  # fmt: skip
# What the published config.json files say.
CONFIGS = {
    "qwen3-30b-a3b": QWEN3,
    "qwen3-235b-a22b": QWEN3 | {
        "num_hidden_layers": 94, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8,
        "num_experts_per_tok": 8, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "topk_method": "noaux_tc", **MLA,
    },
    "kimi-k2": {
        "model_type": "kimi_k2", "num_hidden_layers": 61, "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "n_group": 1,
        "num_experts_per_tok": 8, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, **MLA,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27, "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "n_group": 1,
        "num_experts_per_tok": 6, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
        "topk_method": "greedy", **MLA, "q_lora_rank": None,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "num_hidden_layers": 46, "first_k_dense_replace": 1, "hidden_size": 4096, "n_group": 1,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    },
}  # fmt: skip


def write(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_full_attention_in_every_fourth_layer(tmp_path):
    """The published config.json of Qwen3-Next says it by an interval, those that transformers writes by names of layers."""
    config = QWEN3 | {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10, "head_dim": 256,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    by_name = config | {"layer_types": ["linear_attention"] * 3 * 12 + ["full_attention"] * 12}
    models = [Model.from_hf(write(tmp_path, some)) for some in (config, config | {"full_attention_interval": 4}, by_name)]
    assert models[0] == models[1] == models[2] and models[0].num_heads == 4
    linear, full = 2048 * (2 * 2048 + 3 * 4096 + 64), 2048 * 256 * (16 * 3 + 2 * 2)
    assert models[0].attention_params == (3 * linear + full) // 4
    preset = Model.preset("qwen3-next-80b-a3b")
    assert dataclasses.replace(models[0], name=preset.name, source=preset.source) == preset


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_figures_of_the_preset(name, tmp_path):
    found = Model.from_hf(write(tmp_path, CONFIGS[name]))
    assert found == Model.from_hf(tmp_path / "config.json")
    told = {"name": name, "source": Model.preset(name).source}
    assert found.to_dict() | told == Model.preset(name).to_dict()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN3 | {"model_type": "llama"}, "model_type 'llama' is not supported; use one of qwen2_moe, "),
        ({}, "there is no model_type; use one of qwen2_moe, "),
        (QWEN3 | {"hidden_size": None}, "hidden_size must be a whole number"),
        (QWEN3 | {"num_experts": "128"}, "num_experts must be a whole number"),
        (QWEN3 | {"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number"),
        (QWEN3 | {"mlp_only_layers": [5]}, "47 of 48 layers are MoE, and not the last ones"),
        (QWEN3 | {"decoder_sparse_step": 2}, "24 of 48 layers are MoE, and not the last ones"),
        (QWEN3 | {"num_experts_per_tok": 200}, "num_topk 200 exceeds num_experts 128"),
        ("[]", "is not a model's config.json, which holds one object"),
        ("{", "is not valid JSON"),
    ],
)
def test_what_is_no_config_is_refused(config, message, tmp_path):
    with pytest.raises(InputError, match=message) as error:
        Model.from_hf(write(tmp_path, config))
    assert str(error.value).startswith(f"'{tmp_path}/config.json': ") and str(error.value).endswith(".")
    with pytest.raises(InputError, match="there is no file"):
        Model.from_hf(tmp_path / "none.json")


FAMILIES = ["Qwen2Moe", "Qwen3Moe", "Qwen3Next", "DeepseekV2", "DeepseekV3", "Glm4Moe", "GptOss", "Mixtral", "Olmoe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_figures_are_those_of_the_model_that_transformers_builds(family, tmp_path):
    """Experts, attention and layers of a small model of the family; biases, norms and rounding left out."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    small = {
        "num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 40, "moe_intermediate_size": 24, "vocab_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2,
        "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    if family.startswith("Deepseek"):
        small |= {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
        small |= {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        small.pop("head_dim")
    elif family == "Glm4Moe":
        small |= {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    else:
        small |= {"num_local_experts" if family in ("GptOss", "Mixtral") else "num_experts": 8}
    if family == "Olmoe":
        small.pop("head_dim")
    elif family == "Qwen3Next":
        small |= {"num_hidden_layers": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = getattr(transformers, f"{family}Config")(**small)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    model = Model.from_hf(tmp_path)
    layers = built.model.layers
    moe = [at for at, layer in enumerate(layers) if "experts" in dict(layer.mlp.named_children())]
    assert model.moe_layer_L.tolist() == moe and model.num_experts == 8

    def weights(module):
        return sum(p.numel() for name, p in module.named_parameters() if p.ndim > 1 and "bias" not in name)

    mlp = layers[moe[-1]].mlp
    assert weights(mlp.experts) == model.num_experts * model.expert_params
    mixers = [part for layer in layers for name, part in layer.named_children() if name in ("self_attn", "linear_attn")]
    convolved = sum(p.numel() for part in mixers for name, p in part.named_parameters() if "conv1d" in name)
    assert (sum(map(weights, mixers)) - convolved) // len(layers) == model.attention_params
    shared = [weights(part) for name, part in mlp.named_children() if name in ("shared_expert", "shared_experts")]
    assert sum(shared) == model.shared_params
    if family == "Qwen3Next":
        assert model.num_heads == 1  # two of eight layers have the four heads of full attention
    if moe[0]:
        assert weights(layers[0].mlp) == 3 * model.hidden_size * model.dense_ffn_size
