"""veRL's own worker on a CPU: only what needs GPUs, hub weights or an inference engine is replaced; no part of foremoe."""

from pathlib import Path

import cpu
import torch
from engine_program import PackedAttention
from program import Layout, fill_experts, model_chunk, model_config
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout


class CpuWorker(ActorRolloutRefWorker):
    """`ActorRolloutRefWorker`, whose engine builds a small GPT and whose rollout keeps what the actor sends."""

    def __init__(self, *args, **kwargs):
        from verl.plugin.platform import get_platform
        from verl.workers.engine.megatron.transformer_impl import MegatronEngine

        torch.set_num_threads(1)
        cpu.run_on_cpu()
        type(get_platform()).communication_backend_name = lambda _: "gloo"
        torch.cuda.get_device_name, torch.cuda.mem_get_info = lambda *_: "CPU", lambda *_: (0, 0)
        MegatronEngine._build_tf_config, MegatronEngine._build_megatron_module = _build_tf_config, _build_megatron_module
        _ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.Rollout"
        super().__init__(*args, **kwargs)


class Rollout(BaseRollout):
    """Writes the weights of this rank to a file of the step that made them, and the seconds of compiling up to then."""

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **_):
        from foremoe.base.compiled import compile_seconds

        rank, folder = torch.distributed.get_rank(), Path(self.config.engine_kwargs["vllm"]["folder"])
        found = {name: weight.detach().clone() for name, weight in weights}
        torch.save({"weights": found, "compile_s": compile_seconds()[0]}, folder / f"step_{global_steps}_rank_{rank}.pt")


class Bridge:
    """In place of a bridge to hub weights: sends the parameters of this rank as they are."""

    def get_conversion_tasks(self, module):
        return None

    def export_hf_weights(self, module, **_):
        for chunk in module:
            yield from chunk.module.named_parameters()


def _layout(engine):
    sizes, model = engine.engine_config, engine.model_config.hf_config
    return Layout(ep=sizes.expert_model_parallel_size, pp=sizes.pipeline_model_parallel_size, num_layers=model.num_hidden_layers)


def _build_tf_config(engine):
    engine.is_value_model = engine.share_embeddings_and_output_weights = engine.vanilla_bridge = False
    engine.param_dtype = engine.dtype = torch.float32  # veRL's config knows half precision only
    engine.bridge, engine.provider, engine.peft_cls = Bridge(), None, None
    engine.tf_config = model_config(_layout(engine))
    engine.tf_config.variable_seq_lengths = True


def _build_megatron_module(engine):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = engine.tf_config
    chunk = model_chunk(config, _layout(engine), 0, core_attention=PackedAttention, max_sequence_length=64)
    fill_experts(chunk, parallel_state.get_expert_model_parallel_rank(), 1)
    options = engine._resolve_override_ddp_config()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=engine.engine_config.use_distributed_optimizer, **options)
    return [DistributedDataParallel(config, ddp, chunk)]
