"""Measures copies of home experts into slots: bandwidth from the host, page locking, and overlap of copies with compute."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.measure import DEVICE, DRY, REPEATS, median_s, table
from foremoe.distributed.group import ThreadGroup
from foremoe.transfer.base import HOST, Copy, Entry, TransferBackend
from foremoe.transfer.cupy_peer import CupyPeer
from foremoe.transfer.pinned_host import PinnedHost

NUM_EXPERTS = 8  # pulled by one handle
# Elements of one expert's matrices (gate and up, down) in bf16: hidden 2048 x ffn 768, and hidden 7168 x ffn 2048.
EXPERTS = (
    {"64 KB": (20_000, 12_000)} if DRY else {"9.4 MB": (2 * 2048 * 768, 2048 * 768), "88 MB": (2 * 7168 * 2048, 7168 * 2048)}
)
GEMM_SIDE = 256 if DRY else 8192


class Experts:
    """Buffers of the only rank: home experts of layer 0, and a slot for each."""

    num_buffers = NUM_EXPERTS

    def __init__(self, sizes: tuple[int, ...]) -> None:
        def experts() -> list[list[torch.Tensor]]:
            return [[torch.randn(n, device=DEVICE).bfloat16() for n in sizes] for _ in range(NUM_EXPERTS)]

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
        begin_s = time.perf_counter()
        backend.publish([Entry(0, e, 0, 0) for e in range(NUM_EXPERTS)], 1)
        backend.finish()
        self.publish_s = time.perf_counter() - begin_s

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


def bandwidth() -> None:
    """Host to device: the store, a plain page-locked tensor, a pageable one; one after the other."""
    rows = []
    for name, sizes in EXPERTS.items():
        buffers = Experts(sizes)
        dst = torch.empty(buffers.num_bytes, dtype=torch.uint8, device=DEVICE)
        pageable = torch.zeros(buffers.num_bytes, dtype=torch.uint8)
        pinned = pageable if DRY else pageable.pin_memory()
        with Puller(PinnedHost(), buffers) as puller:
            arms: dict[str, Callable[[], Any]] = {
                "store": puller.pull,
                "pinned": partial(dst.copy_, pinned, non_blocking=True),
                "pageable": partial(dst.copy_, pageable),
            }
            rate = {arm: buffers.num_bytes / 1e9 / s for arm, s in median_s(arms).items()}
            puller.check()
            publish_s = puller.publish_s / buffers.num_bytes * 2**30
        ratio = rate["store"] / rate["pinned"]
        rows.append(
            f"{name} | {rate['store']:.1f} | {rate['pinned']:.1f} | {ratio:.3f} | {rate['pageable']:.1f} | {publish_s:.2f}"
        )
    print(f"{NUM_EXPERTS} experts per handle; medians of {REPEATS} repeats, arms in turns.\n")
    head = "expert | pinned_host GB/s | pinned tensor GB/s | ratio | pageable tensor GB/s | first publish, s per GiB"
    table(f"{head} (page lock and filling)", *rows)


def overlap(make: Callable[[], TransferBackend]) -> None:
    """Matrix products alone, copies alone, and both: how much of the shorter one disappears."""
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE, device=DEVICE).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    gemm_s = median_s({"gemm": lambda: torch.mm(a, b, out=out)})["gemm"]
    rows = []
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
        rows.append(f"{name} | {times} | {hidden:.0%}")
    print(f"\n{make.__name__} beside products of {GEMM_SIDE} x {GEMM_SIDE} matrices in bf16.\n")
    table("expert | GEMMs ms | copies ms | both ms | hidden", *rows)


def main() -> int:
    """Prints a table each."""
    bandwidth()
    overlap(PinnedHost)
    if not DRY:
        overlap(CupyPeer)  # inside one GPU, so both compete for its memory
    return 0


if __name__ == "__main__":
    sys.exit(main())
