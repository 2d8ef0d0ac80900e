"""Expert modules of Megatron-Core: where an expert's tensors lie, and how a redundant slot computes with borrowed weights."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional

from foremoe.base.errors import InputError
from foremoe.transfer.base import Tensors

# Letters: Y pairs of the redundant slots, sorted by slot; H hidden size; R redundant slots; B base slots of a rank.


class ExpertKind(abc.ABC):
    """One kind of experts module, as `MoELayer.experts` holds it.

    Attributes:
        experts: The module.
        shapes: Shapes of one expert's tensors in `compute`.
    """

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self.shapes = [tuple(view.shape) for view in self.views(0)]

    @abc.abstractmethod
    def parameters(self, base_slot: int) -> list[torch.nn.Parameter]:
        """The parameters that hold the expert of a base slot; one parameter may hold several experts."""

    def views(self, base_slot: int, tensors: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The expert's part of each of its parameters, or of `tensors` of the same shapes (their main gradients)."""
        return list(self.parameters(base_slot) if tensors is None else tensors)

    def flat_weights(self, base_slot: int) -> Tensors:
        """Weights of a base slot's expert, each [numel]."""
        return [view.detach().view(-1) for view in self.views(base_slot)]

    def flat_main_grads(self, base_slot: int) -> Tensors:
        """Where Megatron sums the gradients of a base slot's expert, each [numel]."""
        grads = [getattr(param, "main_grad", None) for param in self.parameters(base_slot)]
        if any(grad is None for grad in grads):
            raise InputError("expert parameters have no main_grad; wrap the model in Megatron's DistributedDataParallel first.")
        return [view.view(-1) for view in self.views(base_slot, [grad for grad in grads if grad is not None])]

    def compute(self, weights_R: Sequence[Tensors], x_YH: torch.Tensor, probs_Y: torch.Tensor, num_R: list[int]) -> torch.Tensor:
        """The slots' output, times the router's probabilities; differentiable in all but `num_R`.

        Args:
            weights_R: Flat tensors of every slot that has pairs.
        """
        parts = zip(weights_R, x_YH.split(num_R), probs_Y.split(num_R), num_R, strict=True)
        return torch.cat([self.one(self._reshape(weights), x, probs) for weights, x, probs, num in parts if num])

    @abc.abstractmethod
    def one(self, weights: Tensors, x_YH: torch.Tensor, probs_Y: torch.Tensor) -> torch.Tensor:
        """One expert."""

    def _reshape(self, weights: Tensors) -> list[torch.Tensor]:
        return [weight.view(shape) for weight, shape in zip(weights, self.shapes, strict=True)]

    def _activate(self, pre: torch.Tensor, probs_Y: torch.Tensor) -> torch.Tensor:
        """Activation and probabilities as Megatron's unfused experts apply them."""
        config = self.experts.config
        if config.gated_linear_unit:
            gate, up = pre.chunk(2, dim=-1)
            limit = getattr(config, "activation_func_clamp_value", None)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
            act = config.activation_func(gate) * (up + getattr(config, "glu_linear_offset", 0.0))
        else:
            act = config.activation_func(pre)
        return (act * probs_Y.unsqueeze(-1)).to(pre.dtype)


class SequentialExperts(ExpertKind):
    """`SequentialMLP`: one MLP module per expert. A replica runs the first of them with other weights."""

    def parameters(self, base_slot: int) -> list[torch.nn.Parameter]:
        return list(self.experts.local_experts[base_slot].parameters())

    def one(self, weights: Tensors, x_YH: torch.Tensor, probs_Y: torch.Tensor) -> torch.Tensor:
        template = self.experts.local_experts[0]
        names = [name for name, _ in template.named_parameters()]
        output, _ = functional_call(template, dict(zip(names, weights, strict=True)), (x_YH, probs_Y))
        return output


class GroupedExperts(ExpertKind):
    """`GroupedMLP` (megatron-core up to 0.16): two parameters hold all experts, side by side as [in, out] matrices."""

    def parameters(self, base_slot: int) -> list[torch.nn.Parameter]:
        return [self.experts.weight1, self.experts.weight2]

    def views(self, base_slot: int, tensors: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        first, second = self.parameters(base_slot) if tensors is None else tensors
        num = self.experts.num_local_experts
        hidden = self.experts.config.hidden_size
        return [first.view(num, hidden, -1)[base_slot], second.view(num, -1, hidden)[base_slot]]

    def one(self, weights: Tensors, x_YH: torch.Tensor, probs_Y: torch.Tensor) -> torch.Tensor:
        return self._activate(x_YH @ weights[0], probs_Y) @ weights[1]


class TransformerEngineExperts(ExpertKind):
    """`TEGroupedMLP`: parameters ``weight0`` .. of two grouped linear modules, [out, in]. Never run on a GPU yet.

    Base slots run Transformer Engine's kernels as ever, weight gradients fused or not; replicas, few as they are, plain GEMMs.
    """

    def parameters(self, base_slot: int) -> list[torch.nn.Parameter]:
        found = [getattr(linear, f"weight{base_slot}", None) for linear in (self.experts.linear_fc1, self.experts.linear_fc2)]
        if any(weight is None for weight in found):
            raise InputError(
                "the experts keep all weights in one parameter, which foremoe cannot read yet; unset moe_single_grouped_weight."
            )
        return [weight for weight in found if weight is not None]

    def one(self, weights: Tensors, x_YH: torch.Tensor, probs_Y: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._activate(functional.linear(x_YH, weights[0]), probs_Y), weights[1])


def kind_of(experts: Any) -> ExpertKind:
    """The kind of an experts module.

    Raises:
        InputError: Foremoe does not know it.
    """
    kinds: dict[str, type[ExpertKind]] = {
        "SequentialMLP": SequentialExperts,
        "GroupedMLP": GroupedExperts,
        "TEGroupedMLP": TransformerEngineExperts,
    }
    for cls in type(experts).__mro__:
        if cls.__name__ in kinds:
            if cls.__name__ == "SequentialMLP" and getattr(experts.config, "gradient_accumulation_fusion", False):
                raise InputError(
                    "SequentialMLP with gradient_accumulation_fusion writes weight gradients past autograd; set "
                    "gradient_accumulation_fusion=False, or use grouped experts."
                )
            return kinds[cls.__name__](experts)
    raise InputError(f"experts of type {type(experts).__name__} are not supported; use one of {', '.join(kinds)}.")
