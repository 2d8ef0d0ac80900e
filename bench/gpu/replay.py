"""Replays the expert loads of every rank of a row on this GPU, one rank after the other, while the rank's replicas arrive.

The row would wait for the slowest of the measured ranks if each rank had its own GPU. The table also shows the predictions of the
cost model. One prediction uses the constants of the preset 8xh100. If `foremoe calibrate` ran before, another one uses the
constants that it fitted on this GPU.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import foremoe
from bench.gpu.calibrate import FILE
from bench.gpu.experts import Rank
from bench.gpu.measure import DEVICE, DRY, median_s, table
from foremoe.base.arrays import Array
from foremoe.planner.strategies import STRATEGIES
from foremoe.runtime.experts import Row, SwiGLU

# Letters: G ranks, S slots of a rank, Y pairs of a rank, H hidden size.

MODEL = "qwen3-30b-a3b"
NUM_RANKS, TOKENS, ROWS, REPEATS = 64, 8192, 3, 7
PLANS = Path(__file__).with_name("replay_plans.json")


def plan_rows() -> dict[str, Any]:
    """Quotas [rows, G, S] of each strategy: made on a CPU, so that no GPU waits for a planner."""
    work = foremoe.synthetic_workload(
        MODEL, num_ranks=NUM_RANKS, tokens_per_rank=TOKENS, micro_steps=1, num_layers=ROWS, regime="mid"
    )
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=NUM_RANKS), redundant=1)
    found: dict[str, Any] = {"base": problem.B, "sizes": [problem.model.hidden_size, problem.model.ffn_size]}
    for name in ("static", "foremoe"):
        plan = STRATEGIES[name].plan(problem)[0]
        found[name] = plan.quota_MLGS[0].tolist()
    return found


def predicted_s(cluster: foremoe.Cluster, quota_GS: Array) -> float:
    """Forward and backward of the slowest rank's experts by a cluster's constants."""
    model = foremoe.Model.preset(MODEL)
    gemm_G = quota_GS.sum(axis=1) * model.flops_per_pair / cluster.expert_flops_per_s
    busy_G = (quota_GS > 0).sum(axis=1)
    slots_G = busy_G * (cluster.slot_overhead_s + cluster.backward_slot_s)
    return float((gemm_G * (1.0 + cluster.backward_ratio) + slots_G).max())


def replay(rank: Rank, staged: list[torch.Tensor], quota_GS: Array, num_base: int) -> list[float]:
    """Seconds of forward and backward of every rank, with a copy from the host for every replica that it serves."""
    hidden, side = rank.shapes[0][0], None if DRY else torch.cuda.Stream()
    x_YH = torch.randn(int(quota_GS.sum(axis=1).max()), hidden, device=DEVICE).bfloat16()

    def run(row: Row) -> None:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        # The next row's replicas come while this one is computed, into slots of their own.
        for _ in range(sum(num > 0 for num in row.num_S[num_base:])):
            with torch.cuda.stream(side):
                for to, tensor in zip(rank.spare, staged, strict=True):
                    to.copy_(tensor, non_blocking=True)
        rank.step(x_YH[: sum(row.num_S)], row)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    rows = (rank.row(num_S, SwiGLU()) for num_S in quota_GS.tolist())
    return [median_s({"rank": partial(run, row)}, REPEATS, ahead=True)["rank"] for row in rows]


def main() -> int:
    """Prints the measured and the predicted straggler of each row, by strategy."""
    if "--write" in sys.argv:
        PLANS.write_text(json.dumps(plan_rows()) + "\n")
        return 0
    plans = json.loads(PLANS.read_text())
    base = plans.pop("base")
    sizes = (64, 32) if DRY else plans["sizes"]
    del plans["sizes"]
    quotas = {name: np.array(plan) // (1024 if DRY else 1) for name, plan in plans.items()}
    rank = Rank(sizes[0], sizes[1], quotas["static"].shape[2])
    staged = [torch.randn(*weight.shape).bfloat16() for weight in rank.spare]
    staged = staged if DRY else [tensor.pin_memory() for tensor in staged]
    print(f"{MODEL}, {NUM_RANKS} ranks, {TOKENS} tokens a rank, forward and backward in bf16; medians of {REPEATS}.\n")
    preset = foremoe.Cluster.preset("8xh100", num_ranks=NUM_RANKS)
    fitted = foremoe.Cluster.from_toml(FILE) if FILE.exists() else None
    head = "row | strategy | busiest rank, pairs | slowest rank ms | mean rank ms | fitted model, slowest ms | error"
    table(head + " | x static, measured | fitted model | preset 8xh100")
    for layer in range(1 if DRY else ROWS):
        even = np.full((1, base), int(quotas["static"][layer].sum()) // (NUM_RANKS * base))
        slowest, predicted = dict[str, float](), dict[str, list[float | None]]()
        for name, quota_GS in ({name: quota_LGS[layer] for name, quota_LGS in quotas.items()} | {"even": even}).items():
            times = replay(rank, staged, quota_GS, base)
            slowest[name] = max(times)
            model_s = [None if cluster is None else predicted_s(cluster, quota_GS) for cluster in (fitted, preset)]
            predicted[name] = model_s
            mean_ms, busiest = 1e3 * sum(times) / len(times), quota_GS.sum(axis=1).max()
            cells = [layer, name, busiest, f"{1e3 * slowest[name]:.2f}", f"{mean_ms:.2f}"]
            cells += ["-", "-"] if model_s[0] is None else [f"{1e3 * model_s[0]:.2f}", f"{model_s[0] / slowest[name] - 1.0:+.1%}"]
            cells.append(f"{slowest['static'] / slowest[name]:.2f}")
            cells += [
                "-" if a is None or b is None else f"{b / a:.2f}" for a, b in zip(model_s, predicted["static"], strict=True)
            ]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
