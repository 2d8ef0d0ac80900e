"""veRL's own Megatron engine on CPU ranks, without what needs GPUs or downloads: hub weights, flash attention, bridges."""

import itertools
import sys
import types
import warnings
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
import cpu
import deepep
from process_groups import lay_out, wrap
from program import VOCABULARY, E, K, Layout, fill_experts, model_chunk, model_config

# Letters: L MoE layers of the model, E experts, K top-k.

PROMPT, RESPONSE, SEQUENCES = 6, 10, 6


class PackedAttention(torch.nn.Module):
    """Causal attention inside each packed sequence; Megatron's own without Transformer Engine knows no packing."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **_):
        padded = packed_seq_params.cu_seqlens_q_padded
        ends = (packed_seq_params.cu_seqlens_q if padded is None else padded).tolist()
        parts = [
            functional.scaled_dot_product_attention(*(x[a:b].transpose(0, 1)[None] for x in (query, key, value)), is_causal=True)
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat([part[0].transpose(0, 1) for part in parts]).reshape(query.shape[0], -1)


class EngineProgram:
    """One rank: the engine with a small GPT, and samples as veRL's trainer hands them over.

    Args:
        mode: "R2", "R3" or "disabled".
        settings: of foremoe, or None.
        mixed: samples of two domains, each with experts of its own.
        times: how many times as long samples are.
    """

    def __init__(self, layout: Layout, mode="R3", settings=None, seed=1, mixed=False, times=1):
        warnings.simplefilter("ignore")
        cpu.run_on_cpu()
        if layout.dispatcher != "alltoall":
            deepep.install()
        from megatron.core import parallel_state as ps
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from verl.utils.megatron.router_replay_patch import RouterReplay, apply_router_replay_patch
        from verl.workers.engine.base import EngineRegistry
        from verl.workers.engine.megatron import transformer_impl  # noqa: F401 (registers the engines)

        apply_router_replay_patch()
        self.layout, self.mode, self.ps, self.mixed, self.times = layout, mode, ps, mixed, times
        lay_out(layout)
        model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        RouterReplay.router_instances.clear()
        self.engine = _bare_engine(
            EngineRegistry.get_engine_cls("language_model", "megatron"), layout, mode, settings, seed, times
        )
        if settings is not None:
            self.engine.attach_foremoe(settings)

    def samples(self, step):
        """Token ids, masks and what rollout recorded, for this data-parallel rank: padded left and right."""
        generator = torch.Generator().manual_seed(1000 * step + self.ps.get_data_parallel_rank())
        num = 2 * SEQUENCES if self.mixed else SEQUENCES
        longest = self.times * PROMPT
        prompt = torch.randint(2, longest + 1, (num,), generator=generator)
        response = torch.randint(3, self.times * RESPONSE + 1, (num,), generator=generator)
        mask = torch.zeros(num, self.times * (PROMPT + RESPONSE), dtype=torch.long)
        for q in range(num):
            mask[q, longest - prompt[q] : longest + response[q]] = 1
        ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
        weight = torch.ones(self.layout.num_layers, E)
        weight[:, : E // 2] = 3.0
        weight.scatter_(1, torch.randint(0, E, (len(weight), 1), generator=torch.Generator().manual_seed(step)), 9.0)
        weight = weight.expand(*mask.shape, *weight.shape).clone()
        if self.mixed:
            first = torch.rand(num, generator=generator) < 0.5
            weight[first, ..., : E // 2] = 0.05
            weight[~first, ..., E // 2 :] = 0.05
        many = weight.reshape(-1, E)
        routes = torch.multinomial(many, K, generator=generator).view(*mask.shape, -1, K)
        return {
            "input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0),
            "response_mask": mask[:, longest:].clone(), "responses": ids[:, longest:].clone(),
            "prompts": ids[:, :longest].clone(),
            "temperature": torch.ones(num),
            "routed_experts": routes.to(torch.int16) * mask[:, :, None, None].to(torch.int16),
        }  # fmt: skip

    def batch(self, step, routes=None):
        """As `TrainingWorker` passes it to the engine; `routes` are those that R2 recorded."""
        from verl import DataProto
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import left_right_2_no_padding

        samples = self.samples(step)
        if self.mode == "R2":
            del samples["routed_experts"]
        data = left_right_2_no_padding(DataProto.from_dict(tensors=samples).to_tensordict())
        if routes is not None:
            data["routed_experts"] = routes
        tu.assign_non_tensor(
            data, use_dynamic_bsz=True, max_token_len_per_gpu=40 * self.times, sp_size=1,
            enable_routing_replay=self.mode != "disabled", calculate_entropy=True, calculate_sum_pi_squared=False,
        )  # fmt: skip
        return data

    def weights(self):
        return {
            f"{c}.{n}": p.detach().clone()
            for c, chunk in enumerate(self.engine.module)
            for n, p in chunk.module.named_parameters()
        }


def policy_loss(model_output, data, dp_group=None):
    """Stands in for PPO's; like it, a sum over tokens that does not depend on micro-batches.

    The last log-prob of a sequence is left out: veRL looks at the token that happens to come after it.
    """
    num_tokens = data["batch_num_tokens"] / data["dp_size"]
    loss = -sum(sequence[:-1].sum() for sequence in model_output["log_probs"].unbind()) / num_tokens
    return loss, {"policy_loss": float(loss)}


def _bare_engine(engine_class, layout, mode, settings, seed, times):
    """The engine, with what `initialize` makes from downloads set by hand."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    engine = engine_class.__new__(engine_class)
    config = model_config(layout)
    config.variable_seq_lengths, config.moe_enable_routing_replay = True, mode != "disabled"
    config.finalize_model_grads_func = finalize_model_grads
    chunks = [
        model_chunk(config, layout, v, core_attention=PackedAttention, max_sequence_length=64 * times)
        for v in range(layout.vpp or 1)
    ]
    for chunk in chunks:
        fill_experts(chunk, parallel_state.get_expert_model_parallel_rank(), seed)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=layout.distributed, grad_reduce_in_fp32=True)
    engine.module = [wrap(config, ddp, chunk) for chunk in chunks]
    options = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=layout.distributed, clip_grad=1.0)
    engine.optimizer = get_megatron_optimizer(options, engine.module)
    engine.tf_config, engine.enable_routing_replay, engine.mini_layer_topk_idx_list = config, mode != "disabled", []
    space = types.SimpleNamespace
    engine.engine_config = space(
        context_parallel_size=1, dynamic_context_parallel=False, pad_bshd_to_minibatch_max=False, use_remove_padding=True,
        pad_to_length=False, pad_to_length_bucket=None, use_fused_kernels=False, entropy_from_logits_with_chunking=False,
        router_replay=space(mode=mode), foremoe=settings,
    )  # fmt: skip
    engine.model_config = space(
        mtp=space(enable=False, enable_train=False), tokenizer=space(pad_token_id=0),
        hf_config=space(architectures=["Qwen3MoeForCausalLM"]), model_type="language_model",
    )  # fmt: skip
    return engine
