"""Slot by slot descent on the price of a row: for rows so small that every choice can be priced."""

from __future__ import annotations

import numpy as np

from foremoe.solvers.kernels.compiled import kernel
from foremoe.solvers.kernels.price import PAIR, demand_row, price_row

# Letters: G ranks, S slots per rank, E experts, V nodes, K rates, I amounts.


# Passes over all slots; what is left after so many is not worth their time.
SWEEPS = 6


@kernel
def _least_gain(rate_K, load_G):  # type: ignore[no-untyped-def]
    """Seconds that a change has to save: a hundred-thousandth of the row's balanced compute, far above rounding."""
    return 1e-5 * rate_K[PAIR] * load_G.sum() / load_G.size


@kernel
def _move(sign, e, amount, r, slot, home_E, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Moves pairs of an expert from its home into a slot, or back with sign -1."""
    h, b = home_E[e] // quota_GS.shape[1], home_E[e] % quota_GS.shape[1]
    quota_GS[h, b] -= sign * amount
    load_G[h] -= sign * amount
    quota_GS[r, slot] += sign * amount
    load_G[r] += sign * amount


@kernel
def descend(load_GE, demand_VE, node_G, node_only, num_base, rate_K, home_E, busy_G, start_s, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Gives one redundant slot after the other the expert and quota that make the row cheapest, until none changes; in place.

    Quotas tried: what the rank, or its node, asks of the expert; what levels the rank with the expert's home; what fills the rank
    to the mean, or brings the home down to it; all that is left at home.

    Returns:
        the price reached.
    """
    G, S = expert_GS.shape
    mean = load_G.sum() // G
    amount_I = np.empty(6, np.int64)
    best_s, changed = start_s, True
    least_s = _least_gain(rate_K, load_G)
    for _ in range(SWEEPS):
        if not changed:
            break
        changed = False
        for r in range(G):
            for slot in range(num_base, S):
                had, had_amount = expert_GS[r, slot], np.int64(quota_GS[r, slot])
                if had >= 0:
                    _move(-1, had, had_amount, r, slot, home_E, quota_GS, load_G)
                    expert_GS[r, slot] = -1
                found, found_amount, partner = np.int64(-1), np.int64(0), np.int64(-1)
                found_s = price_row(load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, expert_GS, quota_GS, load_G)
                for e in range(home_E.size):
                    h = home_E[e] // S
                    left = np.int64(quota_GS[h, home_E[e] % S])
                    if h == r or left == 0 or (node_only and node_G[h] != node_G[r]) or (expert_GS[r] == e).any():
                        continue
                    amount_I[:] = left
                    amount_I[1], amount_I[2], amount_I[3] = (load_G[h] - load_G[r]) // 2, mean - load_G[r], load_G[h] - mean
                    if load_GE.size > 0:
                        amount_I[4], amount_I[5] = load_GE[r, e], demand_VE[node_G[r], e]
                    expert_GS[r, slot] = e
                    for i in range(6 if load_GE.size > 0 else 4):
                        amount = min(amount_I[i], left)
                        if amount <= 0:
                            continue
                        _move(1, e, amount, r, slot, home_E, quota_GS, load_G)
                        this_s = price_row(
                            load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, expert_GS, quota_GS, load_G
                        )  # fmt: skip
                        if this_s < found_s:
                            found, found_amount, found_s, partner = np.int64(e), amount, this_s, np.int64(-1)
                        # The rank takes more than it should? A replica of one of its own experts elsewhere may take as much.
                        for p in range(G * S):
                            f = expert_GS[p // S, p % S]
                            if p % S < num_base or f < 0 or f == e or home_E[f] // S != r:
                                continue
                            if quota_GS[r, home_E[f] % S] < amount:
                                continue
                            _move(1, f, amount, p // S, p % S, home_E, quota_GS, load_G)
                            this_s = price_row(
                                load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, expert_GS, quota_GS, load_G
                            )  # fmt: skip
                            _move(-1, f, amount, p // S, p % S, home_E, quota_GS, load_G)
                            if this_s < found_s:
                                found, found_amount, found_s, partner = np.int64(e), amount, this_s, np.int64(p)
                        _move(-1, e, amount, r, slot, home_E, quota_GS, load_G)
                    expert_GS[r, slot] = -1
                if found_s < best_s - least_s:
                    best_s, changed = found_s, True
                    if found >= 0:
                        expert_GS[r, slot] = found
                        _move(1, found, found_amount, r, slot, home_E, quota_GS, load_G)
                        if partner >= 0:
                            q, t = partner // S, partner % S
                            _move(1, expert_GS[q, t], found_amount, q, t, home_E, quota_GS, load_G)
                elif had >= 0:
                    expert_GS[r, slot] = had
                    _move(1, had, had_amount, r, slot, home_E, quota_GS, load_G)
    return best_s


@kernel
def trade(load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, start_s, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Changes the quotas of two redundant slots together as long as that makes the row cheaper; in place.

    One quota alone unbalances two ranks; a second change can bring them back. Tried: what brings either slot to what its rank or
    its node asks, what empties it, and what empties its home, with the other slot taking as much, or as much less.

    Returns:
        the price reached.
    """
    G, S = expert_GS.shape
    num = (S - num_base) * G
    amount_I = np.zeros(8, np.int64)
    best_s, changed = start_s, True
    least_s = _least_gain(rate_K, load_G)
    for _ in range(SWEEPS):
        if not changed:
            break
        changed = False
        for i in range(num):
            r, s = i // (S - num_base), num_base + i % (S - num_base)
            if expert_GS[r, s] < 0:
                continue
            for j in range(num):
                q, t = j // (S - num_base), num_base + j % (S - num_base)
                if j == i or expert_GS[q, t] < 0 or expert_GS[q, t] == expert_GS[r, s]:
                    continue
                e, f = expert_GS[r, s], expert_GS[q, t]
                left_e = np.int64(quota_GS[home_E[e] // S, home_E[e] % S])
                left_f = np.int64(quota_GS[home_E[f] // S, home_E[f] % S])
                had_e, had_f = np.int64(quota_GS[r, s]), np.int64(quota_GS[q, t])
                amount_I[:] = 0
                amount_I[0], amount_I[1], amount_I[2], amount_I[3] = left_e, -had_e, left_f, -had_f
                if load_GE.size > 0:
                    amount_I[4], amount_I[5] = load_GE[r, e] - had_e, demand_VE[node_G[r], e] - had_e
                    amount_I[6], amount_I[7] = load_GE[q, f] - had_f, demand_VE[node_G[q], f] - had_f
                for amount in amount_I:
                    for sign in (1, -1):
                        # What both slots and both homes can take of it.
                        other = min(max(sign * min(max(amount, -had_e), left_e), -had_f), left_f)
                        more = sign * other
                        # A slot that gives all it has stays, with one pair: emptying it is for `descend`.
                        if more == 0 or had_e + more < 1 or had_f + other < 1:
                            continue
                        _move(1, e, more, r, s, home_E, quota_GS, load_G)
                        _move(1, f, other, q, t, home_E, quota_GS, load_G)
                        this_s = price_row(
                            load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, expert_GS, quota_GS, load_G
                        )  # fmt: skip
                        if this_s < best_s - least_s:
                            best_s, changed = this_s, True
                            had_e, had_f = np.int64(quota_GS[r, s]), np.int64(quota_GS[q, t])
                            left_e, left_f = left_e - more, left_f - other
                        else:
                            _move(-1, e, more, r, s, home_E, quota_GS, load_G)
                            _move(-1, f, other, q, t, home_E, quota_GS, load_G)
    return best_s


@kernel
def improve(load_GE, demand_VE, node_G, node_only, num_base, rate_K, home_E, busy_G, start_s, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """`descend` and `trade` in turn until neither helps; in place. Returns the price reached."""
    best_s = start_s
    for _ in range(SWEEPS):
        before_s = best_s
        best_s = descend(
            load_GE, demand_VE, node_G, node_only, num_base, rate_K, home_E, busy_G, best_s, expert_GS, quota_GS, load_G
        )  # fmt: skip
        best_s = trade(load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, best_s, expert_GS, quota_GS, load_G)
        if best_s > before_s - _least_gain(rate_K, load_G):
            break
    return best_s


@kernel
def polish_row(  # type: ignore[no-untyped-def]
    rounds, load_GE, demand_VE, node_G, node_only, num_base, rate_K, home_E, busy_G, expert_GS, quota_GS, load_G
):
    """`improve` from the placement, from bare homes, and from the best one with some slots emptied at random; the best stays."""
    best_s = price_row(load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, expert_GS, quota_GS, load_G)
    best_s = improve(
        load_GE, demand_VE, node_G, node_only, num_base, rate_K, home_E, busy_G, best_s, expert_GS, quota_GS, load_G
    )  # fmt: skip
    G, S = expert_GS.shape
    try_expert_GS, try_quota_GS, try_load_G = expert_GS.copy(), quota_GS.copy(), load_G.copy()
    state = np.uint64(88172645463325252)
    for t in range(rounds):
        try_expert_GS[:], try_quota_GS[:], try_load_G[:] = expert_GS, quota_GS, load_G
        for r in range(G):
            for s in range(num_base, S):
                state ^= state << np.uint64(13)
                state ^= state >> np.uint64(7)
                state ^= state << np.uint64(17)
                if try_expert_GS[r, s] >= 0 and (t == 0 or state % np.uint64(8) < np.uint64(1 + t % 5)):
                    _move(-1, try_expert_GS[r, s], np.int64(try_quota_GS[r, s]), r, s, home_E, try_quota_GS, try_load_G)
                    try_expert_GS[r, s] = -1
        this_s = price_row(
            load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, try_expert_GS, try_quota_GS, try_load_G
        )  # fmt: skip
        this_s = improve(
            load_GE, demand_VE, node_G, node_only, num_base, rate_K, home_E, busy_G, this_s, try_expert_GS, try_quota_GS,
            try_load_G,
        )  # fmt: skip
        if this_s < best_s:
            best_s = this_s
            expert_GS[:], quota_GS[:], load_G[:] = try_expert_GS, try_quota_GS, try_load_G
    return best_s


@kernel
def polish_rows(  # type: ignore[no-untyped-def]
    low, high, rounds, load_NE, load_NGE, located, node_G, node_only, num_base, rate_NK, expert_NGS, quota_NGS
):
    """`polish_row` for rows [low, high)."""
    G, S = expert_NGS.shape[1], expert_NGS.shape[2]
    home_E, busy_G = np.empty(load_NE.shape[1], np.int64), np.empty(G, np.int64)
    none_GE, none_VE = np.empty((0, 0), np.int32), np.empty((0, 0), np.int64)
    for n in range(low, high):
        load_G = np.zeros(G, np.int64)
        busy_G[:] = 0
        for g in range(G):
            for s in range(S):
                load_G[g] += quota_NGS[n, g, s]
                if s < num_base:
                    home_E[expert_NGS[n, g, s]] = g * S + s
                    busy_G[g] += load_NE[n, expert_NGS[n, g, s]] > 0
        load_GE, demand_VE = none_GE, none_VE
        if located:
            load_GE, demand_VE = load_NGE[n], np.empty((node_G.max() + 1, load_NE.shape[1]), np.int64)
            demand_row(load_GE, node_G, demand_VE)
        polish_row(
            rounds, load_GE, demand_VE, node_G, node_only, num_base, rate_NK[n], home_E, busy_G, expert_NGS[n], quota_NGS[n],
            load_G,
        )  # fmt: skip
