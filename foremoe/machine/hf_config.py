"""The sizes of a model, read from its Hugging Face `config.json`."""

from collections.abc import Callable, Mapping
from typing import Any

from foremoe.base.errors import InputError
from foremoe.base.fields import whole

# Names of the config fields with the width of an expert and of shared experts, by family. If the second is None, shared experts
# are as wide as routed ones, and their number is given.
_FAMILIES: Mapping[str, tuple[str, str | None]] = {
    "qwen2_moe": ("moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": ("moe_intermediate_size", None),
    "qwen3_next": ("moe_intermediate_size", "shared_expert_intermediate_size"),
    "deepseek_v2": ("moe_intermediate_size", None),
    "deepseek_v3": ("moe_intermediate_size", None),
    "kimi_k2": ("moe_intermediate_size", None),
    "glm4_moe": ("moe_intermediate_size", None),
    "gpt_oss": ("intermediate_size", None),
    "mixtral": ("intermediate_size", None),
    "olmoe": ("intermediate_size", None),
}
_MAX_LAYERS = 2**15 - 1  # plans number layers with int16


def model_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Model`, except name and source, for a Hugging Face config.

    Raises:
        InputError: The family is not supported, a figure is missing or None, or dense layers follow the first MoE layer.
    """
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        fault = f"model_type {family[:40]!r} is not supported" if "model_type" in config else "there is no model_type"
        raise InputError(f"{fault}; use one of {known}, or Model.of(...).")
    ffn, shared = _FAMILIES[family]

    def size(*names: str, default: int | None = None) -> int:
        name = next((n for n in names if config.get(n) is not None), names[0])
        value = config.get(name)
        if value is None and default is not None:
            return default
        return whole(value, name, 0)

    first, num_moe = _moe_layers(config, size)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    shared_ffn = size(shared, default=0) if shared else size("n_shared_experts", default=0) * size(ffn)
    groups = 1 if config.get("topk_method") == "greedy" else size("n_group", default=1)
    out = {
        "num_layers": num_moe, "first_moe_layer": first, "hidden_size": hidden, "num_heads": heads, "ffn_size": size(ffn),
        "num_experts": size("num_experts", "num_local_experts", "n_routed_experts"), "num_topk": size("num_experts_per_tok"),
        "shared_ffn_size": shared_ffn, "dense_ffn_size": size("intermediate_size") if first else 0,
        "num_expert_groups": max(groups, 1), "vocab_size": 0 if config.get("tie_word_embeddings") else size("vocab_size"),
    }  # fmt: skip
    if "kv_lora_rank" not in config:
        width = size("head_dim", default=hidden // max(heads, 1))
        kv_heads = size("num_key_value_heads", default=heads)
        out |= {"qk_head_dim": width, "v_head_dim": width, "attention_params": 2 * hidden * width * (heads + kv_heads)}
        return out | _with_linear_layers(config, size, out) if family == "qwen3_next" else out
    # Latent attention: queries, keys and values go through narrow matrices whose widths are the config's ranks.
    rank, rope, nope, v = (size(n) for n in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    q_rank, q_width = size("q_lora_rank", default=0), heads * (nope + rope)
    queries = hidden * q_rank + q_rank * q_width if q_rank else hidden * q_width
    keys_values = hidden * (rank + rope) + rank * heads * (nope + v)
    return out | {"qk_head_dim": nope + rope, "v_head_dim": v, "attention_params": queries + keys_values + heads * v * hidden}


def _with_linear_layers(config: Mapping[str, Any], size: Callable[..., int], full: Mapping[str, Any]) -> dict[str, Any]:
    """Returns attention sizes averaged over layers, some with gated full attention and the others with linear attention."""
    num_layers = size("num_hidden_layers")
    kinds = config.get("layer_types") or []
    interval = max(size("full_attention_interval", default=4), 1)
    num_full = sum(kind == "full_attention" for kind in kinds) if isinstance(kinds, list) and kinds else num_layers // interval
    key = size("linear_num_key_heads") * size("linear_key_head_dim")
    value = size("linear_num_value_heads") * size("linear_value_head_dim")
    hidden, heads = full["hidden_size"], full["num_heads"]
    linear = hidden * (2 * key + 3 * value + 2 * size("linear_num_value_heads"))
    gated = full["attention_params"] + hidden * heads * full["qk_head_dim"]
    total = num_full * gated + (num_layers - num_full) * linear
    # The cost of a linear layer does not grow with the square of the length, so the mean layer has fewer heads.
    return {"attention_params": total // num_layers, "num_heads": max(round(heads * num_full / num_layers), 1)}


def _moe_layers(config: Mapping[str, Any], size: Callable[..., int]) -> tuple[int, int]:
    """Returns the number of the first MoE layer and the number of MoE layers."""
    num_layers = whole(config.get("num_hidden_layers"), "num_hidden_layers", 1, _MAX_LAYERS)
    step = max(size("decoder_sparse_step", "moe_layer_freq", default=1), 1)
    dense = set(config.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(num_layers) if layer < size("first_k_dense_replace", default=0)}
    offset = 1 if "decoder_sparse_step" in config else 0
    moe = [layer for layer in range(num_layers) if layer not in dense and (layer + offset) % step == 0]
    if not moe or moe != list(range(moe[0], num_layers)):
        found = f"{len(moe)} of {num_layers} layers are MoE, and not the last ones"
        raise InputError(
            f"{found}; foremoe prices only dense layers before all others, so give Model.of(...) without the dense ones."
        )
    return moe[0], len(moe)
