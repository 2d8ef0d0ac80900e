"""Time of the price of a row: of one change of one expert, evaluated and taken back, and of the whole.

    python -m bench.price_speed [--out bench/results/price-speed_HARDWARE_DATE.md]

One thread, the least of several runs. Beside the whole price stands the closed form, timed in turn with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import foremoe
from bench.output import command_line, emit, hardware
from foremoe.base.compiled import kernel
from foremoe.base.parallel import row_runner
from foremoe.machine.cluster import DISPATCHES
from foremoe.problem.estimate import estimate_rows
from foremoe.problem.kernels.row_price import Windows, fill_traffic, move_pairs, row_seconds
from foremoe.problem.kernels.traffic import settle
from foremoe.problem.pricing import problem_rows
from foremoe.problem.rows import empty_of, row_of

MOVES, TIMES = 20_000, 5


@kernel
def try_moves(num, rows, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """Evaluates `num` random changes of the first row, and takes each back; the sum of their seconds."""
    (G, _), E = expert_GS.shape, rows.counts.load_NE.shape[1]
    t, pairs_G, w = empty_of(rows), np.empty(G), rows.window_N3[0]
    row, windows = row_of(rows, 0, pairs_G), Windows(w[0], w[1], w[2])
    fill_traffic(expert_GS, quota_GS, rows.num_base, row, t)
    total, done, x = 0.0, 0, np.uint64(88172645463325252)
    while done < num:
        x ^= x << np.uint64(13)
        x ^= x >> np.uint64(7)
        x ^= x << np.uint64(17)
        e, dst = np.int64(x >> np.uint64(40)) % E, np.int64(x >> np.uint64(30)) % G
        src = t.holder_EG[e, np.int64(x >> np.uint64(20)) % t.num_E[e]]
        pairs = t.quota_EG[e, src]
        if src == dst or pairs == 0:
            continue
        pairs = np.int64(1) + np.int64(x >> np.uint64(10)) % pairs
        move_pairs(e, src, dst, pairs, row, t)
        settle(row, t)
        total += row_seconds(rows.prices, windows, row, t).compute_s
        move_pairs(e, dst, src, pairs, row, t)
        settle(row, t)
        done += 1
    return total


def least_us(work: Callable[[], object], num: int) -> float:
    """Microseconds for one of `num`, the least of several runs; the first, which may compile, is not counted."""
    work()
    spent = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin)
    return min(spent) / num * 1e6


def line(dispatch: str, num_ranks: int) -> str:
    """One row of the table."""
    work = foremoe.synthetic_workload(
        "qwen3-30b-a3b", num_ranks=num_ranks, tokens_per_rank=4096, micro_steps=4, num_layers=24, regime="mid", seed=0
    )
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks, dispatch=dispatch), redundant=1)
    plan, _ = foremoe.Planner().plan(problem)
    placed, rows = foremoe.Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS), problem_rows(problem)
    with row_runner(1):
        move_us = least_us(lambda: try_moves(MOVES, rows, placed.expert_NGS[0], placed.quotas_NGS[0]), MOVES)
        whole_us = least_us(lambda: foremoe.price(problem, placed), problem.N)
        closed_us = least_us(lambda: estimate_rows(problem, placed), problem.N)
    return f"| {dispatch} | EP{num_ranks} | {move_us:.2f} | {whole_us:.1f} | {closed_us:.1f} |"


def main() -> None:
    """Command line."""
    args = command_line(__doc__).parse_args()
    lines = [
        "# Time of the price of a row", "", f"{hardware()}. Microseconds, one thread, least of {TIMES} runs.", "",
        "| dispatch | ranks | a change, evaluated and taken back | whole price of a row | closed form of a row |",
        "| --- | --- | ---: | ---: | ---: |", *(line(dispatch, size) for dispatch in DISPATCHES for size in (16, 64)), "",
    ]  # fmt: skip
    emit("\n".join(lines), args.out)


if __name__ == "__main__":
    main()
