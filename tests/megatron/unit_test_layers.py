"""The MoE layers that Megatron-LM's own unit tests build, on CPU ranks: with foremoe attached and without.

Tests come from a checkout and run as they are; whenever one gives up its process groups, every `MoELayer` that it built is
compared, in the layout that it built it for. Each distinct layer is then built once more over all ranks as one EP group.
"""

import contextlib
import dataclasses
import io
import math
import sys
import types
from collections import defaultdict
from pathlib import Path
from unittest.mock import MagicMock, patch

import compare
import cpu
import deepep
import process_groups
import pytest
import torch
from breakages import BREAKAGES
from magnitudes import Magnitudes
from one_layer import OneLayer

# Letters: M micro-steps, T tokens of a rank, K top-k.

FOLDER = "tests/unit_tests/transformer/moe"
M, SEQUENCE, BATCH = 2, 4, 2
T = SEQUENCE * BATCH
PARALLEL = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size")
NOT_OF_A_LAYER = (
    "sequence_parallel", "num_layers", "num_attention_heads", "kv_channels", "num_query_groups", "ffn_hidden_size",
    "moe_layer_freq", "autocast_dtype", "params_dtype", "bf16", "fp16", "use_cpu_initialization", "init_method",
    "output_layer_init_method", "embedding_init_method", "init_method_std",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one layer on one rank.

    Attributes:
        kind: "equal", "alone" (its EP group is one rank, nothing is balanced), "refused", "differs", or "does not run" (on a CPU,
            without foremoe).
        why: What was said; empty if equal.
    """

    kind: str
    why: str = ""
    replicas: int = 0
    skew_before: float = 1.0
    skew_served: float = 1.0


@dataclasses.dataclass
class Found:
    """What one test led to: verdicts on its layers, and how it ended."""

    verdicts: list = dataclasses.field(default_factory=list)
    ended: str = ""


def run_tests(group, checkout, files, breakage=""):
    """Runs on a rank; all ranks run the same tests.

    Args:
        checkout: Folder with Megatron-LM's tests and megatron.training.
        files: Names of test files in FOLDER.
        breakage: What is broken on purpose, see breakages.py.

    Returns:
        {test: Found}, and {description of a distinct layer: Verdict} over all ranks as one EP group.
    """
    cpu.run_on_cpu()
    # Kernels that do not run here, and tests that compare versions of what is not installed.
    sys.modules.setdefault("triton", MagicMock())
    sys.modules.setdefault("triton.language", MagicMock())
    deepep.install()
    from megatron.core import parallel_state, utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from packaging.version import Version

    utils._te_version = utils._te_version or Version("0")
    watcher = Watcher(group.size, breakage)
    build, destroy = MoELayer.__init__, parallel_state.destroy_model_parallel

    def built(moe, config, submodules=None, *args, **options):
        build(moe, config, submodules, *args, **options)
        watcher.layers.append((watcher.running, moe, config, submodules))

    def destroyed():
        if parallel_state.model_parallel_is_initialized():
            watcher.compare_layers()
        process_groups.take_down(parallel_state, destroy)

    paths = [str(Path(checkout, FOLDER, file)) for file in files]
    options = ["--rootdir", str(checkout), "-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider", "-q", *paths]
    with (
        patch.object(MoELayer, "__init__", built),
        patch.object(parallel_state, "destroy_model_parallel", destroyed),
        patch.object(sys, "path", [str(checkout), *sys.path]),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        code = pytest.main(options, plugins=[watcher])
        parallel_state.destroy_model_parallel()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}:\n{said.getvalue()[-3000:]}")
    return dict(watcher.found), {name: watcher.spread(*recipe) for name, recipe in sorted(watcher.recipes.items())}


class Watcher:
    """A plugin of pytest that compares the layers of every test.

    Attributes:
        running: The test that runs.
        found: {test: Found}.
        layers: (test, layer, config, submodules) of what has been built in the process groups that there are.
        recipes: Description of a distinct layer -> what it is built from.
    """

    def __init__(self, num_ranks, breakage):
        self.num_ranks, self.breakage, self.running = num_ranks, breakage, ""
        self.found, self.layers, self.recipes = defaultdict(Found), [], {}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            for node in item.listchain():
                node.own_markers = [mark for mark in node.own_markers if not _asks_for_gpu(mark)]
            # Megatron-LM's container ends its groups whenever it is collected, then those of a later test.
            if hasattr(item.module, "MoEModelTestContainer"):
                item.module.MoEModelTestContainer.__del__ = lambda self: None

    def pytest_runtest_logstart(self, nodeid, location):
        self.running = nodeid.rpartition("/")[2]

    def pytest_runtest_logreport(self, report):
        found = self.found[self.running]
        if report.outcome == "passed" or found.ended:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        said = report.longrepr[2] if report.skipped else crash.message if crash else str(report.longrepr)
        found.ended = said.removeprefix("Skipped: ").splitlines()[0]

    def compare_layers(self):
        """Compares what has been built; called before process groups go."""
        layers, self.layers = self.layers, []
        for test, moe, config, submodules in layers:
            self.found[test].verdicts.append(compared(moe, self.breakage))
            dtype = next(moe.parameters()).dtype
            if config.moe_token_dispatcher_type == "allgather":  # Megatron's default; refused, with this cure
                config = dataclasses.replace(config, moe_token_dispatcher_type="alltoall")
            name = f"{_described(config)} {str(dtype).removeprefix('torch.')}"
            self.recipes.setdefault(name, (config, submodules, dtype))

    def spread(self, config, submodules, dtype):
        """The verdict on a layer over all ranks, or as many as its experts allow, as one EP group."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.moe.moe_layer import MoELayer

        sizes = dict.fromkeys(PARALLEL, 1) | {PARALLEL[1]: math.gcd(config.num_moe_experts, self.num_ranks)}
        process_groups.take_down(parallel_state, parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel(**sizes)
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        moe = MoELayer(dataclasses.replace(config, **sizes, sequence_parallel=False), submodules).to(dtype)
        return compared(moe, self.breakage)


def _asks_for_gpu(mark):
    return mark.name == "skipif" and "CUDA" in mark.kwargs.get("reason", "")


def _described(config):
    """Options of a layer's config that are not Megatron's defaults, parallel sizes apart."""
    left_out = {*PARALLEL, *NOT_OF_A_LAYER, "hidden_size", "num_moe_experts"}
    # What `__post_init__` makes of the defaults is no choice of a test.
    plain = vars(type(config)(num_layers=1, num_attention_heads=1, hidden_size=config.hidden_size, num_moe_experts=1))
    own = {name: value for name, value in vars(config).items() if name not in left_out and (value or plain.get(name))}
    own = {name: getattr(value, "__name__", value) for name, value in sorted(own.items()) if value != plain.get(name)}
    sizes = {"hidden_size": config.hidden_size, "num_moe_experts": config.num_moe_experts}
    return " ".join(f"{name}={value}" for name, value in (sizes | own).items() if name[0] != "_")


def compared(moe, breakage=""):
    """The verdict on a layer in the process groups that there are; collective."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    from foremoe.base.errors import InputError
    from foremoe.integrations.megatron import attach
    from foremoe.problem.cost import CostModel

    if not moe.layer_number:  # many tests leave it out
        moe.set_layer_number(1)
    model = OneLayer(moe)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunk = process_groups.wrap(moe.config, options, model)
    program = types.SimpleNamespace(bare=[model], ps=parallel_state)

    def attach_to_chunk():
        return attach(chunk, cost=CostModel(objective="balance"))  # at toy sizes no replica is worth its transfer

    try:
        attached = attach_to_chunk()
    except InputError as error:
        return Verdict("refused", str(error))
    attached.detach()
    with cpu.steady_rows():
        try:
            routing = _routing(chunk, moe)
            with Magnitudes(program) as magnitudes:
                alone = _pass(chunk, model)
            magnitudes = magnitudes.take()
        except Exception as error:
            return Verdict("does not run", f"{type(error).__name__}: {error}".splitlines()[0])
        attached = attach_to_chunk()
        balances = attached.active
        try:
            with BREAKAGES[breakage]() if breakage else contextlib.nullcontext():
                planned = _pass(chunk, model, attached.stage(routing, replay=False))
        finally:
            attached.detach()
    figures = attached.metrics()
    why = _difference(alone, planned, magnitudes, moe.config, parallel_state)
    kind = "differs" if why else "equal" if balances else "alone"
    return Verdict(kind, why, int(figures.get("replicas", 0)), figures.get("skew_before", 1.0), figures.get("skew_served", 1.0))


def _batches(model):
    """Inputs of this rank's micro-steps, and gradients of their outputs; tokens are alike, so that some experts have more."""
    weight = next(model.decoder.layers[0].mlp.experts.parameters())
    for m in range(M):
        shared = torch.randn(1, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(m))
        own = torch.Generator().manual_seed(100 + M * torch.distributed.get_rank() + m)
        x, grad = torch.randn(2, SEQUENCE, BATCH, model.config.hidden_size, generator=own)
        yield (x + shared).to(weight.dtype).requires_grad_(), grad.to(weight.dtype)


def _routing(chunk, moe):
    """int64 [T, 1, K] of every micro-step: what the router chooses by itself."""
    found = []
    hook = moe.router.register_forward_hook(lambda router, args, out: found.append(out[1].view(T, -1)))
    with torch.no_grad():
        for x, _ in _batches(chunk.module):
            chunk(x)
    hook.remove()
    return [routing_TE.nonzero()[:, 1].view(T, 1, -1).numpy() for routing_TE in found]


def _pass(chunk, model, stage=None):
    """Name -> tensor: outputs, gradients of inputs and, summed over micro-steps and ranks, of parameters."""
    chunk.zero_grad_buffer()
    model.zero_grad()  # what a test has left there would be added
    found = {}
    with stage or contextlib.nullcontext():
        for m, (x, grad) in enumerate(_batches(model)):
            output = chunk(x)
            output.backward(grad)
            found |= {f"output {m}": output.detach(), f"input gradient {m}": x.grad}
    chunk.finish_grad_sync()
    return found | {name: param.main_grad.clone() for name, param in model.named_parameters()}


def _difference(alone, planned, magnitudes, config, ps):
    """What differs by more than the order of sums explains (see compare.py); empty if nothing."""
    tp, pp = ps.get_tensor_model_parallel_world_size(), ps.get_pipeline_model_parallel_world_size()
    half = config.params_dtype != torch.float32 or alone["output 0"].dtype != torch.float32
    layout = types.SimpleNamespace(tp=tp, pp=pp, M=M, T=T * tp, bf16=half, narrow=False, engine=None)
    bound = compare.relative_bound(types.SimpleNamespace(layout=layout, num_ranks=torch.distributed.get_world_size()), "")
    for name, tensor in alone.items():
        error = (tensor.double() - planned[name].double()).abs()
        allowed = bound * magnitudes[f"0.{name}"] if f"0.{name}" in magnitudes else torch.zeros(())
        if not bool((error <= allowed).all()):
            return f"{name} differs by up to {float(error.max()):.3g}, which is more than {float(allowed.max()):.3g}"
    return ""
