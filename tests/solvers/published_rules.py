"""Rules of the published solvers, row by row as their descriptions state them: {(rank, expert): pairs}, or places of replicas."""

import numpy as np

# Letters: G ranks, S slots per rank, E experts, N rows.


def echo(load_of, base_GB, node_G, redundant):
    """(rank, expert) of every clone."""
    room, spill = {}, {}
    for node in set(node_G):
        ranks = [g for g in range(len(base_GB)) if node_G[g] == node]
        mean = -(-sum(load_of[e] for g in ranks for e in base_GB[g]) // len(ranks))
        for g in ranks:
            kept = 0
            for e in sorted(base_GB[g], key=lambda e: load_of[e]):
                spill[g, e] = load_of[e] - min(load_of[e], mean - kept)
                kept += load_of[e] - spill[g, e]
            room[g] = mean - sum(load_of[e] for e in base_GB[g])
    clones = []
    while any(spill.values()):
        home, e = max(spill, key=lambda place: spill[place])
        free = [
            g
            for g in room
            if node_G[g] == node_G[home] and room[g] > 0 and sum(rank == g for rank, _ in clones) < redundant
        ]  # fmt: skip
        fits = [g for g in free if room[g] >= spill[home, e]]
        if not free:
            spill[home, e] = 0
            continue
        to = min(fits, key=lambda g: (room[g], g)) if fits else min(free, key=lambda g: (-room[g], g))
        clones.append((to, e))
        amount = min(room[to], spill[home, e])
        room[to] -= amount
        spill[home, e] -= amount
    return clones


def lplb(problem):
    """expert_NGS of the fixed graph, with unused replicas too."""
    expert_NGS = problem.static().expert_NGS.copy()
    node_G = problem.cluster.node_of_rank_G
    for n, (load_E, base_GB) in enumerate(zip(problem.load_NE, problem.base_NGB, strict=True)):
        for g in range(problem.G):
            ring = [r for r in range(problem.G) if problem.replicas == "any" or node_G[r] == node_G[g]]
            for r in range(problem.R):
                other = ring[(ring.index(g) + 2**r) % len(ring)]
                hottest = max(base_GB[other], key=lambda e: load_E[e])
                if hottest not in expert_NGS[n, g]:
                    expert_NGS[n, g, problem.B + r] = hottest
    return expert_NGS


def least_loaded(load_of, base_GB, node_G, redundant, solver):
    ranks = range(len(base_GB))
    now, free = [sum(load_of[e] for e in base_B) for base_B in base_GB], [redundant] * len(base_GB)
    mean = sum(now) / len(now)
    pairs = {(g, e): load_of[e] for g in ranks for e in base_GB[g]}
    capacity = max(int(solver.alpha * (sum(now) // len(now))), 1)
    if max(now) >= solver.threshold * mean:
        for home, e in sorted(pairs, key=lambda place: (-load_of[place[1]], place[1])):
            spill = min(load_of[e], now[home] - capacity)
            while spill > 0:
                takers = [r for r in ranks if r != home and (free[r] or (r, e) in pairs) and node_G[r] == node_G[home]]
                taker = min(takers, key=lambda r: now[r], default=home)
                if now[taker] >= capacity:
                    break
                amount = min(spill, capacity - now[taker])
                amount = amount if amount >= solver.min_pairs else spill
                free[taker] -= (taker, e) not in pairs
                pairs[taker, e] = pairs.get((taker, e), 0) + amount
                pairs[home, e] -= amount
                now[home] -= amount
                now[taker] += amount
                spill -= amount
    return {place: amount for place, amount in pairs.items() if amount}


def quota_spill(target, load_of, base_GB, node_G, redundant, solver):
    """One threshold: ``(maximum, {(rank, expert): pairs})``."""
    ranks, floor = range(len(base_GB)), max(1, solver.min_pairs)
    start = [sum(load_of[e] for e in base_B) for base_B in base_GB]
    now, free = list(start), [redundant] * len(base_GB)
    pairs = {(g, e): load_of[e] for g in ranks for e in base_GB[g]}
    for giver in sorted((g for g in ranks if start[g] > target), key=lambda g: -start[g]):
        for e in sorted(base_GB[giver], key=lambda e: -load_of[e]):
            while now[giver] > target:
                want = min(max(now[giver] - target, floor), pairs[giver, e])
                takers = [r for r in ranks if start[r] < target and now[r] < target and free[r] and node_G[r] == node_G[giver]]
                if not takers:
                    break
                taker = max(takers, key=lambda r: target - now[r])
                amount = min(want, target - now[taker])
                if amount < floor:
                    break
                pairs[taker, e], free[taker] = amount, free[taker] - 1
                pairs[giver, e] -= amount
                now[giver] -= amount
                now[taker] += amount
    return max(now), {place: amount for place, amount in pairs.items() if amount}


def quota(load_of, base_GB, node_G, redundant, solver):
    low = -(-sum(load_of.values()) // len(base_GB))
    high = max(sum(load_of[e] for e in base_B) for base_B in base_GB)
    best, pairs = quota_spill(high, load_of, base_GB, node_G, redundant, solver)
    while low < high:
        target = (low + high) // 2
        reached, found = quota_spill(target, load_of, base_GB, node_G, redundant, solver)
        if reached < best:
            best, pairs = reached, found
        if reached > target:
            low = target + 1
        high = min(high, best)
    return pairs


def feplb(load_of, base_GB, node_G, redundant, solver):
    pairs = {(g, e): load_of[e] for g, base_B in enumerate(base_GB) for e in base_B}
    for node in set(node_G):
        ranks = [g for g in range(len(base_GB)) if node_G[g] == node]
        taken = dict.fromkeys(ranks, 0)
        while True:
            now = {g: sum(amount for (rank, _), amount in pairs.items() if rank == g) for g in ranks}
            giver = max(ranks, key=lambda g: now[g])
            takers = [g for g in ranks if g != giver and taken[g] < min(solver.dyn, redundant)]
            if not takers:
                break
            to = min(takers, key=lambda g: now[g])
            dynamic_X = base_GB[giver][: solver.dyn]
            after = {e: max(now[giver] - pairs[giver, e], now[to] + pairs[giver, e]) for e in dynamic_X}
            best = min(after, key=lambda e: after[e], default=None)
            if best is None or after[best] >= now[giver]:
                break
            pairs[to, best], pairs[giver, best] = pairs[giver, best], 0
            taken[to] += 1
    return {place: amount for place, amount in pairs.items() if amount}


def greedy(load_of, base_GB, node_G, redundant, solver):
    """Slots are lists, so that equal experts are tried in slot order."""
    ranks, num_base = range(len(base_GB)), len(base_GB[0])
    home = {e: g for g in ranks for e in base_GB[g]}
    slots = [[[e, load_of[e]] for e in base_B] + [[None, 0] for _ in range(redundant)] for base_B in base_GB]
    load = lambda g: sum(amount for _, amount in slots[g])  # noqa: E731

    def place_for(e, g):
        """Slot of rank g that can take pairs of e, or None."""
        held = [slot for slot in slots[g] if slot[0] == e]
        return (held + [slot for slot in slots[g][num_base:] if slot[0] is None] + [None])[0]

    def step():
        giver = max(ranks, key=load)
        for source in sorted(slots[giver], key=lambda slot: -slot[1]):
            if source[1] == 0:
                break
            e = source[0]
            takers = [
                r for r in ranks if load(giver) - load(r) >= 2 and node_G[r] == node_G[home[e]] and place_for(e, r) is not None
            ]
            if takers:
                taker = min(takers, key=load)
                amount = min((load(giver) - load(taker)) // 2, source[1])
                to = place_for(e, taker)
                to[0], to[1] = e, to[1] + amount
                source[1] -= amount
                if source[1] == 0 and source in slots[giver][num_base:]:
                    source[0] = None
                return True
        return False

    while step():
        pass
    return {(g, e): amount for g in ranks for e, amount in slots[g] if amount}


def rows(problem, row):
    """Runs a rule over all rows: ``row(load_of, base_GB, node_G, redundant)``, one node where replicas may lie anywhere."""
    node_G = problem.cluster.node_of_rank_G if problem.replicas == "node" else np.zeros(problem.G, int)
    out = []
    for load_E, base_GB in zip(problem.load_NE, problem.base_NGB, strict=True):
        load_of = {int(e): int(load_E[e]) for e in range(problem.E)}
        out.append(row(load_of, base_GB.tolist(), node_G.tolist(), problem.R))
    return out
