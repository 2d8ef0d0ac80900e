"""Kernels of Search against plain references: the exact split, settling, the bound."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from solver_util import balance, least_maximum, make_problem, placed_rows, problems, require_split

from foremoe.problem.kernels.load_bound import bound_row
from foremoe.solvers.rows import Placed
from foremoe.solvers.search.copies import Copies, Rule
from foremoe.solvers.search.search import Search
from foremoe.solvers.search.settle import nothing_wanted, settle_on
from foremoe.solvers.split.flow import link_slots, split_linked

MANY = 2**31


def split(limit, num_experts, expert_GS, quota_GS, load_G):
    """The exact split, whatever the homes."""
    return split_linked(0, limit, False, link_slots(num_experts, expert_GS), Placed(expert_GS, quota_GS, load_G))


def first_row(problem):
    """The first row's static `Placed`, to be changed."""
    static = problem.static()
    return Placed(static.expert_NGS[0].copy(), static.quotas_NGS[0].copy(), static.load_NG()[0].copy())


# --- the exact split


@given(row=placed_rows(max_ranks=4), seed=st.integers(0, 99))
def test_split_is_exact_from_any_quotas(row, seed):
    load_E, expert_GS = row
    rng = np.random.default_rng(seed)
    quota_GS = np.zeros(expert_GS.shape, np.int32)
    for e in range(len(load_E)):
        at = np.argwhere(expert_GS == e)
        quota_GS[tuple(at.T)] = rng.multinomial(load_E[e], rng.dirichlet(np.full(len(at), 0.5)))
    before_GS, load_G = quota_GS.copy(), quota_GS.sum(axis=1, dtype=np.int64)
    reached = split(MANY * 99, len(load_E), expert_GS, quota_GS, load_G)
    require_split(load_E, expert_GS, quota_GS)
    assert (load_G == quota_GS.sum(axis=1, dtype=np.int64)).all() and load_G.max() <= reached
    assert reached == least_maximum(load_E, expert_GS)
    if reached > 0:
        load_G = before_GS.sum(axis=1, dtype=np.int64)
        assert split(reached - 1, len(load_E), expert_GS, before_GS, load_G) == -1
        require_split(load_E, expert_GS, before_GS)


# --- settling


def settle_by_hand(target, relay, near_limit, far_limit, node_only, weight, node, base, quota, redundant):
    """The rule of `settle_on`: {(rank, expert): pairs} of replicas, and what is left at home is in `quota`."""
    ranks = range(len(base))
    held = {r: {} for r in ranks}
    copies = {(g, near): 0 for g in ranks for near in (True, False)}
    barred = set()
    load = lambda r: sum(quota[e] for e in base[r]) + sum(held[r].values())  # noqa: E731
    top = lambda r: max(quota[e] for e in base[r])  # noqa: E731
    free = lambda r: redundant - len(held[r])  # noqa: E731
    while True:
        givers = [g for g in ranks if load(g) > target]
        takers = [r for r in ranks if load(r) < target and free(r) > 0 and r not in barred]
        if not givers or not takers:
            return held
        r = min(takers, key=lambda r: (load(r), r))
        need = target - load(r)
        options, reach = [], 0
        for g in givers:
            near = node[g] == node[r]
            if (node_only and not near) or copies[g, near] >= (near_limit if near else far_limit) or top(g) == 0:
                continue
            over = load(g) - target
            can = top(g) if free(g) else min(top(g), over)
            tier = 1 + (free(g) > 0) + 2 * near if can >= need else 0
            options.append((tier, (over if tier else can) * weight[g], -g))
            reach = reach if near else max(reach, top(g))
        if not options:
            barred.add(r)
            continue
        tier, _, g = max(options)
        g = -g
        mates = [
            m for m in takers
            if m != r and node[m] == node[r] and copies[m, True] < near_limit
            and top(m) >= need and need + target - load(m) <= reach
        ]  # fmt: skip
        if relay and tier < 3 and mates:
            g, tier = max(mates, key=lambda m: (load(m), -m)), 1
        if tier:
            e = min((e for e in base[g] if quota[e] >= need), key=lambda e: quota[e])
        else:
            e = max(base[g], key=lambda e: quota[e])
        amount = min(need, quota[e]) if free(g) else min(need, quota[e], load(g) - target)
        if e not in held[r]:
            copies[g, node[g] == node[r]] += 1
        held[r][e] = held[r].get(e, 0) + amount
        quota[e] -= amount


@given(
    problem=problems(), above=st.integers(0, 5), relay=st.booleans(), limits=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    node_only=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_settling_follows_the_rule_written_plainly(problem, above, relay, limits, node_only, seed):
    placed = expert_GS, quota_GS, load_G = first_row(problem)
    target = -(-int(load_G.sum()) // problem.G) + above
    weight_G, node_G = np.random.default_rng(seed).choice([1.0, 0.5, 1.5], problem.G), problem.cluster.node_of_rank_G
    base = expert_GS[:, : problem.B].tolist()
    quota = {e: int(problem.load_NE[0, e]) for e in range(problem.E)}
    held = settle_by_hand(target, relay, *limits, node_only, weight_G.tolist(), node_G.tolist(), base, quota, problem.R)
    copies = Copies(*limits, np.zeros(problem.G, np.int64), np.zeros(problem.G, np.int64))
    rule = Rule(node_G, problem.B, node_only, relay, False, weight_G)
    settle_on(target, rule, copies, nothing_wanted(), placed)
    require_split(problem.load_NE[0], expert_GS, quota_GS)
    assert (load_G == quota_GS.sum(axis=1, dtype=np.int64)).all()
    for g in range(problem.G):
        assert [int(quota_GS[g, b]) for b in range(problem.B)] == [quota[e] for e in base[g]]
        got = {int(e): int(q) for e, q in zip(expert_GS[g], quota_GS[g], strict=True) if e >= 0 and e not in base[g]}
        assert got == held[g]


# --- the bound


def least_of_all(problem):
    """Least maximum over every choice of replicas of a one-slot row."""
    expert_GS, _, _ = first_row(problem)
    best, load_E = MANY * 99, problem.load_NE[0]
    home_quota_GS = first_row(problem).quota_GS
    choices = [[-1] + [e for e in range(problem.E) if e not in expert_GS[g]] for g in range(problem.G)]
    for choice in itertools.product(*choices):
        expert_GS[:, -1] = choice
        quota_GS = home_quota_GS.copy()
        best = min(best, split(MANY * 99, problem.E, expert_GS, quota_GS, quota_GS.sum(axis=1, dtype=np.int64)))
    return best, load_E


@examples(30)
@given(load_E=st.lists(st.integers(0, 60), min_size=6, max_size=6), num_ranks=st.sampled_from((2, 3)))
def test_bound_is_below_every_choice_of_replicas(load_E, num_ranks):
    problem = balance(make_problem([[load_E]], np.zeros(num_ranks), 1))
    _, quota_GS, _ = first_row(problem)
    best, _ = least_of_all(problem)
    bound = bound_row(-(-sum(load_E) // num_ranks), np.ones(num_ranks, bool), problem.B, quota_GS)
    assert bound <= best
    assert best <= Search().solve(problem, problem.static()).load_NG().max()


def test_reaches_the_optimum_of_small_rows():
    rng = np.random.default_rng(0)
    load_NE = rng.multinomial(600, rng.dirichlet(np.full(6, 0.7), 60)).astype(np.int32)
    missed = 0
    for load_E in load_NE:
        problem = balance(make_problem([[load_E]], [0, 0, 1], 1))
        missed += Search().solve(problem, problem.static()).load_NG().max() > least_of_all(problem)[0]
    assert missed <= 3
