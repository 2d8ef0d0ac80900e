"""Home solvers: permutations, few moves, and what each of them promises about loads."""

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import make_problem, node_maps, problems

from foremoe.errors import InputError
from foremoe.parallel import row_runner
from foremoe.solvers import anneal as anneal_module
from foremoe.solvers.anneal import Anneal
from foremoe.solvers.keep import Keep
from foremoe.solvers.lpt import Lpt, few_moves, home_slots, lpt_ranks
from foremoe.testing import HomeSolverTests


class TestKeepLaws(HomeSolverTests):
    solver = Keep()


class TestLptLaws(HomeSolverTests):
    solver = Lpt()


class TestAnnealLaws(HomeSolverTests):
    solver = Anneal(sweeps=5, min_gain=0.0)


SOLVERS = [Keep(), Lpt(), Anneal(sweeps=20), Anneal(sweeps=5, min_gain=0.0, node_weight=0.0, seed=3)]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@given(problem=problems())
def test_homes_are_permutations_and_those_who_stay_keep_their_slot(solver, problem):
    home_LE = solver.solve(problem)
    assert home_LE.dtype == np.int32 and home_LE.shape == (problem.L, problem.E)
    assert (np.sort(home_LE, axis=1) == np.arange(problem.E)).all()
    stays_LE = home_LE // problem.B == problem.home_LE // problem.B
    assert (home_LE[stays_LE] == problem.home_LE[stays_LE]).all()
    assert (solver.solve(problem) == home_LE).all()
    dataclasses.replace(problem, home_LE=home_LE)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_nothing_to_balance_moves_nothing(solver):
    home_LE = np.random.default_rng(0).permutation(8)[None]
    problem = make_problem(np.zeros((2, 1, 8)), [0, 0, 1, 1], 1, home_LE=home_LE)
    assert (solver.solve(problem) == home_LE).all()


def lpt_by_hand(load_E, now_E, node_G):
    """Plain Lpt: sort, then two choices by explicit keys."""
    G, base = len(node_G), len(load_E) // len(node_G)
    held = {g: [] for g in range(G)}
    rank_E = [None] * len(load_E)
    for e in sorted(range(len(load_E)), key=lambda e: (-int(load_E[e]), e)):
        room = [g for g in range(G) if len(held[g]) < base]
        load_of = {g: sum(int(load_E[f]) for f in held[g]) for g in range(G)}
        node_load = {v: sum(load_of[g] for g in range(G) if node_G[g] == v) for v in set(node_G)}
        size = {v: sum(1 for g in range(G) if node_G[g] == v) for v in set(node_G)}
        product = int(np.prod(list(size.values())))
        nodes = {node_G[g] for g in room}
        node = min(nodes, key=lambda v: (node_load[v] * (product // size[v]), v != node_G[now_E[e]], v))
        rank_E[e] = min((g for g in room if node_G[g] == node), key=lambda g: (load_of[g], g != now_E[e], g))
        held[rank_E[e]].append(e)
    return rank_E


@given(problem=problems())
def test_lpt_is_its_plain_form(problem):
    node_G = problem.cluster.node_of_rank_G
    for layer in range(problem.L):
        load_E = problem.load_MLE[:, layer].sum(axis=0, dtype=np.int64)
        now_E = problem.home_LE[layer] // problem.B
        assert lpt_ranks(load_E, now_E, node_G).tolist() == lpt_by_hand(load_E.tolist(), now_E.tolist(), node_G.tolist())


@given(problem=problems())
def test_lpt_on_its_own_homes_moves_nothing(problem):
    once = dataclasses.replace(problem, home_LE=Lpt().solve(problem))
    assert (Lpt().solve(once) == once.home_LE).all()


def test_lpt_spreads_heavy_experts_over_nodes_first():
    problem = make_problem([[[9, 8, 7, 6, 1, 1, 1, 1]]], [0, 0, 1, 1], 1)
    rank_E = Lpt().solve(problem)[0] // 2
    load_G = np.bincount(rank_E, problem.load_MLE[0, 0], 4)
    assert load_G[:2].sum() == load_G[2:].sum() == 17
    assert load_G.tolist() == [10, 7, 9, 8] or sorted(load_G) == [7, 8, 9, 10]


@given(data=st.data())
def test_renaming_ranks_changes_only_who_moves(data):
    num_ranks, base = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    node_G = data.draw(node_maps(num_ranks))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rank_E, now_E = (rng.permutation(num_ranks * base) // base for _ in range(2))
    named_E = few_moves(rank_E, now_E, node_G)
    together = lambda group_E: group_E[:, None] == group_E  # noqa: E731
    assert (together(named_E) == together(rank_E)).all() and (together(node_G[named_E]) == together(node_G[rank_E])).all()
    sizes = np.bincount(node_G)
    assert (sizes[node_G[named_E]] == sizes[node_G[rank_E]]).all()
    assert (named_E == now_E).sum() >= (rank_E == now_E).sum()
    home_E = home_slots(named_E, now_E * base + np.argsort(np.argsort(now_E, kind="stable"), kind="stable") % base, base)
    assert (np.sort(home_E) == np.arange(num_ranks * base)).all() and (home_E // base == named_E).all()


def objective_by_hand(load_ME, rank_E, node_G, node_weight):
    """The sum over micro-steps of the 32-norms of rank loads, and of node loads per rank, over the mean rank load."""
    M, G = len(load_ME), len(node_G)
    mean = load_ME.sum() / (M * G)
    total = 0.0
    for load_E in load_ME:
        load_G = np.bincount(rank_E, load_E, G) / mean
        total += norm(load_G)
        if node_G.max() > 0:
            total += node_weight * norm(np.bincount(node_G, load_G) / np.bincount(node_G))
    return total / M


def norm(x):
    return 0.0 if x.max() == 0 else float(x.max() * ((x / x.max()) ** 32).sum() ** (1 / 32))


@given(data=st.data())
def test_objective_and_swaps_are_those_of_recounting(data):
    num_ranks, base, M = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    node_G, E = data.draw(node_maps(num_ranks)), num_ranks * base
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # Up to twelve orders of magnitude between experts: the largest alone is then all of a sum of powers.
    load_ME = np.floor(10.0 ** rng.uniform(0, data.draw(st.sampled_from([1, 3, 12])), (M, E))) * (rng.random((M, E)) < 0.9)
    load_ME[0, 0] += 1
    rank_E = rng.permutation(E) // base
    solver = Anneal(node_weight=2.5)
    assert solver.objective(load_ME, rank_E, node_G) == pytest.approx(objective_by_hand(load_ME, rank_E, node_G, 2.5), rel=1e-9)

    load_EM, scale_G, _ = solver._scaled(load_ME, node_G)
    load_GM, power_GM, sum_M, work_M = np.empty((num_ranks, M)), np.empty((num_ranks, M)), np.empty(M), np.empty(M)
    anneal_module._fill(load_EM, rank_E, scale_G, load_GM, power_GM, sum_M)
    for _ in range(4):
        e, f = rng.integers(E, size=2)
        a, b = rank_E[e], rank_E[f]
        if a == b:
            continue
        delta_M = load_EM[f] - load_EM[e]
        new = anneal_module._swapped(delta_M, a, b, scale_G, load_GM, power_GM, sum_M, work_M)
        swapped_E = rank_E.copy()
        swapped_E[[e, f]] = b, a
        by_hand = M * objective_by_hand(load_ME, swapped_E, np.zeros(num_ranks, int), 0.0)
        assert new == pytest.approx(by_hand, rel=1e-6)
        if rng.random() < 0.7:
            applied = anneal_module._apply(delta_M, a, b, scale_G, load_GM, power_GM, sum_M)
            rank_E = swapped_E
            assert applied == pytest.approx(by_hand, rel=1e-6)


@given(problem=problems(), sweeps=st.integers(0, 30))
def test_annealing_is_never_worse_than_its_starts(problem, sweeps):
    solver, node_G = Anneal(sweeps=sweeps, min_gain=0.0), problem.cluster.node_of_rank_G
    annealed_LE, lpt_LE = solver.solve(problem), Lpt().solve(problem)
    for layer in range(problem.L):
        value = lambda home_LE: solver.objective(problem.load_MLE[:, layer], home_LE[layer] // problem.B, node_G)  # noqa: B023, E731
        assert value(annealed_LE) <= min(value(problem.home_LE), value(lpt_LE)) * (1 + 1e-9)


@given(problem=problems(), min_gain=st.floats(0.0, 0.5))
def test_homes_stay_unless_the_gain_is_worth_it(problem, min_gain):
    solver, node_G = Anneal(sweeps=10, min_gain=min_gain), problem.cluster.node_of_rank_G
    home_LE = solver.solve(problem)
    for layer in range(problem.L):
        if (home_LE[layer] != problem.home_LE[layer]).any():
            before, after = (
                solver.objective(problem.load_MLE[:, layer], h[layer] // problem.B, node_G) for h in (problem.home_LE, home_LE)
            )
            assert after <= (1 - min_gain) * before * (1 + 1e-9)


def test_annealing_sees_what_the_step_sum_hides():
    problem = make_problem([[[12, 0, 0, 9]], [[0, 11, 10, 0]]], [0, 0], 1)
    largest = {}
    for solver in (Lpt(), Anneal()):
        rank_E = solver.solve(problem)[0] // 2
        largest[type(solver)] = [np.bincount(rank_E, load_E).max() for load_E in problem.load_MLE[:, 0]]
    assert largest[Lpt] == [21, 21] and largest[Anneal] == [12, 11]


def test_annealing_balances_nodes_far_better_than_lpt():
    rng = np.random.default_rng(0)
    popular_E = np.exp(rng.normal(0.0, 0.8, 64))
    load_MLE = rng.poisson(rng.gamma(4.0, popular_E * 250, (8, 64)))[:, None]
    problem = make_problem(load_MLE, np.arange(32) // 8, 1)
    floor = []
    for solver in (Lpt(), Anneal()):
        node_E = solver.solve(problem)[0] // 2 // 8
        load_MV = np.stack([np.bincount(node_E, load_E, 4) for load_E in load_MLE[:, 0]])
        floor.append((load_MV.max(axis=1) / load_MV.mean(axis=1)).mean() - 1)
    assert floor[1] < floor[0] / 3


def test_a_layer_is_planned_alike_alone_and_among_others_on_any_threads():
    rng = np.random.default_rng(1)
    problem = make_problem(rng.integers(0, 1000, (3, 4, 16)), [0, 0, 1, 1], 1)
    for solver in SOLVERS:
        home_LE = solver.solve(problem)
        assert (solver.solve(problem.layers([2]))[0] == home_LE[2]).all()
        with row_runner(2):
            assert (solver.solve(problem) == home_LE).all()


def test_a_cancelled_layer_keeps_its_homes():
    problem = make_problem(np.random.default_rng(2).integers(0, 1000, (3, 4, 16)), [0, 0, 1, 1], 1)
    for solver in (Lpt(), Anneal(sweeps=20, min_gain=0.0)):
        cancel = threading.Event()
        with row_runner(1, lambda num: cancel.set(), cancel):  # noqa: B023
            home_LE = solver.solve(problem)
        assert (home_LE[1:] == problem.home_LE[1:]).all() and (home_LE[0] == solver.solve(problem)[0]).all()


@pytest.mark.parametrize(
    "options",
    [{"sweeps": -1}, {"sweeps": 1.5}, {"temperature": 0.0}, {"cooling": 2.0}, {"node_weight": -1.0}, {"min_gain": float("nan")}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(InputError):
        Anneal(**options)
