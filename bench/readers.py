"""Rollout routing into counts: CPU seconds and extra memory of every encoding; prints markdown.

    python -m bench.readers [ENCODING ...] [--tokens 1048576] [--out bench/results/readers_HARDWARE_DATE.md]

One core, 48 layers, top-8 of 128 experts, sequences of 2,048 tokens dealt to 16 micro-steps and 64 source ranks. Memory is what
the process needs at its peak beyond the payload and the imports. Every encoding runs in a process of its own.
"""

from __future__ import annotations

import base64
import io
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.output import command_line, emit, hardware
from bench.packing import markdown
from foremoe.base.arrays import Array
from foremoe.routing.readers.sequences import Routed
from foremoe.workload import count_workload, from_routed_experts

# Letters: T tokens, L layers, K top-k.

NUM_LAYERS, NUM_EXPERTS, NUM_TOPK = 48, 128, 8
LENGTH, MICRO_STEPS, RANKS = 2048, 16, 64
# Nested lists take 8 bytes per pair and more in Python itself; a sixteenth is enough to see their rate.
LIST_SHARE = 16


def _npy(rows_TLK: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, rows_TLK)
    return buffer.getvalue()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _torch(rows_TLK: Array) -> Any:
    import torch

    return torch.from_numpy(rows_TLK)


def _dict(rows_TLK: Array) -> dict[str, Any]:
    return {"data": _base64(rows_TLK.tobytes()), "shape": list(rows_TLK.shape), "start": 0, "dtype": str(rows_TLK.dtype)}


def _split(rows_TLK: Array) -> Routed:
    cut = LENGTH // 4
    return Routed(data=rows_TLK[cut:].copy(), prompt=rows_TLK[:cut].copy(), prompt_length=cut, length=LENGTH)


ENCODINGS: dict[str, tuple[str, Callable[[Array], Any]]] = {
    "uint8 numpy": ("uint8", lambda rows: rows),
    "int16 numpy": ("int16", lambda rows: rows),
    "int32 numpy": ("int32", lambda rows: rows),
    "int64 numpy": ("int64", lambda rows: rows),
    "uint8 torch": ("uint8", _torch),
    "uint8 numpy, not contiguous": ("uint8", lambda rows: np.asfortranarray(rows)),
    "int16 numpy, prompt and response apart (vLLM)": ("int16", _split),
    "uint8 base64 with shape (prime-rl)": ("uint8", _dict),
    "int32 base64 (SGLang)": ("int32", lambda rows: _base64(rows.tobytes())),
    "int32 base64 of npy (vLLM)": ("int32", lambda rows: _base64(_npy(rows))),
    "nested lists (JSON)": ("int64", lambda rows: rows.tolist()),
    "uint8 numpy, into a trace": ("uint8", lambda rows: rows),
}


def payloads(name: str, num_tokens: int) -> list[Any]:
    """Sequences of distinct experts in an encoding, each with memory of its own."""
    dtype, encode = ENCODINGS[name]
    scores = np.random.default_rng(0).random((LENGTH, NUM_LAYERS, NUM_EXPERTS), np.float32)
    block_TLK = np.argpartition(scores, NUM_TOPK, axis=2)[:, :, :NUM_TOPK].astype(dtype)
    del scores
    return [encode(np.roll(block_TLK, q, axis=0)) for q in range(max(num_tokens // LENGTH, 1))]


def _memory(key: str) -> int:
    """Bytes of a figure of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _measure(name: str, num_tokens: int, send: Any) -> None:
    """Counts once to load the kernels, then once by the clock."""
    options: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_topk": NUM_TOPK, "num_layers": NUM_LAYERS}

    def read(items: list[Any]) -> int:
        if "trace" in name:
            return from_routed_experts(items, **options)[1].num_unknown_tokens
        q = np.arange(len(items))
        places: dict[str, Any] = {
            "micro_step_Q": q * MICRO_STEPS // len(items),
            "rank_Q": q % RANKS,
            "num_micro_steps": MICRO_STEPS,
        }
        work, report = count_workload(items, num_ranks=RANKS, **places, **options)
        assert int(work.load_MLE.sum(dtype=np.int64)) == NUM_TOPK * NUM_LAYERS * report.num_tokens
        return report.num_unknown_tokens

    items = payloads(name, num_tokens)
    read(items[:1])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    held = _memory("VmRSS")
    began = time.process_time()
    unknown = read(items)
    seconds = time.process_time() - began
    assert unknown == 0
    send.send((seconds, _memory("VmHWM") - held))


def measured(name: str, num_tokens: int) -> tuple[float, int]:
    """CPU seconds and bytes beyond the payload."""
    spawn = multiprocessing.get_context("spawn")
    receive, send = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_measure, args=(name, num_tokens, send))
    process.start()
    send.close()
    try:
        found: tuple[float, int] = receive.recv()
    except EOFError:
        raise SystemExit(f"{name}: the process ended without a figure, with code {process.exitcode}") from None
    finally:
        process.join()
    return found


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("encodings", nargs="*", metavar="ENCODING", help=f"default: all of {', '.join(ENCODINGS)}")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="tokens of the step; default 1,048,576")
    args = parser.parse_args()
    wrong = [name for name in args.encodings if name not in ENCODINGS]
    if wrong:
        parser.error(f"there is no encoding {', '.join(wrong)}; choose from {', '.join(ENCODINGS)}")
    rows = []
    for name in args.encodings or ENCODINGS:
        num_tokens = args.tokens // LIST_SHARE if "lists" in name else args.tokens
        num_tokens = max(num_tokens // LENGTH, 1) * LENGTH
        seconds, extra = measured(name, num_tokens)
        rows.append([name, f"{num_tokens:,}", f"{seconds:.2f}", f"{seconds * 1e6 / num_tokens:.2f}", f"{extra / 1e6:.0f}"])
        print(", ".join(rows[-1]), file=sys.stderr, flush=True)
    text = (
        f"# Rollout routing into counts\n\nMeasured on: {hardware()}. Command: `python -m bench.readers`. {NUM_LAYERS} layers,"
        f" top-{NUM_TOPK} of {NUM_EXPERTS} experts, sequences of {LENGTH} tokens into counts of {MICRO_STEPS} micro-steps and"
        f" {RANKS} ranks. CPU seconds of one core, after the kernels are loaded; memory beyond the payload, counts included.\n\n"
        + markdown(("encoding", "tokens", "CPU s", "us per token", "extra MB"), rows)
        + "\n"
    )
    emit(text, args.out)


if __name__ == "__main__":
    main()
