"""A small training program on Megatron-Core: GPT with MoE layers, replay, DDP, optimizer, pipelines. No part of foremoe."""

import functools
import warnings
import zlib
from dataclasses import dataclass

import cpu
import deepep
import grouped_linear
import torch
from hybrid import hybrid_chunk
from process_groups import lay_out, wrap
from torch.nn import functional

# Letters: M micro-steps, L MoE layers of the model, T tokens of a data-parallel rank, K top-k, E experts.

HIDDEN, FFN, HEADS, VOCABULARY, E, K = 16, 24, 2, 64, 8, 2


@dataclass(frozen=True)
class Layout:
    """How the program is laid out over ranks. EDP is what is left: ranks / (pp * ep)."""

    ep: int = 2
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    num_layers: int = 2
    dense: tuple[int, ...] = ()  # transformer layers without experts
    recompute: str | None = None  # None, "full", "full2" (blocks of two layers), "block" (some layers only), "selective"
    distributed: bool = True
    overlap_grad: bool = False
    overlap_param: bool = False
    bf16: bool = False
    narrow: bool = False  # main gradients in the dtype of parameters
    grouped: bool = False
    shared_experts: bool = False
    dispatcher: str = "alltoall"  # or the backend of the flex dispatcher: "deepep", "hybridep"
    num_experts: int = E
    M: int = 4
    sequence: int = 12
    batch: int = 2
    hybrid: bool = False  # HybridModel, see hybrid.py
    engine: str | None = None  # experts are `TEGroupedMLP` over this class of grouped_linear.py
    options: tuple = ()  # pairs of a name of TransformerConfig and a value
    ddp: tuple = ()  # likewise of DistributedDataParallelConfig

    @property
    def T(self):
        return self.sequence * self.batch

    @property
    def moe_layers(self):
        """Numbers, from 0. A hybrid model counts attention as a layer of its own."""
        numbers = [i for i in range(self.num_layers) if i not in self.dense]
        return [2 * i + 1 for i in numbers] if self.hybrid else numbers

    @property
    def num_predicting(self):
        """Layers of multi-token prediction, which come last in routing."""
        return dict(self.options).get("mtp_num_layers", 0)

    def __str__(self):
        default = Layout()
        return "-".join(f"{n}={v}" for n, v in vars(self).items() if v != getattr(default, n)) or "plain"


class Program:
    """One rank of the program: model chunks, optimizer, data. The same for the same layout and seed."""

    def __init__(self, layout, seed=1):
        warnings.simplefilter("ignore")
        cpu.run_on_cpu()
        from megatron.core import parallel_state as ps
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.moe.router_replay import RouterReplay

        self.layout, self.ps = layout, ps
        lay_out(layout)
        if layout.dispatcher != "alltoall":
            deepep.install()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        RouterReplay.clear_global_router_replay_instances()
        self.config = model_config(layout)
        self.bare = [model_chunk(self.config, layout, v) for v in range(layout.vpp or 1)]
        for module in self.bare:
            fill_experts(module, ps.get_expert_model_parallel_rank(), seed)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=layout.distributed, grad_reduce_in_fp32=not layout.narrow,
            overlap_grad_reduce=layout.overlap_grad, overlap_param_gather=layout.overlap_param,
            bucket_size=3000 if layout.overlap_grad else None, **dict(layout.ddp),
        )  # fmt: skip
        self.chunks = [
            wrap(self.config, ddp, m, disable_bucketing=v > 0 and not layout.overlap_grad) for v, m in enumerate(self.bare)
        ]
        self.config.finalize_model_grads_func = finalize_model_grads
        if layout.overlap_grad:
            syncs = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = syncs if layout.vpp else syncs[0]
            # As trainers set it: later pipeline ranks then reduce after the last backward, all at once.
            starts = [chunk.start_grad_sync for chunk in self.chunks]
            self.config.grad_sync_func = starts if layout.vpp else starts[0]
        # With a small eps Adam turns a gradient that is zero but for rounding into a full step, and noise into weights.
        options = OptimizerConfig(
            optimizer="adam", lr=1e-2, adam_eps=1e-4, use_distributed_optimizer=layout.distributed, clip_grad=1.0,
            bf16=layout.bf16, params_dtype=self.config.params_dtype, overlap_param_gather=layout.overlap_param,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(options, self.chunks)
        self.loss = lambda loss: (loss.mean(), {"loss": loss.mean().detach()})

    @property
    def routers(self):
        """Chunk -> its routers in order, with the place of their layer among all MoE layers."""
        places = {number: i for i, number in enumerate(self.layout.moe_layers)}
        found = [
            [(places[layer.layer_number - 1], layer.mlp.router) for layer in m.decoder.layers if hasattr(layer.mlp, "router")]
            for m in self.bare
        ]
        for m, mine in zip(self.bare, found, strict=True):
            predicting = m.mtp.modules() if self.layout.num_predicting and hasattr(m, "mtp") else ()
            routers = [module for module in predicting if hasattr(module, "router_replay")]
            mine += [(len(places) + i, router) for i, router in enumerate(routers)]
        return found

    def routing(self, step, seed=0, popular=0):
        """int64 [M, T of this rank, L, K]: what rollout recorded for the tokens of this rank.

        Args:
            seed: of the choice of every token.   popular: of which expert of a micro-step and layer is chosen most.
        """
        layout, tp, T, E = self.layout, self.layout.tp, self.layout.T, self.layout.num_experts
        generator = torch.Generator().manual_seed(1000 * (100 * seed + step) + self.ps.get_data_parallel_rank())
        num_layers = len(layout.moe_layers) + layout.num_predicting
        weight = torch.ones(layout.M, T, num_layers, E)
        weight[..., : E // 2] = 3.0
        hot = torch.randint(0, E, (layout.M, 1, num_layers, 1), generator=torch.Generator().manual_seed(100 * popular + step))
        weight.scatter_(3, hot.expand(-1, T, -1, 1), 9.0)
        topk = torch.multinomial(weight.view(-1, E), K, generator=generator).view(layout.M, T, num_layers, K)
        here = self.ps.get_tensor_model_parallel_rank()
        return topk[:, here * T // tp : (here + 1) * T // tp].clone()

    def forward_backward(self, step, topk_MTLK, forward_only=False):
        """All micro-steps of one optimizer step: the losses (on the last pipeline rank, else none).

        Args:
            topk_MTLK: what routers replay; None: they route by themselves.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        layout = self.layout
        generator = torch.Generator().manual_seed(7000 + 31 * step + self.ps.get_data_parallel_rank())
        batch, sequence = layout.batch, layout.sequence
        tokens = torch.randint(0, VOCABULARY, (layout.M, batch, sequence), generator=generator)
        position = torch.arange(sequence).repeat(batch, 1)
        mask = ~torch.ones(batch, 1, sequence, sequence).tril().bool()
        done = [0] * len(self.chunks)
        routers = self.routers

        def forward_step(iterator, model):
            c = next(i for i, chunk in enumerate(self.chunks) if chunk is model)
            m, done[c] = done[c], done[c] + 1
            text = next(iterator)
            if topk_MTLK is None:
                return model(text, position, mask, labels=text), self.loss
            for place, router in routers[c]:
                router.router_replay.set_target_indices(topk_MTLK[m, :, place].contiguous())
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            output = model(text, position, mask, labels=text)
            # What runs forward inside backward replays in the order of the forwards.
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            return output, self.loss

        iterators = [iter(list(tokens)) for _ in self.chunks]
        found = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators if layout.vpp else iterators[0],
            model=self.chunks if layout.vpp else self.chunks[0], num_microbatches=layout.M, seq_length=sequence,
            micro_batch_size=batch, forward_only=forward_only,
        )  # fmt: skip
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()
        return [float(x["loss"]) for x in found]

    def own_routing(self, step, forward_only=False):
        """What the routers of this rank choose by themselves, and the losses.

        Returns:
            int64 [M, T of this rank, L, K], zeros in other ranks' layers; losses of `forward_backward`.
        """
        layout, found = self.layout, {}

        def record(place, out):
            if torch._C._current_graph_task_id() == -1:  # not a layer that runs forward again
                found.setdefault(place, []).append(out[1])

        hooks = [
            router.register_forward_hook(lambda _, args, out, place=place: record(place, out))
            for routers in self.routers
            for place, router in routers
        ]
        losses = self.forward_backward(step, None, forward_only=forward_only)
        for hook in hooks:
            hook.remove()
        topk_MTLK = torch.zeros(layout.M, layout.T // layout.tp, len(layout.moe_layers), K, dtype=torch.int64)
        for place, maps in found.items():
            for m, routing_TE in enumerate(maps):
                topk_MTLK[m, :, place] = routing_TE.view(-1, layout.num_experts).nonzero()[:, 1].view(-1, K)
        return topk_MTLK, losses

    def zero(self):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def main_grads(self):
        """Name -> main gradient, after reduction; with the distributed optimizer each rank has its shard reduced only."""
        return {f"{c}.{n}": p.main_grad.clone() for c, m in enumerate(self.bare) for n, p in m.named_parameters()}

    def weights(self):
        return {f"{c}.{n}": p.detach().clone() for c, m in enumerate(self.bare) for n, p in m.named_parameters()}


def model_config(layout):
    """Megatron's config of the program's model."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    per_layer = 2 if layout.hybrid else 1
    recompute = {
        None: {},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "full2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    }[layout.recompute]
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    if layout.dispatcher != "alltoall":
        dispatcher = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": layout.dispatcher}
    options = dict(
        num_layers=per_layer * layout.num_layers, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN, num_moe_experts=layout.num_experts, moe_router_topk=K, moe_router_load_balancing_type="none",
        **dispatcher,
        moe_aux_loss_coeff=0.0, moe_enable_routing_replay=True, moe_grouped_gemm=layout.grouped,
        moe_layer_freq=1 if layout.hybrid else [int(i not in layout.dense) for i in range(layout.num_layers)],
        moe_shared_expert_intermediate_size=FFN if layout.shared_experts else None,
        add_bias_linear=False, gated_linear_unit=True, activation_func=functional.silu, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
        normalization="RMSNorm",
        persist_layer_norm=False, use_cpu_initialization=True, params_dtype=dtype, pipeline_dtype=dtype, bf16=layout.bf16,
        tensor_model_parallel_size=layout.tp, sequence_parallel=layout.tp > 1, pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=1,
        batch_p2p_comm=True, gradient_accumulation_fusion=False, **recompute,
    )  # fmt: skip
    return TransformerConfig(**options | dict(layout.options))


class RMSNorm(torch.nn.Module):
    """Megatron's own norm without Transformer Engine refuses sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def model_chunk(config, layout, v, core_attention=None, max_sequence_length=None):
    """Model chunk `v` of this pipeline rank.

    Args:
        core_attention: a module class in place of Megatron's own.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    stage = {"vp_stage": v} if layout.vpp else {}
    if layout.vpp:
        ps.set_virtual_pipeline_model_parallel_rank(v)
    arguments = dict(
        vocab_size=VOCABULARY, max_sequence_length=max_sequence_length or layout.sequence, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, **stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, **stage), **stage,
    )  # fmt: skip
    if layout.hybrid:
        engine = getattr(grouped_linear, layout.engine) if layout.engine else None
        use_experts = lambda mlp: use_engine_experts(mlp, engine) if engine else None  # noqa: E731
        return hybrid_chunk(config, layout, RMSNorm, use_experts, **arguments).to(config.params_dtype)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", **stage)
    spec.layer_norm = RMSNorm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if layout.engine:
            use_engine_experts(layer.submodules.mlp, getattr(grouped_linear, layout.engine))
        if core_attention is not None:
            layer.submodules.self_attention.submodules.core_attention = core_attention
    predicting = None
    if layout.num_predicting:
        predicting = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **stage)
        for layer in predicting.layer_specs if predicting else ():
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = RMSNorm
    module = GPTModel(config, spec, mtp_block_spec=predicting, **arguments)
    module.model_type = ModelType.encoder_or_decoder
    return module.to(config.params_dtype)


def use_engine_experts(mlp, linear):
    """Makes the experts of a spec, if it is that of a MoE layer, `TEGroupedMLP` over a class of linear modules."""
    from megatron.core.transformer import mlp as dense
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = getattr(experts, "GroupedMLPSubmodules", dense.MLPSubmodules)(linear_fc1=linear, linear_fc2=linear)
    if isinstance(mlp, functools.partial):  # from 0.18 on
        if mlp.func.__name__ == "MoELayer":
            mlp.keywords["submodules"].experts = functools.partial(experts.TEGroupedMLP, submodules=parts)
    elif mlp.module.__name__ == "MoELayer":
        mlp.submodules.experts = ModuleSpec(module=experts.TEGroupedMLP, submodules=parts)


def fill_experts(module, ep_rank, seed):
    """Weights as a function of their layer and expert, so that layouts start alike."""
    with torch.no_grad():
        for layer in module.decoder.layers:
            if not hasattr(layer.mlp, "router"):
                continue
            experts = layer.mlp.experts
            for name, p in experts.named_parameters():
                key = zlib.crc32(f"{seed} {layer.layer_number} {ep_rank} {name}".encode())
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(key)) * 0.2)
