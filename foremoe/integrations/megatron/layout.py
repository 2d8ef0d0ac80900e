"""Functions that read a Megatron-Core model's layout: its MoE layers, their experts, and the order in which they run."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.distributed.group import Group
from foremoe.integrations.megatron.dispatcher import DISPATCHERS
from foremoe.integrations.settings import AttachSettings
from foremoe.integrations.supported import Parallel, Write, refusal_of
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.transfers import Link
from foremoe.problem.schedule import Schedule
from foremoe.transfer.backends import resolve_backend

# Letters: L MoE layers of this rank's model chunks, G ranks of the EP group.


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Location of an MoE layer of this rank.

    Attributes:
        number: Number of the transformer layer in the whole model, from 0.
        chunk: Number of the model chunk on this rank.
        index: Number of the transformer layer in that chunk.
    """

    moe: MoELayer
    number: int
    chunk: int
    index: int


def find_layers(chunks: Sequence[Any]) -> list[Place]:
    """Returns the MoE layers of this rank in the order in which they run, chunk by chunk.

    Layers of multi-token prediction are left out, because rollout does not record their routing.
    """
    if not chunks:
        raise InputError("model_chunks is empty; give the model, or its list of chunks.")
    places = []
    for c, chunk in enumerate(chunks):
        module = unwrap(chunk)
        apart = {id(m) for m in _predicting(chunk)}
        layers = getattr(getattr(module, "decoder", module), "layers", None)
        if layers is None:
            raise InputError(f"model chunk {c} ({type(module).__name__}) has no decoder.layers; give Megatron-Core model chunks.")
        for index, layer in enumerate(layers):
            found = [m for m in layer.modules() if isinstance(m, MoELayer) and id(m) not in apart]
            if len(found) > 1:
                raise InputError(f"transformer layer {index} of chunk {c} holds {len(found)} MoELayers; foremoe expects one.")
            places += [Place(moe, int(moe.layer_number) - 1, c, index) for moe in found]
    return places


def num_predicting(chunks: Sequence[Any]) -> int:
    """Returns how many of this rank's MoE layers belong to multi-token prediction."""
    return sum(isinstance(module, MoELayer) for chunk in chunks for module in _predicting(chunk))


def predicting_routers(chunks: Any, name: str) -> set[int]:
    """Returns the ids of the objects that multi-token prediction's routers hold under an attribute name, such as their replay."""
    chunks = chunks if isinstance(chunks, list | tuple) else [chunks]
    found = [getattr(module, name, None) for chunk in chunks for module in _predicting(chunk)]
    return {id(each) for each in found if each is not None}


def _predicting(chunk: Any) -> Iterator[Any]:
    """Yields modules of a chunk's multi-token prediction."""
    part = getattr(unwrap(chunk), "mtp", None)
    return iter(()) if part is None else part.modules()


def unwrap(chunk: Any) -> Any:
    """Returns the model without its wrappers, such as DDP and Float16Module."""
    while not hasattr(chunk, "decoder") and hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def moe_numbers(config: Any) -> list[int]:
    """Returns the numbers, counted from 0, of the whole model's MoE layers."""
    frequency = config.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [int(i % frequency == 0) for i in range(config.num_layers)]
    return [i for i, is_moe in enumerate(pattern) if is_moe]


def require_supported(config: Any, places: Sequence[Place], write: Write | None = None) -> None:
    """Raises an error if a layout is not supported. The error names the option to change.

    Args:
        write: Function that formats an option in the syntax of the trainer's command line, if there is a trainer.

    Raises:
        InputError: The layout is not supported.
    """
    parallel = Parallel(
        tp=parallel_state.get_tensor_model_parallel_world_size(), etp=parallel_state.get_expert_tensor_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )  # fmt: skip
    refusal = refusal_of(partial(getattr, config), parallel)
    if refusal is not None:
        raise refusal.error(write)
    for place in places:
        if "_foremoe" in place.moe.__dict__:
            raise InputError("foremoe is already attached to this model; call detach() on the result of the first attach.")
        own = type(place.moe.token_dispatcher)
        if own not in DISPATCHERS:  # ours derive from Megatron's and would not do what a subclass adds
            supported = " and ".join(cls.__name__ for cls in DISPATCHERS)
            raise InputError(
                f"layer {place.number} dispatches with {own.__name__}; foremoe supports {supported}, which "
                "moe_token_dispatcher_type='alltoall' and 'flex' select."
            )


def schedule_of(config: Any, places: Sequence[Place], num_micro_steps: int, *, forward_only: bool) -> Schedule:
    """Returns the order in which `forward_backward_func` runs this rank's MoE layers, with the micro-steps in order."""
    pp, pp_rank = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    selective = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    full = config.recompute_granularity == "full"
    reforward = selective or full
    if vpp > 1:
        schedule = Schedule.interleaved(num_micro_steps, pp, vpp, pp_rank, reforward)
        schedule = dataclasses.replace(schedule, chunk_L=np.array([p.chunk for p in places], np.int32))
    elif pp > 1:
        schedule = Schedule.one_f_one_b(num_micro_steps, pp, pp_rank, reforward)
    else:
        schedule = Schedule.accumulate(num_micro_steps, reforward)
    if full and config.recompute_method == "uniform":
        blocks = [(p.chunk, p.index // config.recompute_num_layers) for p in places]
        schedule = dataclasses.replace(schedule, block_L=np.unique(blocks, axis=0, return_inverse=True)[1].reshape(-1))
    return schedule.without_backward() if forward_only else schedule


def model_of(config: Any, weight_bytes: float) -> Model:
    """Returns the sizes of the model's MoE layers, which planning needs, with layer numbers of the whole model."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = config.kv_channels or hidden // heads
    groups = config.num_query_groups or heads
    return Model(
        name="megatron", num_layers=config.num_layers, first_moe_layer=0, num_experts=config.num_moe_experts,
        num_topk=config.moe_router_topk, hidden_size=hidden, ffn_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        num_matrices=3 if config.gated_linear_unit else 2, bytes_per_weight=weight_bytes, bytes_per_gradient=4.0,
        bytes_per_activation=weight_bytes, attention_params=hidden * head_dim * (2 * heads + 2 * groups), num_heads=heads,
        qk_head_dim=head_dim, v_head_dim=head_dim, source="TransformerConfig",
    )  # fmt: skip


def cluster_of(group: Group, settings: AttachSettings, config: Any) -> Cluster:
    """Returns the cluster in the settings, or else the 8xh100 preset with the ranks' real hosts as nodes. Collective.

    The cluster's dispatch follows the model's dispatcher. It has host stores only if one of the backends has them.
    """
    dispatch = "node" if config.moe_token_dispatcher_type == "flex" else "pairs"
    cluster = dataclasses.replace(_given_or_found(group, settings.cluster), dispatch=dispatch)
    hosts = any(Link.HOST in resolve_backend(backend).links for backend in settings.backends or ())
    return cluster if hosts else dataclasses.replace(cluster, host_bytes_per_s=0.0)


def _given_or_found(group: Group, cluster: Cluster | None) -> Cluster:
    if cluster is None:
        hosts = group.gather(socket.gethostname())
        names = list(dict.fromkeys(hosts))
        node_G = np.array([names.index(host) for host in hosts], np.int32)
        return dataclasses.replace(Cluster.preset("8xh100", num_ranks=group.size, host_store=True), node_of_rank_G=node_G)
    if cluster.num_ranks != group.size:
        raise InputError(f"the cluster has {cluster.num_ranks} ranks and the EP group {group.size}; give the EP group's cluster.")
    return cluster


def contiguous_homes(num_layers: int, num_experts: int) -> Array:
    """Returns Megatron's homes, int32 [L, E]: expert e is at home on rank e // (E/G)."""
    return np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))
