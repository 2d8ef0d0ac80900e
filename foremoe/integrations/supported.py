"""Checks for unsupported options of Megatron-Core. They run on a job's settings when it starts and on the model when attaching.

This module does not import Megatron-Core, because a trainer's driver may not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from foremoe.base.errors import InputError

Get = Callable[[str, Any], Any]
"""Function of the name of a `TransformerConfig` option and a default, which returns the option's value."""
Write = Callable[[str, Any], str]
"""Function of an option's name and value, which returns it in the form of a trainer's command."""

# Options that Megatron's virtual experts need or handle. Megatron then is the engine, and foremoe does not compute replicas.
_VIRTUAL = {
    "use_transformer_engine_op_fuser", "moe_expert_rank_capacity_factor", "moe_single_grouped_weight", "quant_recipe",
    "expert_gtp_weight_remat_size", "use_kitchen", "fp8", "fp4",
}  # fmt: skip
# Options that change the computation of experts or its time in a way that replicas do not follow, with their required values.
_NOT_FOLLOWED = {
    "moe_paged_stash": False, "moe_single_grouped_weight": False, "quant_recipe": None,
    "use_transformer_engine_op_fuser": False, "overlap_dispatch_backward_with_experts_wgrad": False,
    "expert_gtp_weight_remat_size": 1, "use_kitchen": False, "num_microbatches_with_partial_activation_checkpoints": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of a job's parallel groups. A size that is not known is 1.

    Attributes:
        tp: Number of tensor-parallel ranks of a layer outside experts.
        etp: Number of tensor-parallel ranks of an expert.
        pp: Number of pipeline ranks.
        vpp: Number of model chunks per pipeline rank.
    """

    tp: int = 1
    etp: int = 1
    pp: int = 1
    vpp: int = 1

    @classmethod
    def of(cls, get: Get) -> Self:
        """Reads the sizes from Megatron's options, as `initialize_model_parallel` does.

        By default, experts have the tensor parallelism of all other layers.
        """
        size = lambda name: get(name, None) or 1  # noqa: E731
        tp = size("tensor_model_parallel_size")
        return cls(
            tp=tp, etp=get("expert_tensor_parallel_size", None) or tp, pp=size("pipeline_model_parallel_size"),
            vpp=size("virtual_pipeline_model_parallel_size"),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refusal:
    """Explanation, in Megatron's terms, of why foremoe cannot run with the current options, and which options to set instead."""

    reason: str
    options: Mapping[str, Any]

    def error(self, write: Write | None = None) -> InputError:
        """Returns the error. If `write` is given, options are formatted as in the trainer's command."""
        told = "" if write is None else "; write " + ", ".join(write(name, value) for name, value in self.options.items())
        return InputError(f"foremoe cannot be attached to this model: {self.reason}{told}.")


def refusal_of(get: Get, parallel: Parallel) -> Refusal | None:
    """Returns a refusal for the first unsupported option, or None if all options are supported.

    Args:
        get: Function that looks up the value of an option.
    """
    if get("moe_virtual_expert_load_balance", False):
        whole, get = get, lambda name, default: default if name in _VIRTUAL else whole(name, default)
    # Renamed in 0.18, where the old name remains as an alias that is always None.
    graphs = "cuda_graph_scope" if get("cuda_graph_modules", graphs_absent := object()) is graphs_absent else "cuda_graph_modules"
    scopes = _scopes(get(graphs, None))
    graphed = get("cuda_graph_impl", "none") not in (None, "none")
    unknown = next((name for name, wanted in _NOT_FOLLOWED.items() if get(name, wanted) not in (None, wanted)), "")
    group_size = get("microbatch_group_size_per_vp_stage", None)
    dispatcher, backend = get("moe_token_dispatcher_type", None), get("moe_flex_dispatcher_backend", None) or "deepep"
    on = lambda *names: {name: False for name in names if get(name, False)}  # noqa: E731
    given = lambda *names: {name: None for name in names if get(name, None) not in (None, False)}  # noqa: E731
    capacity = given("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor") | on("moe_pad_expert_input_to_capacity")
    overlapped = on("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
    narrow = on("moe_router_padding_for_quantization", "moe_router_padding_for_fp8") | given("fp8", "fp4")
    reasons: Iterable[tuple[Any, str, Mapping[str, Any]]] = (
        (dispatcher not in ("alltoall", "flex"),
         f"the {dispatcher} dispatcher is not supported; set moe_token_dispatcher_type='alltoall' or 'flex'",
         {"moe_token_dispatcher_type": "alltoall"}),
        (dispatcher == "flex" and backend not in ("deepep", "hybridep"),
         f"the flex dispatcher over {backend} is not supported; set moe_flex_dispatcher_backend='deepep' or 'hybridep', or "
         "moe_token_dispatcher_type='alltoall'", {"moe_token_dispatcher_type": "alltoall"}),
        (capacity,
         "dropping or padding to capacity changes what the plan counted; leave moe_expert_capacity_factor, "
         "moe_expert_rank_capacity_factor and moe_pad_expert_input_to_capacity unset", capacity),
        (graphed and (not scopes or any(part in s for s in scopes for part in ("moe", "full"))),
         f"a captured CUDA graph cannot follow a new plan in every micro-step; leave MoE layers out of {graphs}",
         {"cuda_graph_impl": "none"}),
        (parallel.etp > 1, "experts split over tensor-parallel ranks are not supported; set expert_tensor_parallel_size=1",
         {"expert_tensor_parallel_size": 1}),
        (parallel.tp > 1 and not get("sequence_parallel", False),
         "with tensor parallelism every rank must own its tokens; set sequence_parallel=True", {"sequence_parallel": True}),
        (overlapped,
         "foremoe follows the plain 1F1B order; set overlap_moe_expert_parallel_comm=False and delay_wgrad_compute=False",
         overlapped),
        (narrow, "fp8 and fp4 experts are not supported; set fp8=None, fp4=None and no router padding", narrow),
        (get("transformer_impl", None) == "inference_optimized",
         "experts for inference have other kernels; set transformer_impl='transformer_engine' or 'local'",
         {"transformer_impl": "transformer_engine"}),
        (unknown, f"replicas do not follow {unknown}={get(unknown, None)}; set {unknown}={_NOT_FOLLOWED.get(unknown)}",
         {unknown: _NOT_FOLLOWED.get(unknown)}),
        (parallel.vpp > 1 and group_size not in (None, parallel.pp),
         f"the interleaved order with microbatch_group_size_per_vp_stage={group_size} is not supported; set it to {parallel.pp}",
         {"microbatch_group_size_per_vp_stage": parallel.pp}),
    )  # fmt: skip
    return next((Refusal(reason, options) for refused, reason, options in reasons if refused), None)


def _scopes(given: Any) -> list[str]:
    """Returns the names of the scopes of CUDA graphs. Megatron takes a list, or a text with commas."""
    if isinstance(given, str):
        given = given.replace(",", " ").split()
    return [getattr(scope, "name", str(scope)) for scope in given] if isinstance(given, Iterable) else []


def hydra(prefix: str) -> Write:
    """Returns a function that formats an option under `prefix` as in a Hydra or OmegaConf command."""
    words = {None: "null", True: "true", False: "false"}
    return lambda name, value: f"{prefix}{name}={words.get(value, value) if value is None or isinstance(value, bool) else value}"
