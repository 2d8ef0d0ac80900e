"""Runs Megatron-LM's own pretrain_gpt.py on CPU ranks, with and without foremoe's `forward_backward`, and compares the losses.

    python -m bench.megatron_lm --checkout ../Megatron-LM

The checkout is a clone of NVIDIA/Megatron-LM (tested with core_v0.16.1) and brings its own megatron-core. The routers choose
experts themselves. A forward pass before the update records their choices, like the recompute pass in RL. This is a nightly job.
Without a checkout, it prints one line and succeeds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from bench.output import command_line, emit, hardware

ROOT = Path(__file__).resolve().parents[1]
TINY = """
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization --mock-data --tokenizer-type NullTokenizer
    --vocab-size 255 --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr 1e-2 --lr-decay-style
    constant --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type
    alltoall --moe-router-load-balancing-type none --expert-model-parallel-size 2 --use-distributed-optimizer
    --attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --eval-iters 0
    --eval-interval 1000 --log-interval 1 --num-workers 0
"""


def main() -> None:
    """Runs pretrain_gpt.py with foremoe and without, without a pipeline and with one; ends with an error if losses differ."""
    parser = command_line(__doc__)
    parser.add_argument("--checkout", type=Path, required=True)
    args = parser.parse_args()
    if not (args.checkout / "pretrain_gpt.py").exists():
        print(f"megatron_lm: skipped, {args.checkout} is not a checkout of Megatron-LM")
        return
    columns = ("ranks", "pipeline stages", "iteration", "loss without", "with foremoe", "skew at home", "as served", "replicas")
    lines = [
        "# Megatron-LM's pretrain_gpt.py with foremoe attached",
        "",
        f"On CPU ranks over gloo: {hardware()}. Options: `{' '.join(TINY.split())}`.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
    ]
    faults = []
    for pp in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            arms = [_run(args.checkout, pp, Path(folder, f"{arm}.json"), arm) for arm in ("alone", "planned")]
        for i, (alone, planned, figures) in enumerate(zip(arms[0][0], *arms[1], strict=True)):
            lines.append(
                f"| {2 * pp} | {pp} | {i + 1} | {alone:.6f} | {planned:.6f} | {figures['skew_before']:.3f} "
                f"| {figures['skew_served']:.3f} | {figures['replicas']:.0f} |"
            )
            if abs(alone - planned) > 1e-4 or not figures["replicas"] or figures["drift"]:
                faults.append(lines[-1])
    emit("\n".join(lines) + "\n", args.out)
    if faults:
        sys.exit("\n".join(["losses differ, or nothing was replicated, or routing was not as planned:", *faults]))


def _run(checkout: Path, pp: int, out: Path, arm: str) -> tuple[list[float], list[dict[str, float]]]:
    """Losses and foremoe's metrics of each iteration, of the last rank."""
    path = os.pathsep.join(map(str, (checkout.resolve(), ROOT, ROOT / "tests" / "megatron")))
    # Megatron-LM compiles its data set index by whatever is called python3 and, which virtual environments lack, python3-config.
    programs = os.pathsep.join([str(Path(sys.executable).parent), str(Path(sys.base_prefix, "bin")), os.environ["PATH"]])
    environ = os.environ | {"PATH": programs, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(2 * pp),
        __file__,
        arm,
        str(out),
        str(checkout),
    ]
    options = [*TINY.split(), "--pipeline-model-parallel-size", str(pp)]
    done = subprocess.run([*launch, *options], env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pretrain_gpt.py failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    losses, metrics = json.loads(out.read_text())
    return losses, metrics


def _rank(arm: str, out: str, checkout: str) -> None:
    """One rank of pretrain_gpt.py."""
    import cpu  # type: ignore[import-not-found]  # tests/megatron
    import torch

    cpu.run_on_cpu()
    if importlib.util.find_spec("triton") is None:  # kernels that do not run here are compiled by it
        sys.modules |= {"triton": MagicMock(), "triton.language": MagicMock()}
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.training import initialize, training

    from foremoe.integrations.megatron import attach, forward_backward
    from foremoe.problem.cost import CostModel

    attached: list[Any] = []
    losses, metrics = [], []

    def attach_to(model: Any) -> Any:
        attached.append(attach(model, cost=CostModel(objective="balance")))
        return attached[0]

    def routing_of(call: dict[str, Any]) -> list[Any] | None:
        """Finds out what the routers will choose, by a forward pass over the same micro-batches."""
        if arm == "alone" or call.get("forward_only"):
            return None
        source = call["data_iterator"]
        batches = None if source is None else [next(source) for _ in range(call["num_microbatches"])]
        call["data_iterator"] = None if batches is None else iter(batches)
        routers = [module for chunk in call["model"] for module in chunk.modules() if isinstance(module, TopKRouter)]
        found: dict[Any, list[Any]] = {router: [] for router in routers}
        hooks = [router.register_forward_hook(lambda router, _, out: found[router].append(out[1])) for router in routers]
        with torch.no_grad():
            again = {"data_iterator": None if batches is None else iter(batches), "forward_only": True}
            get_forward_backward_func()(**call | again)
        for hook in hooks:
            hook.remove()
        layers = [[routing_TE.nonzero()[:, 1].view(-1, router.topk) for routing_TE in maps] for router, maps in found.items()]
        return [torch.stack(of_one, dim=1).numpy() for of_one in zip(*layers, strict=True)]

    run = forward_backward(attach_to, routing_of, replay=False)

    def taken_down(**call: Any) -> Any:
        found = run(**call)
        if found:
            parts = [part["lm loss"].tolist() for part in found]
            losses.append(sum(part[0] for part in parts) / sum(part[1] for part in parts))
            metrics.append(attached[0].metrics() if attached else {})
        return found

    training.get_forward_backward_func = lambda: taken_down
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    initialize.fused_kernels.load = lambda args: None
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    sys.argv = [str(Path(checkout, "pretrain_gpt.py")), *sys.argv[4:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
    if dist.get_rank() == dist.get_world_size() - 1:
        Path(out).write_text(json.dumps([losses, metrics]))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("alone", "planned"):
        _rank(*sys.argv[1:4])
    else:
        main()
