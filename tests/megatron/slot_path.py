"""The slot path of one MoE layer on a rank, step by step without its experts: counted, and timed by its thread's CPU time."""

import contextlib
import functools
import json
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import cpu
import numpy as np
import process_groups
import torch
from one_layer import OneLayer, layer_of

from foremoe.base.parallel import row_runner
from foremoe.problem.cost import CostModel
from foremoe.problem.schedule import Phase
from foremoe.testing.ranks import RankPool

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
import operations

# Letters: T tokens of a rank, K top-k, E experts, M micro-steps, H hidden size.

ALONE, COUNTED, KNOWN = "Megatron-Core alone", "counted in the layer", "known before the stage"
HOLED = "known but for 8 tokens of a rank"


def make_layer(num_ranks, num_experts, topk, hidden):
    """An MoE layer of all ranks as one EP group, and its model."""
    cpu.run_on_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    process_groups.take_down(parallel_state, parallel_state.destroy_model_parallel)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=2, num_moe_experts=num_experts, moe_router_topk=topk,
        moe_ffn_hidden_size=16, moe_token_dispatcher_type="alltoall", add_bias_linear=False, use_cpu_initialization=True,
        expert_model_parallel_size=num_ranks,
    )  # fmt: skip
    moe = layer_of(config)
    moe.set_layer_number(1)
    return moe, OneLayer(moe)


class Rows:
    """Routing of the micro-steps on a rank, some experts more popular than others; and what layers get of it."""

    def __init__(self, rank, M, T, K, E, H):
        generator = torch.Generator().manual_seed(rank)
        weight_TE = (torch.arange(E) % 4 + 1.0).expand(T, -1)
        self.topk = [torch.multinomial(weight_TE, K, generator=generator) for _ in range(M)]
        self.work = [topk_TK[:, None].numpy().astype(np.int16) for topk_TK in self.topk]
        self.holed = [topk_TLK.copy() for topk_TLK in self.work]
        for topk_TLK in self.holed:
            topk_TLK[:: -(-T // 8)] = -1
        self.routing = [torch.zeros(T, E, dtype=torch.bool).scatter_(1, topk_TK, True) for topk_TK in self.topk]
        self.x = torch.randn(T, 1, H, generator=generator)
        self.probs = torch.rand(T, E, generator=generator)


class Work(operations.Work):
    """Also counts gathers between ranks."""

    num_gathers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_gathers += func.__name__.startswith("_allgather")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Stopwatch:
    """CPU seconds of the calling thread in functions, so that waiting for other ranks is not in it.

    Args:
        functions: (owner, name) of functions that do not call each other.
    """

    def __init__(self, *functions):
        self.seconds, self._functions = 0.0, [(owner, name) for owner, name in functions if hasattr(owner, name)]

    @contextmanager
    def running(self):
        with ExitStack() as stack:
            for owner, name in self._functions:
                stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name))))
            yield

    def _timed(self, function):
        @functools.wraps(function)
        def timed(*args, **options):
            begin_s = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.thread_time() - begin_s

        return timed


def run_rows(moe, rows, release, around):
    """Every micro-step through the layer's path to the slots and back, with experts that give back what they get.

    Args:
        release: called after each row's experts.
        around: a context for all but that.
    """
    outputs = []
    for m, routing_TE in enumerate(rows.routing):
        with around():
            x, probs = moe.preprocess(rows.x, rows.probs, routing_TE)
            x, probs = moe.dispatch(x, probs)
            x, _, probs = moe.token_dispatcher.dispatch_postprocess(x, probs)
        if isinstance(x, tuple):  # of base and redundant slots
            x = tuple(rows * probs_Y[:, None] for rows, probs_Y in zip(x, probs, strict=True))
        else:
            x = x * probs[:, None]
        release(m)
        with around():
            x = moe.combine(moe.token_dispatcher.combine_preprocess(x))
            outputs.append(moe.postprocess(x, None))
    return outputs


class Layer:
    """The layer on a rank, with foremoe attached, and its rows."""

    def __init__(self, group, num_experts, M, T, K, H):
        from foremoe.integrations.megatron import attach

        self.moe, model = make_layer(group.size, num_experts, K, H)
        self.rows = Rows(group.rank, M, T, K, num_experts, H)
        self.attached = attach(model, cost=CostModel(objective="balance"))
        self.outputs = {}

    def run(self, path, around=contextlib.nullcontext):
        """All rows by one of the paths; seconds of beginning the stage."""
        with torch.no_grad():
            if path == ALONE:
                self.outputs[path] = run_rows(self.moe, self.rows, lambda m: None, around)
                return
            if hasattr(self.attached, "_trust"):
                self.attached._trust._holds = {False: path != COUNTED}
            with self.attached.stage(self.rows.holed if path == HOLED else self.rows.work, "recompute"):
                stage = self.attached._layers[0]._stage
                self.outputs[path] = run_rows(self.moe, self.rows, lambda m: stage.release(m, 0, Phase.FORWARD), around)

    def same(self):
        """Whether all paths gave the same; only the order of sums differs."""
        alone = self.outputs[ALONE]
        return all(torch.allclose(a, b) for found in self.outputs.values() for a, b in zip(found, alone, strict=True))


def counts(group):
    """Path -> operations, sorts, gathers between ranks and host waits of a row's forward; and whether results are equal."""
    layer, found = Layer(group, num_experts=32, M=1, T=64, K=4, H=16), {}
    for path in (ALONE, COUNTED, KNOWN, HOLED):
        work = Work()

        @contextmanager
        def around(work=work):
            with work, work.reads:
                yield

        layer.run(path, around)
        found[path] = work.num, work.num_sorts, work.num_gathers, work.reads.num + work.num_waits
    assert layer.attached.report.plan.num_replicas > 0
    layer.attached.detach()
    return found, layer.same()


def seconds(group, num_experts, repeats, M=32, T=8192, K=8, H=16):
    """Path -> by repeat: CPU seconds of a row's slot path (remap, counts, route), and of its share of beginning the stage.

    Routes are made on the calling thread, whose time it is.
    """
    layer = Layer(group, num_experts, M, T, K, H)
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from foremoe.integrations.megatron.stage import MegatronStage

    paths, making = [COUNTED], []  # of an older foremoe, beside which this one is measured; what makes routes
    with contextlib.suppress(ImportError):
        from foremoe.integrations.megatron.known import Trust
        from foremoe.runtime import replay

        paths, making = [ALONE, COUNTED, KNOWN], [replay]
        from foremoe.runtime import holes

        paths, making = [*paths, HOLED], [*making, holes]
    in_layer = [(MegatronStage, "route"), (MegatronStage, "spread"), (MegatronStage, "known_row")]
    found = {path: [] for path in paths}
    for repeat in range(repeats + 1):
        for path, rows in found.items():
            of_layer = Stopwatch(*in_layer, (MoEAlltoAllTokenDispatcher, "preprocess"))
            of_begin = Stopwatch(*((Trust, "begin") for _ in making[:1]))
            with ExitStack() as stack:
                for module in making:
                    stack.enter_context(patch.object(module, "row_runner", functools.partial(row_runner, 1)))
                stack.enter_context(of_layer.running())
                stack.enter_context(of_begin.running())
                layer.run(path)
            if repeat:  # the first compiles
                rows.append((of_layer.seconds / M, of_begin.seconds / M))
    layer.attached.detach()
    return found


def main():
    """Prints what `seconds` finds on rank 0, as JSON; arguments: number of ranks, repeats."""
    num_ranks, repeats = map(int, sys.argv[1:])
    with RankPool(num_ranks) as pool:
        found = pool.run(seconds, 16 * num_ranks, repeats, timeout_s=300.0)[0]
    print(json.dumps(found))
