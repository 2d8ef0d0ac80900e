"""Model: the sizes of a Mixture-of-Experts model that are needed for planning and pricing."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from foremoe.base import fields
from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, first_line, naming
from foremoe.base.files import read_file
from foremoe.base.schema import MAX_JSON_BYTES, parse_json
from foremoe.machine.hf_config import model_fields

_FILE = "models.toml"
# Endings that hubs add to the name of a model that was trained further or stored in another format.
_VARIANT = re.compile(r"-(instruct|thinking|chat|base|fp8|bf16|int8|awq|v?\d+(\.\d+)*)$")
# Plans store layers and experts as int16.
_MAX_NUMBER = int(np.iinfo(np.int16).max)
_CHECKS = (
    (fields.text, ("name", "source")),
    (partial(fields.whole, high=_MAX_NUMBER), ("num_layers", "num_experts", "num_topk", "num_expert_groups")),
    (partial(fields.whole, low=0, high=_MAX_NUMBER), ("first_moe_layer",)),
    (partial(fields.whole, low=0, high=fields.MAX_WHOLE), ("vocab_size", "shared_ffn_size", "dense_ffn_size")),
    (partial(fields.whole, high=1024), ("num_matrices",)),
    (
        partial(fields.whole, high=fields.MAX_WHOLE),
        ("hidden_size", "ffn_size", "attention_params", "num_heads", "qk_head_dim", "v_head_dim"),
    ),
    (partial(fields.real, high=16.0), ("bytes_per_weight", "bytes_per_gradient", "bytes_per_activation")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of one MoE model.

    They cover experts, attention, dense layers, embedding and head, but not norms, router or biases.

    Attributes:
        name: Name in reports and plans.
        num_layers: Number of MoE layers. They follow `first_moe_layer` dense layers.
        first_moe_layer: Index of the first MoE layer among all layers of the model. All later layers are MoE layers.
        num_experts: Number of routed logical experts in a layer.
        num_topk: Number of experts per token.
        hidden_size: Width of a token's activation.
        ffn_size: Intermediate width of one expert.
        shared_ffn_size: Total intermediate width of a layer's shared experts, which serve every token, or 0 if there are none.
        dense_ffn_size: Intermediate width of a dense layer, or 0 if it is not known.
        num_matrices: Number of weight matrices per expert, each of size hidden_size x ffn_size. A gated MLP has 3 (gate, up,
            down).
        bytes_per_weight: Size of a weight in bytes, 2 for bf16.
        bytes_per_gradient: Size of a main gradient in bytes, 4 for fp32.
        bytes_per_activation: Size of an activation in bytes, 2 for bf16.
        attention_params: Number of attention weights in one layer. Each token uses every weight once.
        num_heads: Number of query heads.
        qk_head_dim: Width of one head's score product.
        v_head_dim: Width of one head's value product.
        num_expert_groups: Number of expert groups in the router's top-k choice (DeepSeek-V3 routes by group), or 1 if the router
            has no groups.
        vocab_size: Number of entries in the embedding and in the head, or 0 if the two share weights or the number is not known.
        source: Origin of the figures.

    Raises:
        InputError: A value is out of range, num_topk exceeds num_experts, or the groups do not divide the experts.
    """

    name: str
    num_layers: int
    first_moe_layer: int
    num_experts: int
    num_topk: int
    hidden_size: int
    ffn_size: int
    shared_ffn_size: int = 0
    dense_ffn_size: int = 0
    num_matrices: int = 3
    bytes_per_weight: float = 2.0
    bytes_per_gradient: float = 4.0
    bytes_per_activation: float = 2.0
    attention_params: int
    num_heads: int
    qk_head_dim: int
    v_head_dim: int
    num_expert_groups: int = 1
    vocab_size: int = 0
    source: str

    def __post_init__(self) -> None:
        fields.check_fields(self, _CHECKS)
        if self.num_topk > self.num_experts:
            raise InputError(f"num_topk {self.num_topk} exceeds num_experts {self.num_experts}; a token's experts are distinct.")
        if self.num_experts % self.num_expert_groups:
            sizes = f"{self.num_experts} experts do not divide into num_expert_groups {self.num_expert_groups}"
            raise InputError(f"{sizes}; use 1 if the router has no groups.")

    @classmethod
    def preset(cls, name: str) -> Self:
        """Returns a model that foremoe ships. `name` is not case-sensitive. The error for an unknown name lists all names.

        Example:
            >>> foremoe.Model.preset("qwen3-30b-a3b").expert_bytes
            9437184
        """
        return cls.from_dict(fields.preset(_FILE, name, "model"))

    @classmethod
    def of(
        cls, *, num_layers: int, num_experts: int, num_topk: int, hidden_size: int, ffn_size: int, **others: Any
    ) -> Self:  # fmt: skip
        """Creates a model from five sizes. `others` sets further attributes of `Model`.

        By default, all layers are MoE layers, and attention has four square matrices and heads of width 128.

        Raises:
            InputError: A size is not allowed (see `Model`).

        Example:
            >>> own = foremoe.Model.of(num_layers=24, num_experts=64, num_topk=6, hidden_size=2048, ffn_size=1024)
            >>> own.num_heads, own.expert_bytes
            (16, 12582912)
        """
        return cls(
            num_layers=num_layers, num_experts=num_experts, num_topk=num_topk, hidden_size=hidden_size, ffn_size=ffn_size,
            **(_assumed(hidden_size) | others),
        )  # fmt: skip

    @classmethod
    def preset_names(cls) -> tuple[str, ...]:
        """Returns the names that `preset` accepts."""
        return fields.preset_names(_FILE)

    @classmethod
    def preset_of(cls, name: str) -> str | None:
        """Returns the preset for a Hugging Face Hub name such as ``Qwen/Qwen3-30B-A3B-Instruct-2507``, or None."""
        found = name.strip().lower().rpartition("/")[2]
        while found not in cls.preset_names():
            shorter = _VARIANT.sub("", found)
            if shorter == found:
                return None
            found = shorter
        return found

    @classmethod
    def matching(cls, num_layers: int, num_experts: int, num_topk: int) -> list[Self]:
        """Returns the presets with these numbers. If there is exactly one, the shape of a trace identifies its model."""
        models = (cls.preset(name) for name in cls.preset_names())
        shape = (num_layers, num_experts, num_topk)
        return [m for m in models if (m.num_layers, m.num_experts, m.num_topk) == shape]

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "model") -> Self:
        """Creates a model from a table of fields. Fields with a default may be left out.

        Raises:
            InputError: Keys are unknown or missing, or `Model` refuses a field. The message starts with `where`.
        """
        known = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(cls)}
        fields.check_keys(table, known, [name for name, required in known.items() if required], where)
        with naming(where):
            return cls(**table)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a model from a file of `to_toml`, or from one with the arguments of `of`.

        Raises:
            InputError: The file is missing, or `from_dict` refuses it.
        """
        table = fields.read(path)
        return cls.from_dict(_assumed(table.get("hidden_size")) | table, where=repr(os.fspath(path)))

    @classmethod
    def from_hf(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the model from a Hugging Face `config.json`, or from the folder that contains it.

        Supports Qwen2-MoE, Qwen3-MoE, Qwen3-Next, DeepSeek-V2 and V3, Kimi-K2, GLM-4.5, gpt-oss, Mixtral and OLMoE. For
        Qwen3-Next, the attention sizes are means over its layers. Weights count as bf16, regardless of the checkpoint's dtype.
        Layers for multi-token prediction are left out.

        Raises:
            InputError: The file does not exist, has an unsupported family, or lacks a size.
        """
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        text = read_file(file, MAX_JSON_BYTES)
        with naming(repr(str(file))):
            try:
                config = parse_json(text)
            except ValueError as error:
                raise InputError(f"is not valid JSON ({first_line(error)}); give a model's config.json.") from None
            if not isinstance(config, dict):
                raise InputError("is not a model's config.json, which holds one object.")
            name = str(config.get("_name_or_path") or file.resolve().parent.name) or "own"
            return cls(name=name, source=f"{file.name} of {name}", **model_fields(config))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain numbers and text. The widths of shared experts and dense layers are left out if they are 0.

        ``Model.from_dict(m.to_dict()) == m`` holds.
        """
        return {key: x for key, x in fields.scalars(self).items() if x or key not in ("shared_ffn_size", "dense_ffn_size")}

    def to_toml(self, path: str | os.PathLike[str]) -> None:
        """Writes the model to a TOML file."""
        fields.write(path, self.to_dict())

    @property
    def expert_params(self) -> int:
        """Number of weights of one expert."""
        return self.num_matrices * self.hidden_size * self.ffn_size

    @property
    def expert_bytes(self) -> int:
        """Size of one expert's weights in bytes. One copy transfers them."""
        return math.ceil(self.expert_params * self.bytes_per_weight)

    @property
    def gradient_bytes(self) -> int:
        """Size of one expert's main gradient in bytes. One gradient return transfers it."""
        return math.ceil(self.expert_params * self.bytes_per_gradient)

    @property
    def flops_per_pair(self) -> float:
        """Forward FLOPs of one pair, with a multiplication and an addition per weight. The backward pass takes twice as many."""
        return 2.0 * self.expert_params

    @property
    def shared_params(self) -> int:
        """Number of weights of a layer's shared experts."""
        return self.num_matrices * self.hidden_size * self.shared_ffn_size

    @property
    def token_bytes(self) -> int:
        """Number of bytes that dispatch sends for one pair. Combine sends the same number back."""
        return math.ceil(self.hidden_size * self.bytes_per_activation)

    @property
    def moe_layer_L(self) -> Array:
        """int32 [num_layers], the indices of the MoE layers among all layers of the model."""
        return np.arange(self.first_moe_layer, self.first_moe_layer + self.num_layers, dtype=np.int32)

    def attention_flops(self, tokens: npt.ArrayLike, sum_len_sq: npt.ArrayLike) -> Array:
        """Returns the forward FLOPs of one layer's attention.

        Projections take 2 FLOPs per weight and token. Scores and values take 2 * (qk_head_dim + v_head_dim) * n^2 FLOPs per head
        and sequence of n tokens, and half of that with the causal mask. Every layer counts as full causal attention. This
        overestimates long sequences in layers with a sliding window (every second layer of gpt-oss).

        Args:
            tokens: Numbers of tokens, an array of any shape.
            sum_len_sq: Sums of the squared sequence lengths. Their shape must broadcast with that of `tokens`.

        Returns:
            float64 array of the common shape.

        Raises:
            InputError: An entry is negative or not a number, or the shapes do not broadcast.
        """
        tokens_f, squares_f = _amounts(tokens, "tokens"), _amounts(sum_len_sq, "sum_len_sq")
        try:
            np.broadcast_shapes(tokens_f.shape, squares_f.shape)
        except ValueError as error:
            shapes = f"tokens has shape {list(tokens_f.shape)} and sum_len_sq {list(squares_f.shape)}"
            raise InputError(f"{shapes}; give both the same shape.") from error
        score_width = self.num_heads * (self.qk_head_dim + self.v_head_dim)
        flops: Array = 2.0 * self.attention_params * tokens_f + float(score_width) * squares_f
        return flops


def _assumed(hidden_size: Any) -> dict[str, Any]:
    """Returns the attributes that `Model.of` assumes."""
    width = hidden_size if isinstance(hidden_size, int) else 0  # `Model` refuses other types
    return {
        "name": "own", "first_moe_layer": 0, "attention_params": 4 * width**2, "num_heads": max(width // 128, 1),
        "qk_head_dim": 128, "v_head_dim": 128, "source": "sizes as given; attention assumed",
    }  # fmt: skip


def _amounts(value: npt.ArrayLike, name: str) -> Array:
    try:
        # Converted to float64 before any product, because int32 counts would overflow.
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must hold numbers, in rows of one length.") from error
    if not (array >= 0).all():
        raise InputError(f"{name} must hold numbers of at least 0; got {array.min()}.")
    return array
