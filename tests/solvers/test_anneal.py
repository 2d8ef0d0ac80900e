"""Anneal: its kernels against recounting, when homes change under balance, and how even nodes become."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import balance, make_problem, node_maps, problems

from foremoe.problem.cost import CostModel
from foremoe.solvers.home.anneal import Anneal
from foremoe.solvers.home.swaps import Cooling, anneal, domains_of, scaled, settle_inside, swap_effect


def value_by_hand(load_ME, rank_E, domain_G):
    """Largest domain load per rank, summed over micro-steps, over the mean rank load summed over micro-steps."""
    largest = 0.0
    for load_E in load_ME:
        load_G = np.bincount(rank_E, load_E, len(domain_G))
        largest += max(load_G[domain_G == v].mean() for v in set(domain_G.tolist()))
    return largest / (load_ME.sum() / len(domain_G))


@st.composite
def layers(draw):
    """``(load_ME, rank_E, node_G)`` with experts of up to six orders of magnitude."""
    num_ranks, base, M = draw(st.integers(2, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    node_G, E = draw(node_maps(num_ranks)), num_ranks * base
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load_ME = np.floor(10.0 ** rng.uniform(0, draw(st.sampled_from([1, 3, 6])), (M, E))) * (rng.random((M, E)) < 0.9)
    load_ME[0, 0] += 1
    return load_ME.astype(np.int64), rng.permutation(E) // base, node_G.astype(np.int64)


@given(layer=layers())
def test_the_value_is_that_of_recounting_and_scaled_loads_keep_it(layer):
    load_ME, rank_E, node_G = layer
    by_hand = value_by_hand(load_ME, rank_E, node_G)
    assert Anneal().value(load_ME, rank_E, node_G) == pytest.approx(by_hand, rel=1e-12)
    loads = scaled(load_ME, node_G)
    largest = domains_of(loads, node_G[rank_E]).first_M.sum()
    # Weights of nodes of unequal size are rounded to a 64th.
    sizes = np.bincount(node_G)
    assert largest / (loads.even * len(load_ME)) == pytest.approx(by_hand, rel=1e-4 if (sizes == sizes[0]).all() else 1 / 64)


@given(layer=layers())
def test_swaps_are_those_of_recounting(layer):
    load_ME, rank_E, node_G = layer
    domain_E = node_G[rank_E]
    loads = scaled(load_ME, node_G)
    domains = domains_of(loads, domain_E)
    load_VM, first_M, second_M, owner_M = domains
    for v in range(len(load_VM)):
        of_v = domain_E == v
        assert (load_VM[v] == loads.load_EM[of_v].sum(axis=0) * loads.weight_V[v]).all()
    ranked = np.sort(np.concatenate([load_VM, np.full((2, len(load_ME)), -1)]), axis=0)
    assert (first_M == ranked[-1]).all() and (second_M == ranked[-2]).all()
    assert (load_VM[owner_M, np.arange(len(load_ME))] == first_M).all()
    for e, f in np.argwhere(domain_E[:, None] != domain_E):
        a, b = domain_E[e], domain_E[f]
        largest, squares = swap_effect(loads, domains, e, f, a, b)
        after_E = domain_E.copy()
        after_E[[e, f]] = b, a
        after_VM = domains_of(loads, after_E).load_VM
        assert largest == after_VM.max(axis=0).sum()
        assert squares == (after_VM**2).sum() - (load_VM**2).sum()


@given(layer=layers(), seed=st.integers(0, 2**32))
def test_annealing_ends_no_worse_than_it_began_tolls_included(layer, seed):
    load_ME, rank_E, node_G = layer
    loads = scaled(load_ME, node_G)
    even, now_E = loads.even, node_G[rank_E]
    E, V = len(now_E), len(loads.weight_V)
    send_EV = np.random.default_rng(seed).integers(0, even, (E, V))
    for toll in (0, even // 50, 2**40):
        domain_E = now_E.copy()
        cost_EV = send_EV + toll * (now_E[:, None] != np.arange(V))
        heat = 0.1 * even * len(load_ME)
        anneal(loads, cost_EV, 2.0, Cooling(300, heat, 0.01), np.uint64(seed), domain_E)
        assert (np.bincount(domain_E) == np.bincount(now_E)).all()
        cost = lambda d_E: domains_of(loads, d_E).first_M.sum() + cost_EV[np.arange(E), d_E].sum()  # noqa: B023, E731
        assert cost(domain_E) <= cost(now_E)
    assert (domain_E == now_E).all()


@given(layer=layers(), data=st.data())
def test_ranks_inside_nodes_leave_no_swap_that_pays(layer, data):
    load_ME, now_E, node_G = layer
    base = len(now_E) // len(node_G)
    node_E = node_G[data.draw(st.permutations(range(len(now_E))).map(lambda p: np.array(p) // base))]
    load_EM = scaled(load_ME, node_G).load_EM
    rank_E = settle_inside(load_EM, node_E, now_E, node_G)
    assert (node_G[rank_E] == node_E).all() and (np.bincount(rank_E) == base).all()
    squares = lambda r_E: sum((np.bincount(r_E, load_E.astype(float), len(node_G)) ** 2).sum() for load_E in load_EM.T)  # noqa: E731
    worth = 1e-4 * (load_EM.sum() / len(node_G) / len(load_ME)) ** 2 * len(load_ME)
    for e in range(len(rank_E)):
        for f in range(e):
            if node_E[e] == node_E[f]:
                other_E = rank_E.copy()
                other_E[[e, f]] = rank_E[[f, e]]
                assert squares(other_E) >= squares(rank_E) - worth * (1 + 1e-6)


@given(problem=problems(), min_gain=st.floats(0.0, 0.3), move_price=st.floats(0.0, 0.3))
def test_under_balance_homes_change_only_if_that_pays(problem, min_gain, move_price):
    problem = balance(problem)
    solver = Anneal(sweeps=20, min_gain=min_gain, move_price=move_price)
    home_LE, domain_G = solver.solve(problem), problem.cluster.node_of_rank_G
    for layer in range(problem.L):
        load_ME, now_E, new_E = problem.load_MLE[:, layer], problem.home_LE[layer], home_LE[layer]
        if (now_E != new_E).any():
            away = (domain_G[now_E // problem.B] != domain_G[new_E // problem.B]).mean()
            before, after = (value_by_hand(load_ME, home_E // problem.B, domain_G) for home_E in (now_E, new_E))
            assert after + move_price * away <= (1 - min_gain) * before * (1 + 1e-9)


def skewed(objective, replicas="any", redundant=1):
    rng = np.random.default_rng(0)
    load_MLE = rng.poisson(rng.gamma(4.0, np.sort(np.exp(rng.normal(0.0, 1.0, 32))) * 2500, (8, 32)))[:, None]
    problem = make_problem(load_MLE, np.arange(16) // 4, redundant, replicas=replicas)
    return dataclasses.replace(problem, cost=CostModel(objective=objective))


@pytest.mark.parametrize("objective", ["balance", "time"])
def test_cheap_moves_are_made_dear_ones_are_not(objective):
    problem = skewed(objective, "node")
    assert (Anneal(move_price=0.0, state_bytes=0.0).solve(problem) != problem.home_LE).any()
    assert (Anneal(move_price=1e3, state_bytes=1e9).solve(problem) == problem.home_LE).all()
    assert (Anneal(move_price=1e300, state_bytes=1e300).solve(problem) == problem.home_LE).all()


def test_a_price_saves_moves_at_little_loss():
    problem, node_G = skewed("balance"), np.arange(16) // 4
    moved, value = [], []
    for price in (0.0, 0.5):
        home_LE = Anneal(move_price=price).solve(problem)
        moved.append((node_G[home_LE // 2] != node_G[problem.home_LE // 2]).sum())
        value.append(value_by_hand(problem.load_MLE[:, 0], home_LE[0] // 2, node_G))
    assert moved[1] < 0.8 * moved[0] and value[1] < value[0] + 0.1


def test_with_one_node_replicas_do_it_and_without_slots_homes_do():
    load_MLE = skewed("balance").load_MLE
    flat = balance(make_problem(load_MLE, np.zeros(16, int), 1))
    assert (Anneal().solve(flat) == flat.home_LE).all()
    bare = balance(make_problem(load_MLE, np.zeros(16, int), 0))
    rank_G = np.arange(16)
    before, after = (value_by_hand(load_MLE[:, 0], h[0] // 2, rank_G) for h in (bare.home_LE, Anneal().solve(bare)))
    assert after < 0.75 * before


def test_annealing_sees_what_the_step_sum_hides():
    problem = balance(make_problem([[[12, 0, 0, 9]], [[0, 11, 10, 0]]], [0, 1], 1))
    # By the step's sums, 12 and 9 would stay together, as would 11 and 10: 21 in each micro-step.
    rank_E = Anneal().solve(problem)[0] // 2
    assert [np.bincount(rank_E, load_E).max() for load_E in problem.load_MLE[:, 0]] == [12, 11]


def test_annealing_balances_nodes_far_better_than_the_largest_first():
    rng = np.random.default_rng(0)
    popular_E = np.exp(rng.normal(0.0, 0.8, 64))
    load_MLE = rng.poisson(rng.gamma(4.0, popular_E * 250, (8, 64)))[:, None]
    problem = balance(make_problem(load_MLE, np.arange(32) // 8, 1))
    first_E, total_E, load_V = np.zeros(64, int), load_MLE.sum(axis=(0, 1)), np.zeros(4)
    for n, e in enumerate(np.argsort(-total_E)):
        held_V = np.bincount(first_E[np.argsort(-total_E)[:n]], minlength=4)
        first_E[e] = min((v for v in range(4) if held_V[v] < 16), key=lambda v: load_V[v])
        load_V[first_E[e]] += total_E[e]
    floor = []
    for node_E in (first_E, Anneal().solve(problem)[0] // 2 // 8):
        load_MV = np.stack([np.bincount(node_E, load_E, 4) for load_E in load_MLE[:, 0]])
        floor.append((load_MV.max(axis=1) / load_MV.mean(axis=1)).mean() - 1)
    assert floor[1] < floor[0] / 3
