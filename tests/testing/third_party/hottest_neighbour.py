"""Solvers as a third party would write them: a per-row function, and a class with an option."""

from dataclasses import dataclass

from foremoe.solvers import RowSolver


def halve_hottest(load_E, node_G, num_base, options, expert_GS, quota_GS):
    load_G = quota_GS.sum(axis=1)
    giver, taker = load_G.argmax(), load_G.argmin()
    far = options.node_only and node_G[giver] != node_G[taker]
    if far or expert_GS[taker, num_base] >= 0:
        return
    best = quota_GS[giver, :num_base].argmax()
    half = min(quota_GS[giver, best], load_G[giver] - load_G[taker]) // 2
    if half > 0 and not (expert_GS[taker] == expert_GS[giver, best]).any():
        expert_GS[taker, num_base] = expert_GS[giver, best]
        quota_GS[taker, num_base] = half
        quota_GS[giver, best] -= half


@dataclass(frozen=True)
class HottestNeighbour(RowSolver):
    min_pairs: int = 2

    @staticmethod
    def edit(load_E, node_G, num_base, options, expert_GS, quota_GS):
        if load_E.sum() >= options.min_pairs:
            for g in range(len(node_G)):
                giver = (g + 1) % len(node_G)
                if expert_GS[g, num_base] >= 0 or giver == g or (options.node_only and node_G[g] != node_G[giver]):
                    continue
                best = quota_GS[giver, :num_base].argmax()
                half = quota_GS[giver, best] // 2
                held = (expert_GS[g] == expert_GS[giver, best]).any()
                if half > 0 and not held and quota_GS[giver].sum() > quota_GS[g].sum() + half:
                    expert_GS[g, num_base] = expert_GS[giver, best]
                    quota_GS[g, num_base] = half
                    quota_GS[giver, best] -= half
