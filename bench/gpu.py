"""What one GPU can show of the transfer backends: conformance, bandwidth to the host, overlap with compute, NCCL with one rank.

    python -m bench.gpu [--out bench/results/GPU_DATE.md]

Prints markdown; a result file names hardware, date and commit. Exit code 2 without a GPU, 1 if a part failed. On one GPU a peer
copy stays inside its memory, so its bandwidth says nothing about a link between GPUs, and is not shown.
"""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.output import command_line, emit
from foremoe.distributed.group import ThreadGroup, TorchGroup
from foremoe.transfer.base import HOST, Copy, Entry, TransferBackend
from foremoe.transfer.collective import Collective
from foremoe.transfer.cupy_peer import CupyPeer
from foremoe.transfer.pinned_host import PinnedHost

REPEATS, WARM_UP = 30, 5
NUM_EXPERTS = 8  # pulled by one handle
# Elements of one expert's matrices (gate and up, down) in bf16: hidden 2048 x ffn 768, and hidden 7168 x ffn 2048.
EXPERTS = {"9.4 MB": (2 * 2048 * 768, 2048 * 768), "88 MB": (2 * 7168 * 2048, 7168 * 2048)}
GEMM_SIDE = 8192
SUITES = {"pinned_host": "tests/transfer/test_pinned_host.py", "cupy_peer": "tests/transfer/test_cupy_peer.py"}


class Experts:
    """Buffers of the only rank: home experts of layer 0, and a slot for each."""

    num_buffers = NUM_EXPERTS

    def __init__(self, sizes: tuple[int, ...]) -> None:
        def experts() -> list[list[torch.Tensor]]:
            return [[torch.randn(n, device="cuda").bfloat16() for n in sizes] for _ in range(NUM_EXPERTS)]

        self.homes, self.slots = experts(), experts()
        self.num_bytes = NUM_EXPERTS * 2 * sum(sizes)

    def home(self, layer: int, expert: int) -> list[torch.Tensor]:
        """Weights of a home expert."""
        return self.homes[expert]

    def slot(self, buffer: int) -> list[torch.Tensor]:
        """Weights in a slot."""
        return self.slots[buffer]

    def main_grad(self, *_: int) -> list[torch.Tensor]:
        """There are no gradients."""
        raise NotImplementedError("only weights are copied")

    slot_grad = main_grad


class Puller:
    """A backend with one rank, which pulls all its experts into its slots."""

    def __init__(self, backend: TransferBackend, buffers: Experts) -> None:
        self.backend, self.buffers = backend, buffers
        self.copies = [Copy(e, 0, e, HOST, 0, None, buffers.slot(e)) for e in range(NUM_EXPERTS)]
        backend.open(0, ThreadGroup.of(1)[0], buffers)
        backend.publish([Entry(0, e, 0, 0) for e in range(NUM_EXPERTS)], 1)
        backend.finish()

    def __enter__(self) -> Puller:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()

    def pull(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Starts the copies, queues other work, waits for the copies."""
        handle = self.backend.start(self.copies)
        meanwhile()
        self.backend.wait(handle, 60.0)

    def check(self) -> None:
        """Compares slots with homes, bit for bit."""
        for home, slot in zip(self.buffers.homes, self.buffers.slots, strict=True):
            for a, b in zip(home, slot, strict=True):
                if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                    raise RuntimeError(f"{self.backend!r} brought wrong bytes.")


def median_s(arms: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds on the current stream, by arm: medians over repeats in which the arms take turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(WARM_UP + REPEATS):
        for name, run in arms.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if repeat >= WARM_UP:
                times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(of) for name, of in times.items()}


def bandwidth() -> str:
    """Host to device: the store, a plain page-locked tensor, a pageable one; one after the other."""
    lines = ["| expert | pinned_host GB/s | pinned tensor GB/s | ratio | pageable tensor GB/s |", "|" + " --- |" * 5]
    for name, sizes in EXPERTS.items():
        buffers = Experts(sizes)
        dst = torch.empty(buffers.num_bytes, dtype=torch.uint8, device="cuda")
        pageable = torch.zeros(buffers.num_bytes, dtype=torch.uint8)
        pinned = pageable.pin_memory()
        with Puller(PinnedHost(), buffers) as puller:
            arms: dict[str, Callable[[], Any]] = {
                "store": puller.pull,
                "pinned": partial(dst.copy_, pinned, non_blocking=True),
                "pageable": partial(dst.copy_, pageable),
            }
            rate = {arm: buffers.num_bytes / 1e9 / s for arm, s in median_s(arms).items()}
            puller.check()
        ratio = rate["store"] / rate["pinned"]
        lines.append(f"| {name} | {rate['store']:.1f} | {rate['pinned']:.1f} | {ratio:.3f} | {rate['pageable']:.1f} |")
    return "\n".join([f"{NUM_EXPERTS} experts per handle; medians of {REPEATS} repeats, arms in turns.", "", *lines])


def overlap(make: Callable[[], TransferBackend]) -> str:
    """Matrix products alone, copies alone, and both: how much of the shorter one disappears."""
    lines = ["| expert | GEMMs ms | copies ms | both ms | hidden |", "|" + " --- |" * 5]
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    gemm_s = median_s({"gemm": lambda: torch.mm(a, b, out=out)})["gemm"]
    for name, sizes in EXPERTS.items():
        with Puller(make(), Experts(sizes)) as puller:
            num = math.ceil(median_s({"copies": puller.pull})["copies"] / gemm_s)

            def gemms(num: int = num) -> None:
                for _ in range(num):
                    torch.mm(a, b, out=out)

            s = median_s({"gemms": gemms, "copies": puller.pull, "both": partial(puller.pull, gemms)})
            puller.check()
        hidden = (s["gemms"] + s["copies"] - s["both"]) / min(s["gemms"], s["copies"])
        times = " | ".join(f"{s[arm] * 1e3:.2f}" for arm in ("gemms", "copies", "both"))
        lines.append(f"| {name} | {times} | {hidden:.0%} |")
    return "\n".join([f"{NUM_EXPERTS} experts per handle; bf16, {GEMM_SIDE} x {GEMM_SIDE} matrices.", "", *lines])


def nccl() -> str:
    """One rank: the collective backend opens and closes with nothing to send, the group exchanges tokens."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            group = TorchGroup()
            backend = Collective()
            backend.open(0, group, Experts((1024,)))
            backend.wait(backend.start([]), 10.0)
            sent = torch.randn(64, 32, device="cuda").bfloat16()
            received = torch.zeros_like(sent)
            group.all_to_all(received, sent, [64], [64])
            if not torch.equal(received, sent):
                raise RuntimeError("all_to_all over NCCL brought wrong rows.")
            backend.close()
            group.close()
        finally:
            dist.destroy_process_group()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"NCCL {version}, one rank: `Collective` open, zero copies, close: passed. `TorchGroup.all_to_all` of 64 rows: passed."


def suite(path: str) -> str:
    """Runs a test file, which uses the GPU where there is one: ranks are two processes, or threads, on the same GPU."""
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-500:]]
    text = "\n".join(f"* {line}" for line in [lines[-1], *(x for x in lines if x.startswith(("SKIPPED", "FAILED", "ERROR")))])
    if done.returncode:
        raise RuntimeError(f"pytest ended with exit code {done.returncode}.\n\n{text}")
    if any(line.startswith("SKIPPED") and not line.endswith("-sided") for line in lines):
        raise RuntimeError(f"tests that belong here were skipped.\n\n{text}")
    return text


def environment() -> str:
    """One line on hardware and software, with date and commit."""
    try:
        import cupy

        cupy_version = cupy.__version__
    except ImportError:
        cupy_version = "not installed"
    query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]
    driver, generation, width = (_output(query).splitlines()[0] + ", ?, ?").split(", ")[:3]
    commit = _output(["git", "describe", "--always", "--exclude=*", "--dirty=+"])
    return (
        f"{torch.cuda.get_device_name()}, driver {driver}, PCIe generation {generation} x{width}; Python "
        f"{platform.python_version()}, torch {torch.__version__} (CUDA {torch.version.cuda}), cupy {cupy_version}; "
        f"{datetime.date.today().isoformat()}, commit {commit}"
    )


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    """Command line."""
    args = command_line(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA GPU and a torch that sees it, and there is none on this machine.", file=sys.stderr)
        return 2
    parts: dict[str, Callable[[], str]] = {f"Conformance of {name}": partial(suite, path) for name, path in SUITES.items()}
    parts |= {
        "Bandwidth, host to device": bandwidth,
        "Overlap of pinned_host with compute": partial(overlap, PinnedHost),
        "Overlap of cupy_peer with compute (inside one GPU, so both compete for its memory)": partial(overlap, CupyPeer),
        "NCCL with one rank": nccl,
    }
    sections, failed = [f"# Transfer backends on one GPU\n\nMeasured on: {environment()}. Command: `python -m bench.gpu`."], False
    for title, part in parts.items():
        print(f"{title} ...", file=sys.stderr, flush=True)
        try:
            text = part()
        except Exception as error:  # the other parts are worth having all the same
            text, failed = f"FAILED: {type(error).__name__}: {error}", True
        sections.append(f"## {title}\n\n{text}")
    result = "\n\n".join(sections) + "\n"
    emit(result, args.out)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
