"""Fits the constants of the presets to the fit rows of published figures. Check rows are not used.

    python -m bench.overheads [--out bench/results/overheads_HARDWARE_DATE.md]

Every constant is fitted to several rows and has one value for all GPUs, models and settings in these rows. The fit minimises the
mean square of the logarithm of predicted over published figure. The H100 runs in `OLDER`, most of them in FP8, were collected
before `published_rows.toml` existed. The simulator had already been run on them. Two fit rows of that file are H100 runs in FP8
at half the speed of the next release. No constant agrees with both these runs and their successors. The two rows are therefore
not used to determine a constant, and count as missed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench import published_parts, published_runs
from bench.output import command_line, emit, hardware
from bench.published_rows import Row, read_rows

# Published force-balanced H100 runs: NVIDIA Megatron Bridge, docs/performance-summary-archive.md.
_COMMON = {
    "cp": 1, "etp": 1, "sequence_length": 4096, "routing": "forced", "recompute": [], "graphs": [], "overlap": ["grad", "param"],
    "sharding": "optimizer",
}  # fmt: skip


def _older(model: str, release: str, precision: str, num_gpus: int, figure: float, **setting: Any) -> Row:
    s = _COMMON | setting | {"dp": num_gpus // (setting["tp"] * setting["pp"])}
    return Row(
        id=f"{model}-{num_gpus}h100-{precision.lower()}-{release}", kind="throughput", role="fit", model=model, gpu="H100",
        num_gpus=num_gpus, precision=precision, setting=s, figure=figure, unit="tokens/s/GPU", source="bridge",
        where="performance-summary-archive", read="printed", missing=("recipe", "dp_overlap"), seen=True,
        constant="fp8_hopper" if precision == "FP8" else "none",
    )  # fmt: skip


OLDER = (
    _older("qwen3-30b-a3b", "26.02.01", "FP8", 16, 9058, ep=8, tp=1, pp=2, vpp=12, micro_batch_size=1, global_batch_size=1024,
           dispatcher="hybridep"),
    _older("qwen3-30b-a3b", "26.04.01", "FP8", 16, 8960, ep=16, tp=1, pp=1, vpp=1, micro_batch_size=1, global_batch_size=1024,
           dispatcher="hybridep"),
    _older("qwen3-235b-a22b", "26.04.01", "FP8", 256, 1712, ep=32, tp=2, pp=8, vpp=4, micro_batch_size=1, global_batch_size=8192,
           dispatcher="alltoall", overlap=["grad", "param", "ep"]),
    _older("deepseek-v3", "25.09", "FP8", 1024, 1297, ep=64, tp=2, pp=8, vpp=4, micro_batch_size=1, global_batch_size=8192,
           dispatcher="hybridep", recompute=["mla_up_proj"]),
    _older("gpt-oss-120b", "26.04.01", "BF16", 64, 5824, ep=8, tp=1, pp=4, vpp=1, micro_batch_size=1, global_batch_size=1280,
           dispatcher="alltoall", recompute=["layernorm", "moe_act"]),
    _older("gpt-oss-120b", "25.11", "BF16", 64, 5630, ep=8, tp=1, pp=4, vpp=1, micro_batch_size=4, global_batch_size=512,
           dispatcher="alltoall", recompute=["layernorm", "moe_act"]),
)  # fmt: skip

NVLINK = {"H100": 450e9, "H800": 200e9, "A100": 300e9, "B200": 900e9, "GB200": 900e9}  # data sheets, one direction


class Constant(NamedTuple):
    """One constant: its rows, the fields of a `Cluster` that a value stands for, and the range that it is looked for in."""

    name: str
    rows: Callable[[Row], bool]
    express: Callable[[Row], float]
    changes: Callable[[Row, float], dict[str, float]]
    low: float
    high: float


def _share(field: str) -> Callable[[Row, float], dict[str, float]]:
    return lambda row, share: {field: share * NVLINK[row.gpu]}


def _plain(field: str) -> Callable[[Row, float], dict[str, float]]:
    return lambda row, value: {field: value}


def _of(constant: str) -> Callable[[Row], bool]:
    return lambda row: row.constant == constant


_RUN, _BYTES, _COPY = published_runs.throughput, published_parts.bandwidth, published_parts.copy_ms
CONSTANTS = (
    Constant("compute_efficiency", lambda r: r.kind == "gemm", published_parts.gemm, _plain("compute_efficiency"), 0.3, 1.0),
    Constant("exchange_bytes_per_s over NVLink", _of("exchange_kernel_v2"), _BYTES, _share("exchange_bytes_per_s"), 0.2, 1.0),
    Constant("plain_bytes_per_s over NVLink", _of("nccl_in_node_share"), _BYTES, _share("plain_bytes_per_s"), 0.2, 1.0),
    Constant("return_bytes_per_s over NVLink", _of("return_bandwidth"), _COPY, _share("return_bytes_per_s"), 0.05, 1.0),
    Constant("element_overhead_s, bf16", _of("bf16_overheads"), _RUN, _plain("element_overhead_s"), 1e-12, 1e-9),
    Constant("element_overhead_s, FP8 of Blackwell", _of("mxfp8_overheads"), _RUN, _plain("element_overhead_s"), 1e-12, 1e-9),
    Constant("element_overhead_s, FP8 of Hopper", _of("fp8_hopper"), _RUN, _plain("element_overhead_s"), 1e-12, 1e-9),
    Constant("launch_s", lambda r: r.constant == "host_seconds" and r.kind == "throughput", _RUN, _plain("launch_s"), 1e-6, 2e-4),
)  # fmt: skip


def fit_rows() -> list[Row]:
    """The fit rows of the file, and the older runs."""
    return [row for row in (*read_rows(), *OLDER) if row.role == "fit"]


def errors(constant: Constant, rows: Sequence[Row], value: float | None = None) -> np.ndarray:
    """Relative errors of a constant's rows, with the preset's value or another."""
    return np.array([constant.express(row) / row.figure - 1.0 for row in _with(constant, rows, value)])


def _with(constant: Constant, rows: Sequence[Row], value: float | None) -> list[Row]:
    if value is None:
        return list(rows)
    return [dataclasses.replace(row, setting={**row.setting, published_runs.TRIED: constant.changes(row, value)}) for row in rows]


def fitted(constant: Constant, rows: Sequence[Row]) -> float:
    """The value of least squares, by golden section on its logarithm."""
    golden = (np.sqrt(5.0) - 1.0) / 2.0
    low, high = np.log(constant.low), np.log(constant.high)

    def loss(x: float) -> float:
        return float((np.log1p(errors(constant, rows, float(np.exp(x)))) ** 2).sum())

    for _ in range(18):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return float(np.exp((low + high) / 2.0))


def report() -> str:
    """Markdown of every constant, its rows, and how well they are met by the fit and by the presets."""
    lines = ["| constant | rows | fitted | errors with it | errors with the presets |", "|" + " --- |" * 5]
    for constant in CONSTANTS:
        rows = [row for row in fit_rows() if constant.rows(row)]
        value = fitted(constant, rows)
        cells = (" ".join(f"{error:+.0%}" for error in errors(constant, rows, v)) for v in (value, None))
        lines.append(f"| {constant.name} | {', '.join(row.id for row in rows)} | {value:.3g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    options = command_line(__doc__).parse_args()
    emit(f"# Constants of the presets\n\n{hardware()}\n\n{report()}\n", options.out)


if __name__ == "__main__":
    main()
