"""The slot path of one MoE layer on a rank, step by step without its experts: counted, and timed by the CPU time of its thread."""

import sys
import time
import types
from contextlib import ExitStack, contextmanager
from pathlib import Path

import cpu
import numpy as np
import process_groups
import torch

from foremoe.problem.cost import CostModel
from foremoe.problem.schedule import Phase

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from operations import Work

# Letters: T tokens of a rank, K top-k, E experts, M micro-steps, H hidden size.

ALONE, COUNTED, KNOWN = "Megatron-Core alone", "counted in the layer", "known before the stage"


class OneLayer(torch.nn.Module):
    """A model of one MoE layer, as Megatron-Core's look from outside."""

    def __init__(self, moe):
        super().__init__()
        self.config = moe.config
        layer = torch.nn.Module()
        layer.mlp = moe
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])


def make_layer(num_ranks, num_experts, topk, hidden):
    """An MoE layer of all ranks as one EP group, and its model."""
    cpu.run_on_cpu()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    process_groups.take_down(parallel_state, parallel_state.destroy_model_parallel)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=2, num_moe_experts=num_experts, moe_router_topk=topk,
        moe_ffn_hidden_size=16, moe_token_dispatcher_type="alltoall", add_bias_linear=False, use_cpu_initialization=True,
        expert_model_parallel_size=num_ranks,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False)
    moe = MoELayer(config, spec.submodules.mlp.submodules)
    moe.set_layer_number(1)
    return moe, OneLayer(moe)


class Rows:
    """Routing of the micro-steps on a rank, some experts more popular than others; and what layers get of it."""

    def __init__(self, rank, M, T, K, E, H):
        generator = torch.Generator().manual_seed(rank)
        weight_TE = (torch.arange(E) % 4 + 1.0).expand(T, -1)
        self.topk = [torch.multinomial(weight_TE, K, generator=generator) for _ in range(M)]
        self.work = [topk_TK[:, None].numpy().astype(np.int16) for topk_TK in self.topk]
        self.routing = [torch.zeros(T, E, dtype=torch.bool).scatter_(1, topk_TK, True) for topk_TK in self.topk]
        self.x = torch.randn(T, 1, H, generator=generator)
        self.probs = torch.rand(T, E, generator=generator)


class Watch:
    """What the slot path took: operations, sorts, gathers of counts, host reads, and seconds of the calling thread; by row."""

    def __init__(self, count):
        self.count, self.found = count, []

    @contextmanager
    def row(self):
        if not self.count:
            begin_s = time.thread_time()
            yield
            self.found.append(time.thread_time() - begin_s)
            return
        num_gathers, gather = [], torch.distributed.all_gather_into_tensor
        torch.distributed.all_gather_into_tensor = lambda *args, **options: (num_gathers.append(1), gather(*args, **options))[1]
        with ExitStack() as stack:
            stack.callback(setattr, torch.distributed, "all_gather_into_tensor", gather)
            work = stack.enter_context(Work())
            stack.enter_context(work.reads)
            yield
        self.found.append((work.num, work.num_sorts, len(num_gathers), work.reads.num + work.num_waits))


def run_rows(moe, rows, watch, release):
    """Every micro-step through the layer's path to the slots and back, with experts that give back what they get."""
    outputs = []
    for m, routing_TE in enumerate(rows.routing):
        with watch.row():
            x, probs = moe.preprocess(rows.x, rows.probs, routing_TE)
            x, probs = moe.dispatch(x, probs)
            x, _, probs = moe.token_dispatcher.dispatch_postprocess(x, probs)
        release(m)
        with watch.row():
            x = moe.combine(moe.token_dispatcher.combine_preprocess(x * probs[:, None]))
            outputs.append(moe.postprocess(x, None))
    return outputs


def slot_path(group, count=True, num_experts=32, M=2, T=64, K=4, H=16, repeats=1):
    """Path -> what `Watch` found of forward rows, the first stage left out; and whether all paths give the same outputs."""
    from foremoe.integrations.megatron import attach

    moe, model = make_layer(group.size, num_experts, K, H)
    rows, found, outputs = Rows(group.rank, M, T, K, num_experts, H), {}, {}
    attached = attach(model, cost=CostModel(objective="balance"))
    with torch.no_grad():
        for _ in range(repeats):
            for path in (ALONE, COUNTED, KNOWN):
                watch = Watch(count)
                if path == ALONE:
                    outputs[path] = run_rows(moe, rows, watch, lambda m: None)
                else:
                    if hasattr(attached, "_trust"):
                        attached._trust._holds = {False: path == KNOWN}
                    with attached.stage(rows.work, "recompute"):
                        stage = attached._layers[0]._stage
                        outputs[path] = run_rows(moe, rows, watch, lambda m: stage.release(m, 0, Phase.FORWARD))
                found.setdefault(path, []).extend(watch.found)
    num_replicas = attached.report.plan.num_replicas
    attached.detach()
    same = all(torch.allclose(a, b) for path in outputs for a, b in zip(outputs[path], outputs[ALONE], strict=True))
    return found, types.SimpleNamespace(same=same, num_replicas=num_replicas)
