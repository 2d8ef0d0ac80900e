"""Row kernels against the rules they follow, written plainly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foremoe.solvers.rows import Placed
from foremoe.solvers.search.copies import Copies, Rule
from foremoe.solvers.search.prune import FAILURES, prune_row
from foremoe.solvers.search.settle import Wants, _by_node, nothing_wanted, settle_on
from foremoe.solvers.split.flow import split_row

# Letters: G ranks, S slots per rank, E experts, X places.


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_ranks_by_node_are_counted_as_they_are_sorted(node_G):
    node_G = np.array(node_G, np.int32)
    num_nodes = int(node_G.max()) + 1
    rank_G, first_X = np.empty(node_G.size, np.int64), np.empty(num_nodes + 1, np.int64)
    _by_node(node_G, rank_G, first_X, np.empty(num_nodes, np.int64))
    assert rank_G.tolist() == np.argsort(node_G, kind="stable").tolist()
    assert first_X.tolist() == np.searchsorted(np.sort(node_G), np.arange(num_nodes + 1)).tolist()


@st.composite
def rows(draw):
    """``(node_G, num_base, load_XE of every rank, expert_GS, quota_GS)``: a row at home, ties and empty experts included."""
    num_ranks, num_base, redundant = draw(st.integers(2, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    named = draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    E = num_ranks * num_base
    load_GE = rng.integers(0, draw(st.sampled_from([2, 4, 30])), (num_ranks, E)) * rng.choice([0, 1, 1, 1, 9], E)
    expert_GS = np.full((num_ranks, num_base + redundant), -1, np.int16)
    expert_GS[:, :num_base] = rng.permutation(E).reshape(num_ranks, num_base)
    quota_GS = np.where(expert_GS >= 0, load_GE.sum(axis=0)[expert_GS], 0).astype(np.int32)
    return np.unique(named, return_inverse=True)[1].astype(np.int32), num_base, load_GE.astype(np.int32), expert_GS, quota_GS


class Ranks:
    """A row as plain numbers: what is left at home, what replicas hold, and copies out of every home so far."""

    def __init__(self, node_G, num_base, expert_GS, quota_GS, limits):
        self.ranks, self.redundant = range(len(node_G)), expert_GS.shape[1] - num_base
        self.node, self.near_limit, self.far_limit = node_G.tolist(), *limits
        self.base = expert_GS[:, :num_base].tolist()
        self.left = {int(expert_GS[g, b]): int(quota_GS[g, b]) for g in self.ranks for b in range(num_base)}
        self.held = [{} for _ in self.ranks]
        self.copies = {(g, near): 0 for g in self.ranks for near in (True, False)}

    def load(self, g):
        return sum(self.left[e] for e in self.base[g]) + sum(self.held[g].values())

    def free(self, g):
        return self.redundant - len(self.held[g])

    def may(self, g, r):
        near = self.node[g] == self.node[r]
        return self.copies[g, near] < (self.near_limit if near else self.far_limit)

    def give(self, g, e, r, amount):
        if e not in self.held[r]:
            self.copies[g, self.node[g] == self.node[r]] += 1
        self.held[r][e] = self.held[r].get(e, 0) + amount
        self.left[e] -= amount

    def require(self, num_base, expert_GS, quota_GS, load_G):
        for g in self.ranks:
            slots = zip(expert_GS[g, num_base:].tolist(), quota_GS[g, num_base:].tolist(), strict=True)
            assert {e: quota for e, quota in slots if e >= 0} == self.held[g]
            assert quota_GS[g, :num_base].tolist() == [self.left[e] for e in self.base[g]]
            assert load_G[g] == self.load(g)


def no_copies(limits, num_ranks):
    """The limits, and no copies so far."""
    return Copies(*limits, np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64))


def settle_by_hand(target, row, relay, node_only, weight):
    """The rule of `settle_on` without `wants`."""
    barred, top = set(), lambda g: max(row.left[e] for e in row.base[g])
    while True:
        givers = [g for g in row.ranks if row.load(g) > target]
        takers = [r for r in row.ranks if row.load(r) < target and row.free(r) > 0 and r not in barred]
        if not givers or not takers:
            return
        r = min(takers, key=lambda r: (row.load(r), r))
        need = target - row.load(r)
        options, reach = [], 0
        for g in givers:
            near = row.node[g] == row.node[r]
            if (node_only and not near) or not row.may(g, r) or top(g) == 0:
                continue
            over = row.load(g) - target
            can = top(g) if row.free(g) else min(top(g), over)
            tier = 1 + (row.free(g) > 0) + 2 * near if can >= need else 0
            options.append((tier, (over if tier else can) * weight[g], -g))
            reach = reach if near else max(reach, top(g))
        if not options:
            barred.add(r)
            continue
        tier, _, g = max(options)
        g = -g
        mates = [
            m for m in takers
            if m != r and row.node[m] == row.node[r] and row.may(m, r)
            and top(m) >= need and need + target - row.load(m) <= reach
        ]  # fmt: skip
        if relay and tier < 3 and mates:
            g, tier = max(mates, key=lambda m: (row.load(m), -m)), 1
        if tier:
            e = min((e for e in row.base[g] if row.left[e] >= need), key=lambda e: row.left[e])
        else:
            e = max(row.base[g], key=lambda e: row.left[e])
        amount = min(need, row.left[e]) if row.free(g) else min(need, row.left[e], row.load(g) - target)
        row.give(g, e, r, amount)


LIMITS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(rows(), st.integers(0, 5), st.booleans(), LIMITS, st.booleans(), st.integers(0, 99))
def test_settling_follows_the_rule_written_plainly(drawn, above, relay, limits, node_only, seed):
    node_G, num_base, _, expert_GS, quota_GS = drawn
    load_G = quota_GS.sum(axis=1, dtype=np.int64)
    target = -(-int(load_G.sum()) // load_G.size) + above
    weight_G = np.random.default_rng(seed).choice([1.0, 0.5, 1.5], load_G.size)
    row = Ranks(node_G, num_base, expert_GS, quota_GS, limits)
    settle_by_hand(target, row, relay, node_only, weight_G.tolist())
    rule, placed = Rule(node_G, num_base, node_only, relay, False, weight_G), Placed(expert_GS, quota_GS, load_G)
    settle_on(target, rule, no_copies(limits, load_G.size), nothing_wanted(), placed)
    row.require(num_base, expert_GS, quota_GS, load_G)


def nearest_by_hand(target, row, place, want):
    """The rule of `settle_on` with `wants`; `want[x][e]` is what place x still asks of expert e."""
    givers, barred = [g for g in row.ranks if row.load(g) > target], set()
    while True:
        takers = [r for r in row.ranks if row.load(r) < target and row.free(r) > 0 and r not in barred]
        if not givers or not takers:
            return
        r = min(takers, key=lambda r: (row.load(r), r))
        x, need = place[r], target - row.load(r)
        over = {g: row.load(g) - target for g in givers}

        def gain(e, home, x=x, need=need):
            if place[home] == x:
                return 0
            fetched = want[place[home]][e] - row.left[e] + need
            return min(need, max(0, want[x][e])) - max(0, min(need, fetched))

        alone = [
            (-gain(e, g), g) for g in givers for e in row.base[g]
            if row.may(g, r) and row.left[e] >= need and (row.free(g) or over[g] >= need)
        ]  # fmt: skip
        part = [
            (-(top if row.free(g) else min(top, over[g])), g) for g in givers
            if row.may(g, r) and (top := max(row.left[e] for e in row.base[g])) > 0
        ]  # fmt: skip
        if not alone and not part:
            barred.add(r)
            continue
        g = min(alone or part)[1]
        if alone:
            fits = [e for e in row.base[g] if row.left[e] >= need]
            e = min(fits, key=lambda e: (-gain(e, g, need=need), row.left[e]))
        else:
            e = max(row.base[g], key=lambda e: row.left[e])
        amount = min(need, row.left[e]) if row.free(g) else min(need, row.left[e], over[g])
        row.give(g, e, r, amount)
        want[x][e] -= amount
        if row.load(g) <= target:  # the last giver takes its place in the list
            givers[givers.index(g)] = givers[-1]
            givers.pop()


@given(rows(), st.integers(0, 6), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_settling_by_gain_follows_the_rule_written_plainly(drawn, above, limits):
    node_G, num_base, load_GE, expert_GS, quota_GS = drawn
    load_G = quota_GS.sum(axis=1, dtype=np.int64)
    target = -(-int(load_G.sum()) // load_G.size) + above
    place_G = node_G.astype(np.int64) if node_G.any() else np.arange(load_G.size)
    want_XE = np.stack([load_GE[place_G == x].sum(axis=0, dtype=np.int32) for x in range(place_G.max() + 1)])
    row = Ranks(node_G, num_base, expert_GS, quota_GS, limits)
    nearest_by_hand(target, row, place_G.tolist(), want_XE.tolist())
    rule, placed = Rule(node_G, num_base, False, False, True, np.ones(load_G.size)), Placed(expert_GS, quota_GS, load_G)
    settle_on(target, rule, no_copies(limits, load_G.size), Wants(place_G, want_XE), placed)
    row.require(num_base, expert_GS, quota_GS, load_G)


@given(rows(), st.integers(0, 40), st.integers(0, 99))
def test_pruning_tries_one_replica_after_the_other(drawn, above, seed):
    """As `prune_row` says, every try with an exact split of its own."""
    node_G, num_base, _, expert_GS, quota_GS = drawn
    load_E = np.zeros(node_G.size * num_base, np.int32)
    load_E[expert_GS[:, :num_base]] = quota_GS[:, :num_base]
    rng = np.random.default_rng(seed)
    for g, s in np.ndindex(node_G.size, expert_GS.shape[1] - num_base):
        e = load_E.argmax() if rng.random() < 0.5 else rng.integers(load_E.size)  # often one that others hold too
        home = tuple(np.argwhere(expert_GS[:, :num_base] == e)[0])
        if e not in expert_GS[g]:
            expert_GS[g, num_base + s], quota_GS[g, num_base + s] = e, rng.integers(quota_GS[home] + 1)
            quota_GS[home] -= quota_GS[g, num_base + s]
    load_G = quota_GS.sum(axis=1, dtype=np.int64)
    target = int(load_G.max()) + above
    mine = Placed(expert_GS.copy(), quota_GS.copy(), load_G.copy())
    prune_row(target, load_E, num_base, mine)

    G, slack = load_G.size, target * load_G.size - int(load_G.sum())
    held = expert_GS >= 0
    most_G = np.where(held, load_E[expert_GS], 0).sum(axis=1)
    untried = [
        (g, s) for g in range(G) for s in range(num_base, expert_GS.shape[1])
        if held[g, s] and target - (most_G[g] - load_E[expert_GS[g, s]]) <= slack
    ]  # fmt: skip
    failures = 0
    while failures < FAILURES and untried and slack >= G:
        g, s = min(untried, key=lambda at: (quota_GS[at], at))
        untried.remove((g, s))
        home = np.argwhere(expert_GS[:, :num_base] == expert_GS[g, s])[0]
        less = Placed(expert_GS.copy(), quota_GS.copy(), load_G.copy())
        less[1][tuple(home)] += quota_GS[g, s]
        less[0][g, s], less[1][g, s] = -1, 0
        less[2][:] = less[1].sum(axis=1)
        if split_row(target, target, num_base, less) >= 0:
            expert_GS, quota_GS, load_G = less
        else:
            failures += 1
    if slack >= G:
        expert_GS[:, num_base:][quota_GS[:, num_base:] == 0] = -1
    for one, other in zip(mine, (expert_GS, quota_GS, load_G), strict=True):
        np.testing.assert_array_equal(one, other)
