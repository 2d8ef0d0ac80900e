"""Compares a layer in bf16 that has a replica with the dense layer in float64, forward and backward.

Each check runs two micro-steps, with known and with counted routes. With known routes, torch raises an error if the layer
synchronises with the device. Memory that torch will allocate is filled with NaN beforehand, so that values which are never
written are detected.
"""

from __future__ import annotations

import sys

import torch

from bench.gpu.layer import Dense, Layer, Sizes
from bench.gpu.measure import DEVICE, DRY, table
from foremoe.runtime.dispatch import Route

# Rounding to bf16 errs by 2^-9 at most, 0.11 % on average over a norm; three to five such roundings lie on the way of a value.
BOUND = 8e-3
SMALL = "--small" in sys.argv  # for compute-sanitizer

CASES = {
    "2 + 1 slots": Sizes(300, 2, 2, 256, 128),
    "2 + 1 slots with many pairs": Sizes(8192, 2, 2, 256, 128),
    "16 + 1 slots": Sizes(256, 4, 16, 512, 256),
    "64 + 1 slots, one empty": Sizes(200, 8, 64, 256, 128, empty=True),
    "one pair": Sizes(1, 1, 4, 64, 32),
    "widths without alignment": Sizes(77, 2, 4, 36, 20),
    "ffn size above a kernel's block": Sizes(40, 2, 4, 64, 1500),
    "qwen3-30b-a3b at EP8": Sizes(8192, 8, 16, 2048, 768),
}


def poison(num_bytes: int) -> None:
    """Leaves memory full of NaN for whoever allocates next."""
    torch.full((num_bytes // 4,), float("nan"), device=DEVICE)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm; infinity for NaN."""
    difference = float((found.to(expected.device, torch.float64) - expected).norm() / expected.norm().clamp_min(1e-30))
    return difference if difference == difference else float("inf")


def run_case(name: str, sizes: Sizes, known: bool) -> tuple[str, float, bool]:
    """A row of the table, the largest difference, and whether a synchronisation was seen."""
    layer = Layer(sizes)
    large = sizes.tokens > 1000
    dense = Dense(layer, DEVICE if large else torch.device("cpu"))
    for grads in layer.rank.grads_S:
        for grad in grads:
            grad.zero_()
    worst, alarm = [0.0] * 3, ""
    for m in range(2):
        x_TH, weight_TK = layer.tokens(m)
        route: Route = layer.route(m) if known else layer.counted_route(layer.topk[m].to(DEVICE))
        poison(2**30 if large else 2**24)
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("error" if known else "default")
        try:
            found = layer.step(x_TH, weight_TK, route)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            alarm = str(error)
            torch.cuda.set_sync_debug_mode("default")
            found = layer.step(x_TH, weight_TK, route)
        finally:
            if DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        expected = dense.step(x_TH, weight_TK, layer.topk[m], found[0])
        worst = [max(a, apart(*pair)) for a, pair in zip(worst, zip(found, expected, strict=True), strict=True)]
    weights = 0.0
    for e, exact in enumerate(dense.weights_E):
        slots = [e, sizes.experts] if e == 0 else [e]
        for i, weight in enumerate(exact):
            total = torch.stack([layer.rank.grads_S[s][i] for s in slots]).double().sum(0).view(weight.shape)
            if weight.grad is None or not weight.grad.any():
                weights = max(weights, float(total.abs().max()))
            else:
                weights = max(weights, apart(total, weight.grad))
    shown = " | ".join(f"{value:.1e}" for value in (*worst, weights))
    stated = "" if not known else (f"ALARM: {alarm[:80]}" if alarm else "none")
    return f"{name} | {'known' if known else 'counted'} | {shown} | {stated}", max(*worst, weights), bool(alarm)


def main() -> int:
    """Prints a row for each case and kind of route."""
    rows, good = list[str](), True
    torch.manual_seed(0)
    for name, sizes in CASES.items():
        if sizes.tokens > 1000 and (DRY or SMALL):
            continue
        for known in (True, False):
            row, largest, alarm = run_case(name, sizes, known)
            good &= largest < BOUND and not alarm
            rows.append(row)
    print(f"Norm of the difference over the norm; the bound is {BOUND:g}.\n")
    table("case | route | output | gradient of x | of probabilities | of weights | synchronisations", *rows)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
