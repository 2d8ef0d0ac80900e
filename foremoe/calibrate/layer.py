"""All parts of a decoder layer except experts: norms, projections, attention within sequences, and the router."""

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from foremoe.machine.model import Model

# Letters: T tokens, Q sequences, N positions, H hidden size, E experts, A heads, C columns of a head, D columns of a projection.


class Layer(Protocol):
    """Protocol of an ``nn.Module`` that does the work of a layer except experts, on whole sequences of equal length."""

    def __call__(self, x_TH: torch.Tensor, sequence_length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the residual stream after attention, the experts' normalised input (both [T, H]), and router scores [T, E]."""


class PlainLayer(nn.Module):
    """A pre-norm decoder layer with the model's number of attention weights, heads and head widths.

    Variants such as grouped queries and latent projections are ignored. All attention weights except the output projection form
    one projection of the input. Queries, keys and values are slices of the result of this projection.
    """

    def __init__(self, model: Model, num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.num_heads, self.qk, self.v = model.num_heads, model.qk_head_dim, model.v_head_dim
        narrow = model.num_heads * model.v_head_dim
        wide = max(model.num_heads * model.qk_head_dim, model.attention_params // hidden - narrow)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(hidden, dtype=dtype, device=device) for _ in range(2))
        self.into = nn.Linear(hidden, wide, bias=False, dtype=dtype, device=device)
        self.out = nn.Linear(narrow, hidden, bias=False, dtype=dtype, device=device)
        self.router = nn.Linear(hidden, num_experts, bias=False, dtype=dtype, device=device)

    def forward(self, x_TH: torch.Tensor, sequence_length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        projected_TD = self.into(self.attention_norm(x_TH))
        query, key, value = (self._heads(projected_TD, each, sequence_length) for each in (self.qk, self.qk, self.v))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_TH = x_TH + self.out(mixed.transpose(1, 2).reshape(len(x_TH), -1))
        inner_TH = self.ffn_norm(x_TH)
        return x_TH, inner_TH, self.router(inner_TH)

    def _heads(self, projected_TD: torch.Tensor, columns: int, sequence_length: int) -> torch.Tensor:
        """Returns [Q, A, N, C], the last columns of the projection, repeated as often as needed."""
        need = self.num_heads * columns
        have = min(need, projected_TD.shape[1]) // columns
        cut = projected_TD[:, -have * columns :].view(-1, sequence_length, have, columns).transpose(1, 2)
        return cut if have == self.num_heads else cut.repeat(1, -(-self.num_heads // have), 1, 1)[:, : self.num_heads]


class PassThrough:
    """`ExpertMath` whose experts return their input. Use it to measure all other work of a layer."""

    def shapes(self, hidden_size: int, ffn_size: int) -> dict[str, tuple[int, ...]]:
        return {"nothing": (1, 1)}

    def forward(self, x_NH: torch.Tensor, weights: object) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return x_NH, ()

    def backward(
        self, x_NH: torch.Tensor, saved: object, grad_y_NH: torch.Tensor, weights: object, grads: object
    ) -> torch.Tensor:
        return grad_y_NH
