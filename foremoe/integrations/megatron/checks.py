"""Checks, when attaching and before every stage, that replicas compute the same results as Megatron's own experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foremoe.integrations.megatron.experts import ExpertKind

# Letters: Y pairs, sorted by slot; H hidden size; B base slots of a rank.

_PAIRS = 8  # pairs of every base slot in the comparison
_LARGE = 30.0  # factor by which half of the pairs are larger, so that clamps take effect


def fault_of_experts(kind: ExpertKind, trains: bool) -> str:
    """Returns the reason why replicas of a layer's experts would give wrong results, or an empty string.

    Args:
        trains: Whether the stage needs main gradients.
    """
    if "forward" in vars(kind.experts):
        return f"the forward of this {type(kind.experts).__name__} was replaced, and replicas would not run it; patch its class"
    known = {id(param) for param in kind.all_parameters()}
    for name, param in kind.experts.named_parameters():
        if id(param) not in known or not param.requires_grad:
            why = "is frozen" if id(param) in known else "does not belong to a single expert, as in an adapter (LoRA)"
            return f"{name} {why}, and replicas of such experts are not supported; train whole experts, or run without foremoe"
        grad: torch.Tensor | None = getattr(param, "main_grad", None)
        if trains and grad is None:
            return f"{name} has no main_grad; wrap the model in Megatron's DistributedDataParallel first"
        if grad is not None and grad.dtype not in (torch.bfloat16, torch.float32, torch.float64):
            return f"main gradients are {grad.dtype}, and replicas' are summed in float32; set grad_reduce_in_fp32=True"
        if trains and grad is not None and not grad.untyped_storage().nbytes():
            return f"the main gradient of {name} is offloaded; load it before the stage begins"
    return ""


def are_offloaded(kinds: Sequence[ExpertKind]) -> bool:
    """Returns True if some weights are not on the compute device: they are freed, on the host or not yet created."""
    return any(
        not param.numel() or param.is_meta or param.is_cuda != torch.cuda.is_available() or not param.untyped_storage().nbytes()
        for kind in kinds
        for param in kind.all_parameters()
    )


@torch.no_grad()
def difference_of(kind: ExpertKind) -> str:
    """Returns a sentence about how the outputs of replicas and the module differ for a random batch, or an empty string."""
    experts, like = kind.plain(), kind.all_parameters()[0]
    num_base = experts.num_local_experts
    width = getattr(experts.config, "moe_latent_size", None) or experts.config.hidden_size
    num_B = [_PAIRS] * num_base
    generator = torch.Generator().manual_seed(1)
    x_YH = torch.randn(sum(num_B), width, generator=generator)
    x_YH[::2] *= _LARGE
    x_YH, probs_Y = x_YH.to(like), torch.rand(len(x_YH), generator=generator).to(like.device)
    try:
        own_YH = experts.forward(x_YH, torch.tensor(num_B), probs_Y)[0].double()
        ours_YH = kind.compute([kind.flat_weights(b) for b in range(num_base)], x_YH, probs_Y, num_B).double()
    except Exception as error:
        return f"{type(experts).__name__} cannot run with borrowed weights ({type(error).__name__}: {error})".splitlines()[0]
    relative_Y = (ours_YH - own_YH).norm(dim=1) / own_YH.norm(dim=1).clamp(min=1e-30)
    relative_Y = relative_Y.nan_to_num()  # weights that are not loaded yet may have any value
    relative = float(relative_Y.view(num_base, _PAIRS).square().mean(dim=1).sqrt().max())
    if relative <= max(torch.finfo(like.dtype).eps / 2, 1e-4):
        return ""
    return f"replicas of {type(experts).__name__} differ from the module itself by {relative:.1%} on a random batch"
