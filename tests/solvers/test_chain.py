"""Chain: its kernels against plain references, its laws, and how near it comes to the least possible maximum."""

import dataclasses
import itertools
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_util import make_problem, placed_rows, problems, require_split, require_valid

from foremoe.cluster import Cluster
from foremoe.cost import CostModel
from foremoe.errors import InputError
from foremoe.parallel import row_runner
from foremoe.parsing import parse
from foremoe.problem import Problem
from foremoe.solvers import Greedy, LeastLoaded, Lplb, NodeChain, Quota, Static
from foremoe.solvers.chain import Chain, rates_of
from foremoe.solvers.kernels.bound import bound_row
from foremoe.solvers.kernels.chain import chain_rows
from foremoe.solvers.kernels.flow import split_row
from foremoe.solvers.kernels.price import demand_row, price_row
from foremoe.solvers.kernels.prune import prune_row
from foremoe.solvers.kernels.settle import settle_row
from foremoe.synthetic import synthetic_workload
from foremoe.testing import placements

BALANCE = CostModel(objective="balance")
MANY = 2**31


def balance(problem):
    return dataclasses.replace(problem, cost=BALANCE)


def row_of(problem):
    """The first row's static ``(expert_GS, quota_GS, load_G)``, to be changed."""
    static = problem.static()
    return static.expert_NGS[0].copy(), static.quotas_NGS[0].copy(), static.load_NG()[0].copy()


def replicas(problem, expert_GS):
    """(home rank, rank) of every replica."""
    G, S = expert_GS.shape
    home = {int(expert_GS[g, b]): g for g in range(G) for b in range(problem.B)}
    return [(home[int(expert_GS[g, s])], g) for g in range(G) for s in range(problem.B, S) if expert_GS[g, s] >= 0]


def crossing(problem, placement):
    node_G = problem.cluster.node_of_rank_G
    return sum(node_G[home] != node_G[g] for expert_GS in placement.expert_NGS for home, g in replicas(problem, expert_GS))


# --- the exact split


def split_reaches(target, load_E, expert_GS):
    """Whether some split keeps every rank at `target`: a maximum flow by augmenting paths."""
    holders = {e: [g for g in range(len(expert_GS)) if e in expert_GS[g]] for e in range(len(load_E))}
    sent = {}
    used = [0] * len(expert_GS)

    def push(e, amount, seen):
        for g in holders[e]:
            if g in seen:
                continue
            seen.add(g)
            room = min(amount, target - used[g])
            if room > 0:
                sent[e, g] = sent.get((e, g), 0) + room
                used[g] += room
                return room
            for other in range(len(load_E)):
                held = sent.get((other, g), 0)
                if held > 0 and other != e:
                    moved = push(other, min(amount, held), seen)
                    if moved:
                        sent[other, g] -= moved
                        sent[e, g] = sent.get((e, g), 0) + moved
                        return moved
        return 0

    for e in range(len(load_E)):
        left = int(load_E[e])
        while left > 0:
            moved = push(e, left, set())
            if moved == 0:
                return False
            left -= moved
    return True


def least_maximum(load_E, expert_GS):
    low, high = 0, int(load_E.sum(dtype=np.int64))
    while low < high:
        middle = (low + high) // 2
        if split_reaches(middle, load_E, expert_GS):
            high = middle
        else:
            low = middle + 1
    return low


@given(row=placed_rows(max_ranks=4), seed=st.integers(0, 99))
def test_split_is_exact_from_any_quotas(row, seed):
    load_E, expert_GS = row
    rng = np.random.default_rng(seed)
    quota_GS = np.zeros(expert_GS.shape, np.int32)
    for e in range(len(load_E)):
        at = np.argwhere(expert_GS == e)
        quota_GS[tuple(at.T)] = rng.multinomial(load_E[e], rng.dirichlet(np.full(len(at), 0.5)))
    before_GS, load_G = quota_GS.copy(), quota_GS.sum(axis=1, dtype=np.int64)
    reached = split_row(0, MANY * 99, len(load_E), expert_GS, quota_GS, load_G)
    require_split(load_E, expert_GS, quota_GS)
    assert (load_G == quota_GS.sum(axis=1, dtype=np.int64)).all() and load_G.max() <= reached
    assert reached == least_maximum(load_E, expert_GS)
    if reached > 0:
        load_G = before_GS.sum(axis=1, dtype=np.int64)
        assert split_row(0, reached - 1, len(load_E), expert_GS, before_GS, load_G) == -1
        require_split(load_E, expert_GS, before_GS)


# --- settling


def settle_by_hand(target, relay, near_limit, far_limit, node_only, weight, node, base, quota, redundant):
    """The rule of `settle_row`: {(rank, expert): pairs} of replicas, and what is left at home is in `quota`."""
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
    expert_GS, quota_GS, load_G = row_of(problem)
    target = -(-int(load_G.sum()) // problem.G) + above
    weight_G, node_G = np.random.default_rng(seed).choice([1.0, 0.5, 1.5], problem.G), problem.cluster.node_of_rank_G
    base = expert_GS[:, : problem.B].tolist()
    quota = {e: int(problem.load_NE[0, e]) for e in range(problem.E)}
    held = settle_by_hand(target, relay, *limits, node_only, weight_G.tolist(), node_G.tolist(), base, quota, problem.R)
    settle_row(target, relay, *limits, node_only, weight_G, node_G, problem.B, expert_GS, quota_GS, load_G)
    require_split(problem.load_NE[0], expert_GS, quota_GS)
    assert (load_G == quota_GS.sum(axis=1, dtype=np.int64)).all()
    for g in range(problem.G):
        assert [int(quota_GS[g, b]) for b in range(problem.B)] == [quota[e] for e in base[g]]
        got = {int(e): int(q) for e, q in zip(expert_GS[g], quota_GS[g], strict=True) if e >= 0 and e not in base[g]}
        assert got == held[g]


# --- bound, pruning


def least_of_all(problem):
    """Least maximum over every choice of replicas of a one-slot row."""
    expert_GS, _, _ = row_of(problem)
    best, load_E = MANY * 99, problem.load_NE[0]
    home_quota_GS = row_of(problem)[1]
    choices = [[-1] + [e for e in range(problem.E) if e not in expert_GS[g]] for g in range(problem.G)]
    for choice in itertools.product(*choices):
        expert_GS[:, -1] = choice
        quota_GS = home_quota_GS.copy()
        best = min(best, split_row(0, MANY * 99, problem.E, expert_GS, quota_GS, quota_GS.sum(axis=1, dtype=np.int64)))
    return best, load_E


@settings(max_examples=30)
@given(load_E=st.lists(st.integers(0, 60), min_size=6, max_size=6), num_ranks=st.sampled_from((2, 3)))
def test_bound_is_below_every_choice_of_replicas(load_E, num_ranks):
    problem = balance(make_problem([[load_E]], np.zeros(num_ranks), 1))
    _, quota_GS, _ = row_of(problem)
    best, _ = least_of_all(problem)
    bound = bound_row(-(-sum(load_E) // num_ranks), np.ones(num_ranks, bool), problem.B, quota_GS)
    assert bound <= best
    assert best <= Chain().solve(problem, problem.static()).load_NG().max()


def test_reaches_the_optimum_of_small_rows():
    rng = np.random.default_rng(0)
    load_NE = rng.multinomial(600, rng.dirichlet(np.full(6, 0.7), 60)).astype(np.int32)
    missed = 0
    for load_E in load_NE:
        problem = balance(make_problem([[load_E]], [0, 0, 1], 1))
        missed += Chain().solve(problem, problem.static()).load_NG().max() > least_of_all(problem)[0]
    assert missed <= 3


@given(problem=problems(), above=st.integers(0, 30))
def test_pruning_keeps_the_target(problem, above):
    placement = Chain().solve(balance(problem), problem.static())
    expert_GS, quota_GS = placement.expert_NGS[0].copy(), placement.quotas_NGS[0].copy()
    load_G = quota_GS.sum(axis=1, dtype=np.int64)
    target = load_G.max() + above
    prune_row(target, problem.load_NE[0], 2, problem.B, expert_GS, quota_GS, load_G)
    assert (load_G == quota_GS.sum(axis=1, dtype=np.int64)).all() and load_G.max() <= target
    assert (expert_GS >= 0).sum() <= (placement.expert_NGS[0] >= 0).sum()
    require_split(problem.load_NE[0], expert_GS, quota_GS)


def test_pruning_drops_what_is_not_needed():
    expert_GS = np.array([[0, 1, -1], [2, 3, 0]], np.int16)
    quota_GS = np.array([[50, 10, 0], [20, 30, 10]], np.int32)
    load_G = quota_GS.sum(axis=1, dtype=np.int64)
    prune_row(70, np.array([60, 10, 20, 30], np.int32), 1, 2, expert_GS, quota_GS, load_G)
    assert expert_GS.tolist() == [[0, 1, -1], [2, 3, -1]] and load_G.tolist() == [70, 50]


# --- the solver


@given(st.data())
def test_valid_and_no_worse_than_the_start_on_maximum_load(data):
    problem = balance(data.draw(problems()))
    for start in (problem.static(), data.draw(placements(problem))):
        placement = Chain(tries=3).solve(problem, start)
        require_valid(problem, placement)
        assert (placement.load_NG().max(axis=1) <= start.load_NG().max(axis=1)).all()
        assert (placement.load_NG().max(axis=1) >= problem.cost.load_bound_N(problem)).all()
        if problem.replicas == "node":
            assert crossing(problem, placement) == 0


@given(st.data())
def test_costs_no_more_than_the_start(data):
    problem = data.draw(problems())
    problem = dataclasses.replace(problem, cost=CostModel(overlap=data.draw(st.sampled_from((0.0, 1.0)))))
    start = data.draw(placements(problem))
    placement = Chain(tries=2).solve(problem, start)
    require_valid(problem, placement)
    assert (problem.cost.objective_N(problem, placement) <= problem.cost.objective_N(problem, start)).all()


@given(problem=problems(), near=st.integers(1, 3), far=st.integers(1, 3), tries=st.integers(1, 6))
def test_limits_on_copies_hold(problem, near, far, tries):
    static, node_G = problem.static(), problem.cluster.node_of_rank_G
    expert_NGS, quota_NGS = static.expert_NGS.copy(), static.quotas_NGS.copy()
    params = np.array([problem.replicas == "node", tries, 0.6, 0.0, near, far, 1, 0], np.float64)
    chain_rows(0, problem.N, problem.load_NE, node_G, problem.B, params, expert_NGS, quota_NGS)
    for expert_GS in expert_NGS:
        out = replicas(problem, expert_GS)
        for g in range(problem.G):
            assert sum(home == g and node_G[to] == node_G[g] for home, to in out) <= near
            assert sum(home == g and node_G[to] != node_G[g] for home, to in out) <= far


def workload_problem(num_ranks, redundant=1, cost=BALANCE, tokens_per_rank=8192, model="qwen3-30b-a3b"):
    work = synthetic_workload(model, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, micro_steps=2, num_layers=12, seed=1)
    return Problem.of(work, Cluster.preset("8xh100", num_ranks=num_ranks), redundant=redundant, cost=cost)


def mean_skew(placement):
    load_NG = placement.load_NG()
    return float((load_NG.max(axis=1) / load_NG.mean(axis=1)).mean())


@pytest.mark.parametrize(
    ("num_ranks", "redundant", "most"),
    [(8, 1, 1.012), (16, 1, 1.004), (32, 1, 1.001), (64, 1, 1.0005), (8, 2, 1.001), (64, 2, 1.0005)],
)
def test_mid_loads_are_balanced(num_ranks, redundant, most):
    problem = workload_problem(num_ranks, redundant)
    placement = Chain().solve(problem, problem.static())
    assert mean_skew(problem.static()) > 1.3
    assert mean_skew(placement) <= most
    assert (placement.num_replicas_N(problem.B) < num_ranks * redundant).all()
    with row_runner(2):
        assert placement.same_as(Chain().solve(problem, problem.static()))


def test_relays_save_replicas_across_nodes():
    problem = workload_problem(32)
    relayed, plain = (Chain(relay=relay).solve(problem, problem.static()) for relay in (True, False))
    assert mean_skew(relayed) <= mean_skew(plain) + 1e-4
    assert crossing(problem, relayed) < 0.6 * crossing(problem, plain)


@given(st.data())
def test_inside_adds_no_replica_across_nodes(data):
    problem = balance(data.draw(problems()))
    start = data.draw(placements(problem))
    placement = Chain(inside=True, tries=3).solve(problem, start)
    require_valid(problem, placement)
    assert (placement.load_NG().max(axis=1) <= start.load_NG().max(axis=1)).all()
    node_G = problem.cluster.node_of_rank_G
    for before_GS, after_GS in zip(start.expert_NGS, placement.expert_NGS, strict=True):
        before, after = (
            {(home, to) for home, to in replicas(problem, expert_GS) if node_G[home] != node_G[to]}
            for expert_GS in (before_GS, after_GS)
        )
        assert after <= before


def test_few_replicas_across_nodes_then_inside():
    problem = workload_problem(64)
    few = Chain(inside=True).solve(problem, NodeChain(0.2).solve(problem, problem.static()))
    assert crossing(problem, few) <= 0.2 * 64 * problem.N and mean_skew(few) < 1.05


def test_slack_takes_fewer_replicas():
    problem = workload_problem(16)
    exact, loose = (Chain(slack=slack).solve(problem, problem.static()) for slack in (0.0, 0.1))
    assert loose.num_replicas_N(problem.B).sum() < 0.8 * exact.num_replicas_N(problem.B).sum()
    assert mean_skew(loose) <= 1.1001


def test_slack_takes_fewer_replicas_than_quota_at_less_skew():
    problem = workload_problem(64)
    loose, quota = (solver.solve(problem, problem.static()) for solver in (Chain(slack=0.05), Quota()))
    assert mean_skew(loose) < mean_skew(quota)
    assert loose.num_replicas_N(problem.B).sum() < quota.num_replicas_N(problem.B).sum()


def test_under_time_copies_that_show_are_few():
    problem = workload_problem(32, cost=CostModel(overlap=0.0), tokens_per_rank=2048, model="qwen3-235b-a22b")
    level = Chain().solve(dataclasses.replace(problem, cost=BALANCE), problem.static())
    timed = Chain().solve(problem, problem.static())
    level_s, timed_s = (problem.cost.objective_N(problem, placement).mean() for placement in (level, timed))
    assert timed_s < 0.9 * level_s and timed.num_replicas_N(problem.B).mean() < level.num_replicas_N(problem.B).mean()


def test_under_time_replicas_bring_tokens_nearer():
    problem = workload_problem(64, cost=CostModel())
    level = Chain().solve(dataclasses.replace(problem, cost=BALANCE), problem.static())
    timed = Chain().solve(problem, problem.static())
    level_s, timed_s = (problem.cost.rows(problem, placement).dispatch_s.sum() for placement in (level, timed))
    assert timed_s < 0.96 * level_s and mean_skew(timed) < 1.005


@given(st.data())
def test_the_price_of_a_row_is_the_cost_model(data):
    """Up to what is the same for all placements of a row."""
    problem = data.draw(problems())
    first, second = problem.static(), data.draw(placements(problem))
    cost_N = problem.cost.rows(problem, second).total_s - problem.cost.rows(problem, first).total_s
    scale_N = problem.cost.rows(problem, second).total_s + problem.cost.rows(problem, first).total_s
    price_N = price_of(problem, second) - price_of(problem, first)
    assert np.abs(price_N - cost_N).max() <= 1e-9 * scale_N.max()


def price_of(problem, placement):
    node_G, load_NGE = problem.cluster.node_of_rank_G, problem.load_NGE
    out = []
    for n in range(problem.N):
        load_GE, demand_VE = np.empty((0, 0), np.int32), np.empty((0, 0), np.int64)
        if load_NGE is not None:
            load_GE, demand_VE = load_NGE[n], np.empty((node_G.max() + 1, problem.E), np.int64)
            demand_row(load_GE, node_G, demand_VE)
        base_GB = problem.base_NGB[n].astype(np.int64)
        home_E = np.empty(problem.E, np.int64)
        home_E[base_GB] = np.arange(problem.G)[:, None] * problem.S + np.arange(problem.B)
        busy_G = (problem.load_NE[n][base_GB] > 0).sum(axis=1)
        quota_GS = placement.quotas_NGS[n]
        load_G = quota_GS.sum(axis=1, dtype=np.int64)
        rate_K = rates_of(problem)[n]
        out.append(
            price_row(load_GE, demand_VE, node_G, problem.B, rate_K, home_E, busy_G, placement.expert_NGS[n], quota_GS, load_G)
        )
    return np.array(out)


@given(problem=problems())
def test_under_time_polish_only_helps(problem):
    plain, polished = (Chain(polish=size).solve(problem, problem.static()) for size in (0, 128))
    require_valid(problem, polished)
    plain_N, polished_N = (problem.cost.objective_N(problem, placement) for placement in (plain, polished))
    assert (polished_N <= plain_N * (1 + 1e-12)).all()


@given(problem=problems())
def test_under_time_no_baseline_costs_less(problem):
    mine_N = problem.cost.objective_N(problem, Chain().solve(problem, problem.static()))
    for solver in (Static(), Quota(), LeastLoaded(min_pairs=0, threshold=1.0), Greedy(), Lplb()):
        theirs_N = problem.cost.objective_N(problem, solver.solve(problem, problem.static()))
        assert (mine_N <= theirs_N * (1 + 1e-12)).all(), solver


@pytest.mark.parametrize("tokens_per_rank", [256, 1024, 8192])
def test_being_allowed_to_leave_the_node_never_costs_time(tokens_per_rank):
    anywhere = workload_problem(16, cost=CostModel(), tokens_per_rank=tokens_per_rank, model="gpt-oss-20b")
    inside = dataclasses.replace(anywhere, replicas="node")
    any_s, node_s = (
        float(problem.cost.objective_N(problem, Chain().solve(problem, problem.static())).sum()) for problem in (anywhere, inside)
    )
    assert any_s <= node_s * (1 + 1e-9)


def test_a_chain_where_no_star_will_do():
    """Rank 2 lacks 60; only rank 0's expert covers that, and rank 1 fills rank 0 in turn."""
    problem = balance(make_problem([[[70, 20, 80, 90, 20, 20]]], [0, 0, 0], 1))
    placement = Chain().solve(problem, problem.static())
    assert placement.load_NG().tolist() == [[100, 100, 100]]


@pytest.mark.parametrize("node_G", ([0, 0], [0, 1]))
def test_small_and_empty_rows(node_G):
    problem = balance(make_problem([[[0, 0], [7, 0], [1, 1], [0, 1]]], node_G, 2))
    placement = Chain().solve(problem, problem.static())
    require_valid(problem, placement)
    assert placement.load_NG().max(axis=1).tolist() == [0, 4, 1, 1]
    assert placement.num_replicas_N(problem.B).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"tries": 0}, {"tries": 1.5}, {"tries": True}, {"spread": 2.0}, {"spread": float("nan")}, {"slack": -0.1}, {"relay": 1},
        {"inside": 1}, {"polish": -1}, {"portfolio": -1}, {"portfolio": 1.5}, {"portfolio": True},
    ],
)  # fmt: skip
def test_refuses_options_that_make_no_sense(options):
    with pytest.raises(InputError, match=f"needs {next(iter(options))}"):
        Chain(**options)


def test_reads_back_from_its_repr():
    chain = Chain(tries=4, portfolio=0, relay=False)
    assert parse(repr(chain)) == chain


@pytest.mark.shared
@pytest.mark.parametrize("name", ("gpt_oss_20b_decode", "esft_law"))
def test_recorded_routing_is_balanced(name):
    path = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "data" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"the recorded trace {path.name} is not here")
    with np.load(path, allow_pickle=False) as trace:
        topk_TLK, num_experts = trace["topk_ids"][:8192], int(trace["num_experts"])
    load_LE = np.array([np.bincount(topk_TLK[:, i].ravel(), minlength=num_experts) for i in range(topk_TLK.shape[1])])
    for num_ranks in (8, 16, 32):
        problem = balance(make_problem(load_LE[None], np.arange(num_ranks) // 8, 1))
        assert mean_skew(Chain().solve(problem, problem.static())) <= 1.004
