"""Expert modules of Megatron-Core: where their tensors are, and how redundant slots compute with borrowed weights."""

from __future__ import annotations

import abc
import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.func import functional_call

from foremoe.base.errors import InputError
from foremoe.transfer.base import Tensors

# Letters: Y pairs of the redundant slots, sorted by slot; H hidden size; R redundant slots; B base slots of a rank.


class ExpertKind(abc.ABC):
    """A kind of experts module, as found in `MoELayer.experts`. This object stores weight parameters but no views of them.

    Attributes:
        experts: The experts module.
    """

    def __init__(self, experts: Any) -> None:
        self.experts = experts

    @abc.abstractmethod
    def parameters(self, base_slot: int) -> list[torch.nn.Parameter]:
        """Returns the parameters that hold the expert of a base slot. One parameter may hold several experts."""

    def all_parameters(self) -> list[torch.nn.Parameter]:
        """Returns the parameters of all base slots without duplicates."""
        return list(dict.fromkeys(p for b in range(self.experts.num_local_experts) for p in self.parameters(b)))

    def views(self, base_slot: int, tensors: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Returns the expert's part of each of its parameters, or of `tensors` of the same shapes, such as main gradients."""
        return list(self.parameters(base_slot) if tensors is None else tensors)

    def flat_weights(self, base_slot: int) -> Tensors:
        """Returns the weights of a base slot's expert, each [numel]."""
        return [view.detach().view(-1) for view in self.views(base_slot)]

    def flat_main_grads(self, base_slot: int) -> Tensors:
        """Returns the flat tensors in which Megatron sums the gradients of a base slot's expert, each [numel]."""
        grads: list[Any] = [vars(param)["main_grad"] for param in self.parameters(base_slot)]
        return [view.view(-1) for view in self.views(base_slot, grads)]

    def compute(
        self, weights_R: Sequence[Tensors], x_YH: torch.Tensor, probs_Y: torch.Tensor, num_R: list[int],
        sums_R: Sequence[Tensors] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the slots' outputs, multiplied by the router's probabilities. Differentiable in all arguments except `num_R`.

        Args:
            weights_R: Flat tensors of every slot that has pairs.
            sums_R: For `fused` experts, the tensors to which backward adds weight gradients. If None, backward returns the
                gradients.
        """
        single, names = self.single(fused=sums_R is not None)
        parts = zip(weights_R, sums_R or weights_R, x_YH.split(num_R), probs_Y.split(num_R), num_R, strict=True)
        return torch.cat([
            self._run(single, names, [weights], [sums] if sums_R else None, x, probs, [num])
            for weights, sums, x, probs, num in parts
            if num
        ])  # fmt: skip

    def _run(
        self, module: torch.nn.Module, names: list[str], weights_R: Sequence[Tensors], sums_R: Sequence[Tensors] | None,
        x_YH: torch.Tensor, probs_Y: torch.Tensor, num_R: list[int],
    ) -> torch.Tensor:  # fmt: skip
        """Runs a module with the weights of slots as its parameters `names`, slot by slot."""
        borrowed = [w.view(shape) for weights in weights_R for w, shape in zip(weights, self.shapes(), strict=True)]
        for weight, total in zip(borrowed, itertools.chain(*sums_R) if sums_R else (), strict=bool(sums_R)):
            vars(weight)["main_grad"] = total
        given = x_YH, torch.tensor(num_R), probs_Y
        output: torch.Tensor = functional_call(module, dict(zip(names, borrowed, strict=True)), given, tie_weights=False)[0]
        return output

    def shapes(self) -> list[torch.Size]:
        """Returns the shapes of an expert's tensors."""
        return [view.shape for view in self.views(0)]

    @property
    def fused(self) -> bool:
        """Returns True if backward adds weight gradients to `main_grad` itself, in its dtype and without autograd."""
        return False

    def plain(self) -> Any:
        """Returns the module without its own recomputation or offloading, which only Megatron's own passes can finish."""
        names = ("activation_recompute", "offload_expert_fc1", "offload_moe_act", "offload_fused_group_mlp")
        return _like(self.experts, **dict.fromkeys(names, False))

    @abc.abstractmethod
    def single(self, fused: bool = False) -> tuple[torch.nn.Module, list[str]]:
        """Returns a new copy of Megatron's module with one expert, and its parameters' names. Kept copies would become stale."""


class SequentialExperts(ExpertKind):
    """Experts of a `SequentialMLP`, which has a separate MLP module for each expert."""

    def parameters(self, base_slot: int) -> list[torch.nn.Parameter]:
        return list(self.experts.local_experts[base_slot].parameters())

    def single(self, fused: bool = False) -> tuple[torch.nn.Module, list[str]]:
        expert = self.experts.local_experts[0]
        only = _like(self.experts.local_experts, _modules={"0": expert})
        single = _like(self.experts, num_local_experts=1, _modules={"local_experts": only})
        return single, [f"local_experts.0.{name}" for name, _ in expert.named_parameters()]


class GroupedExperts(ExpertKind):
    """Experts of a `GroupedMLP` (megatron-core up to 0.16), whose two parameters hold them as adjacent [in, out] matrices."""

    def parameters(self, base_slot: int) -> list[torch.nn.Parameter]:
        return [self.experts.weight1, self.experts.weight2]

    def views(self, base_slot: int, tensors: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        first, second = self.parameters(base_slot) if tensors is None else tensors
        num = self.experts.num_local_experts
        hidden = self.experts.config.hidden_size
        return [first.view(num, hidden, -1)[base_slot], second.view(num, -1, hidden)[base_slot]]

    def single(self, fused: bool = False) -> tuple[torch.nn.Module, list[str]]:
        return _like(self.plain(), num_local_experts=1), ["weight1", "weight2"]


class TransformerEngineExperts(ExpertKind):
    """Experts of a `TEGroupedMLP`, in parameters ``weight0``, ``bias0``, ... of grouped linears, [out, in]. Not yet run on GPUs.

    Base slots run Transformer Engine's kernels. A single call of Megatron's module runs all replicas of a rank. It gets a list of
    their matrices, which need not be adjacent. If weight gradients are fused, the weight gradients of replicas are also summed in
    float32.
    """

    def parameters(self, base_slot: int) -> list[torch.nn.Parameter]:
        names = f"weight{base_slot}", f"bias{base_slot}"
        return [linear._parameters[name] for linear in self._linears for name in names if name in linear._parameters]

    @property
    def fused(self) -> bool:
        return all(getattr(linear, "fuse_wgrad_accumulation", False) for linear in self._linears)

    @property
    def _linears(self) -> tuple[Any, Any]:
        return self.experts.linear_fc1, self.experts.linear_fc2

    def compute(
        self, weights_R: Sequence[Tensors], x_YH: torch.Tensor, probs_Y: torch.Tensor, num_R: list[int],
        sums_R: Sequence[Tensors] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        busy = [r for r, num in enumerate(num_R) if num]
        grouped, names = self.single(sums_R is not None, num_experts=len(busy))
        sums = [sums_R[r] for r in busy] if sums_R else None
        return self._run(grouped, names, [weights_R[r] for r in busy], sums, x_YH, probs_Y, [num_R[r] for r in busy])

    def single(self, fused: bool = False, num_experts: int = 1) -> tuple[torch.nn.Module, list[str]]:
        """Returns a copy of Megatron's module with `num_experts` experts, and its parameters' names, expert by expert."""
        linears, parts = {}, {}
        for name, linear in zip(("linear_fc1", "linear_fc2"), self._linears, strict=True):
            parts[name] = [part for part in ("weight", "bias") if f"{part}0" in linear._parameters]
            first = {f"{part}{i}": linear._parameters[f"{part}0"] for i in range(num_experts) for part in parts[name]}
            linears[name] = _like(linear, num_gemms=num_experts, fuse_wgrad_accumulation=fused, _parameters=first)
        grouped = _like(self.plain(), num_local_experts=num_experts, _modules=dict(self.experts._modules) | linears)
        return grouped, [f"{name}.{part}{i}" for i in range(num_experts) for name in linears for part in parts[name]]


def _like(module: torch.nn.Module, **changes: Any) -> Any:
    """Returns a copy of a module that shares all attributes except `changes` and a `forward` that foremoe has replaced."""
    like = copy.copy(module)
    like.__dict__.pop("forward", None)
    like.__dict__.update({"_parameters": dict(module._parameters)} | changes)
    return like


def kind_of(experts: Any) -> ExpertKind:
    """Returns the kind of an experts module.

    Raises:
        InputError: foremoe does not support the module.
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
                    "SequentialMLP with gradient_accumulation_fusion writes weight gradients outside of autograd; set "
                    "gradient_accumulation_fusion=False, or use grouped experts."
                )
            return kinds[cls.__name__](experts)
    raise InputError(f"experts of type {type(experts).__name__} are not supported; use one of {', '.join(kinds)}.")
