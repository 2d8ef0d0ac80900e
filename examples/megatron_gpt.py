"""Trains a small GPT with MoE layers on Megatron-Core by replayed routing, with and without foremoe.

Every step plays both stages that follow a rollout: a forward pass records which experts each token chose (a rollout engine would
have recorded them), then the update replays them. With foremoe the update runs by a plan made from that record.

    torchrun --nproc_per_node 4 examples/megatron_gpt.py --ep 2 --pp 2
    torchrun --nproc_per_node 4 examples/megatron_gpt.py --ep 2 --pp 2 --without-foremoe

The two print the same losses. The lines that concern foremoe are marked with an arrow.
"""

import argparse
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

import foremoe  # <--

VOCABULARY = 512


def build(args: argparse.Namespace) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """The model in DDP, and its distributed optimizer."""
    config = TransformerConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=4, ffn_hidden_size=2 * args.hidden,
        moe_ffn_hidden_size=args.hidden, num_moe_experts=args.experts, moe_router_topk=2, moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none", moe_enable_routing_replay=True, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", persist_layer_norm=False,
        use_cpu_initialization=True, pipeline_dtype=torch.float32, batch_p2p_comm=True, gradient_accumulation_fusion=False,
        pipeline_model_parallel_size=args.pp, expert_model_parallel_size=args.ep, expert_tensor_parallel_size=1,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=args.sequence, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    model.model_type = ModelType.encoder_or_decoder
    if torch.cuda.is_available():
        model.cuda()
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, ddp_config, model)
    config.finalize_model_grads_func = finalize_model_grads
    options = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, clip_grad=1.0)
    return ddp, get_megatron_optimizer(options, [ddp])


def run(args: argparse.Namespace, model: DistributedDataParallel, batches: list, replayed: list | None) -> tuple[list, list]:
    """All micro-steps: losses (on the last pipeline rank), and the experts chosen, one array [T, L, K] per micro-step.

    Args:
        replayed: What an earlier call found: the update replays it. None: forward only, and record.
    """
    routers = RouterReplay.global_router_replay_instances
    recorded: list = []
    micro_steps = iter(range(len(batches)))

    def forward_step(iterator, model):
        tokens, m = next(iterator), next(micro_steps)
        if replayed is None:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        else:
            RouterReplay.set_replay_data([replayed[m][:, i].contiguous() for i in range(len(routers))])
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        length = tokens.shape[1]
        position = torch.arange(length, device=tokens.device).expand_as(tokens)
        mask = ~torch.ones(1, 1, length, length, device=tokens.device).tril().bool()
        output = model(tokens, position, mask, labels=tokens.roll(-1, 1))
        if replayed is None:
            recorded.append(torch.stack([router.get_recorded_indices() for router in routers], dim=1))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    found = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=model, num_microbatches=len(batches),
        seq_length=args.sequence, micro_batch_size=args.batch, forward_only=replayed is None,
    )  # fmt: skip
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    return [float(x["loss"]) for x in found], recorded


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ep": 2, "pp": 1, "steps": 4, "micro-steps": 4, "layers": 4, "experts": 16, "hidden": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--without-foremoe", action="store_true")
    args = parser.parse_args(argv)

    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(1, args.pp, expert_model_parallel_size=args.ep, expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model, optimizer = build(args)
    device = next(model.parameters()).device

    # Toy sizes gain no time from a replica, so this example levels loads; leave `cost` out to let predicted time decide.
    cost = foremoe.CostModel(objective="balance")  # <--
    moe = None if args.without_foremoe else foremoe.integrations.megatron.attach(model, redundant=1, cost=cost)  # <--

    means = []
    generator = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    for step in range(args.steps):
        shape = (args.micro_steps, args.batch, args.sequence)
        # Few distinct tokens: their experts are in demand.
        batches = list((torch.rand(shape, generator=generator) ** 4 * VOCABULARY).long().to(device))
        with torch.no_grad():
            _, routing = run(args, model, batches, None)
        begin = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        if moe is None:
            losses, _ = run(args, model, batches, routing)
        else:
            with moe.stage([topk.cpu().numpy() for topk in routing], "update"):  # <--
                losses, _ = run(args, model, batches, routing)
        optimizer.step()
        if losses:
            means.append(sum(losses) / len(losses))
        if losses and parallel_state.get_data_parallel_rank() == 0:
            figures = moe.metrics() if moe is not None else {}
            text = ", ".join(
                f"{name} {figures[name]:.3f}" for name in ("skew_before", "skew_after", "replicas") if name in figures
            )
            print(f"step {step}: loss {means[-1]:.6f}, {time.perf_counter() - begin:.2f} s {text}", flush=True)
    if moe is not None:
        moe.detach()  # <--
    return means


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
