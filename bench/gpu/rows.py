"""Counts the operations and host reads in the slot path of a layer, and times its steps `remap`, `counts` and `route`."""

from __future__ import annotations

import sys

import torch

from bench.gpu.measure import DEVICE, counts, median_s, table
from foremoe.distributed.group import ThreadGroup
from foremoe.runtime.dispatch import Route, exchange_counts
from foremoe.runtime.remap import DenseIntervals, Intervals, remap, remap_dense, remap_dense_planned, remap_planned
from foremoe.runtime.replay import ReplayedRows

# Letters: T tokens, K top-k, E experts, P physical slots.

T, K, E, NUM_SLOTS = 8192, 8, 128, 129


def main() -> int:
    """Prints one line a step; a group of one rank, so that no message is in it."""
    generator = torch.Generator().manual_seed(0)
    topk_TK = torch.rand(T, E, generator=generator).topk(K).indices.to(DEVICE)
    routing_TE = torch.zeros(T, E, dtype=torch.bool, device=DEVICE).scatter_(1, topk_TK, True)
    expert_P = torch.arange(NUM_SLOTS, device=DEVICE) % E
    split_P = torch.cat([routing_TE.sum(0), torch.zeros(NUM_SLOTS - E, dtype=torch.int64, device=DEVICE)])
    split_P[E] = split_P[0] // 2  # a replica of expert 0
    split_P[0] -= split_P[E]
    home_E, (group,) = torch.arange(E, device=DEVICE), ThreadGroup.of(1)
    sparse, dense = Intervals.of(split_P, expert_P, home_E), DenseIntervals.of(split_P, expert_P, home_E)
    slot_TK, _ = remap(topk_TK, split_P, expert_P, home_E)
    told = exchange_counts(slot_TK.reshape(-1), NUM_SLOTS, group, True)
    split_MLP, expert_MLGS = split_P.cpu().numpy()[None, None], expert_P.cpu().numpy()[None, None, None]
    known = ReplayedRows({(0, 0): topk_TK}, expert_MLGS, split_MLP, split_MLP[None], num_experts=E, group=group, device=DEVICE)

    def found() -> Route:
        slot_TK, _ = remap_planned(topk_TK, sparse)
        return Route.of(slot_TK, exchange_counts(slot_TK.reshape(-1), NUM_SLOTS, group, True))

    def known_route() -> None:
        row = known.route(0, 0, topk_TK.shape)
        assert row is not None
        known.compare(0, 0, (topk_TK != row[0]).sum())

    arms = {
        "slot path of a layer: remap, counts, route": found,
        "the same where routing is known (`begin(routing=)`)": known_route,
        "`remap_planned` (runtime)": lambda: remap_planned(topk_TK, sparse),
        "`remap_dense_planned` (Megatron)": lambda: remap_dense_planned(routing_TE, dense),
        "`remap`, with what a stage does once": lambda: remap(topk_TK, split_P, expert_P, home_E),
        "`remap_dense`, the same": lambda: remap_dense(routing_TE, split_P, expert_P, home_E),
        "`exchange_counts`": lambda: exchange_counts(slot_TK.reshape(-1), NUM_SLOTS, group, True),
        "`Route.of`": lambda: Route.of(slot_TK, told),
        "`cumsum(0)` over [T, E], as it must not be": lambda: routing_TE.cumsum(0),
        "the same transposed": lambda: routing_TE.t().contiguous().cumsum(1),
    }
    seconds = median_s(arms)
    rows = [f"{name} | {' | '.join(map(str, counts(run)))} | {seconds[name] * 1e6:.0f}" for name, run in arms.items()]
    print(f"{T} tokens, top-{K}, {E} experts, {NUM_SLOTS} slots on one rank; views are not counted.\n")
    table("step | operations | host reads | us", *rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
