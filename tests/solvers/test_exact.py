"""Exact: its optima are those of brute force and of another solver."""

import dataclasses
import importlib.util
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from profiles import examples
from solver_util import make_problem, require_valid

from foremoe.base.errors import InputError
from foremoe.base.parallel import row_runner
from foremoe.planner.parsing import parse
from foremoe.problem.bounds import load_bound, row_bound
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.pricing import row_objective
from foremoe.solvers.exact.exact import Exact
from foremoe.solvers.exact.model import Program
from foremoe.testing import describe, placements, problems

pytest.importorskip("pyscipopt", reason="Exact needs pyscipopt; foremoe[exact] installs it")

BALANCE = {"objectives": ("balance",)}
SMALL = {"min_ranks": 2, "max_ranks": 4, "max_base": 2, "min_redundant": 1, "max_micro_steps": 2, "max_layers": 2} | BALANCE
# What SCIP's tolerances leave of an equality.
CLOSE = 1e-6


def random_loads(num_rows, num_experts, seed, sigma=0.8, pairs=60_000):
    """int32 [1, num_rows, E]: lognormal popularity with noise, as of layers that route to few experts more than to others."""
    rng = np.random.default_rng(seed)
    share = rng.gamma(np.exp(rng.normal(0.0, sigma, (num_rows, num_experts))) * 4.0)
    return rng.multinomial(pairs, share / share.sum(axis=1, keepdims=True)).astype(np.int32)[None]


@examples(40)
@given(st.data())
def test_rows_are_valid_bounded_and_never_worse_than_the_start(data):
    problem = data.draw(problems(**SMALL))
    note(describe(problem))
    start = data.draw(placements(problem))
    found = Exact(node_limit=200).solve(problem, start)
    require_valid(problem, found)
    before_N, after_N = (row_objective(problem, p) for p in (start, found))
    assert (after_N <= before_N).all() and (found.bound_N <= after_N).all()
    assert (found.bound_N >= row_bound(problem) * (1 - CLOSE)).all()
    assert np.isin(found.stop_N, [Stop.OPTIMAL, Stop.LIMIT]).all()
    same_N = after_N == before_N
    assert (found.expert_NGS[same_N] == start.expert_NGS[same_N]).all()
    cold = Exact(node_limit=200).solve(problem, problem.static())
    both_N = (found.stop_N == Stop.OPTIMAL) & (cold.stop_N == Stop.OPTIMAL)
    np.testing.assert_allclose(row_objective(problem, cold)[both_N], after_N[both_N], rtol=2 * CLOSE)
    assert (cold.bound_N <= after_N * (1 + CLOSE)).all()


@examples(15)
@given(st.data())
def test_optima_are_those_of_brute_force(data):
    few = dict(SMALL, max_ranks=2, max_redundant=1, max_micro_steps=1, max_layers=1, max_pairs=4)
    problem = data.draw(problems(**few))
    note(describe(problem))
    found = Exact().solve(problem, problem.static())
    best = min(row_objective(problem, placement)[0] for placement in all_placements(problem))
    assert found.stop_N[0] == Stop.OPTIMAL
    assert row_objective(problem, found)[0] == pytest.approx(best, rel=2 * CLOSE)
    assert found.bound_N[0] <= best


def all_placements(problem):
    """Every placement of one row with one redundant slot on each of two ranks."""
    node_G, static = problem.cluster.node_of_rank_G, problem.static()
    load_E, home_E = problem.load_NE[0], problem.home_LE[0] // problem.B
    may = problem.replicas == "any" or node_G[0] == node_G[1]
    slots = [
        [(-1, 0)] + [(e, q) for e in range(problem.E) if home_E[e] != g and may for q in range(1, load_E[e] + 1)] for g in (0, 1)
    ]
    for choice in itertools.product(*slots):
        expert_NGS, quota_NGS = static.expert_NGS.copy(), static.quotas_NGS.copy()
        for g, (e, q) in enumerate(choice):
            if e >= 0:
                expert_NGS[0, g, -1], quota_NGS[0, g, -1] = e, q
                quota_NGS[0][expert_NGS[0] == e] -= np.where(np.arange(2) == g, 0, q)
        yield Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)


def highs_balance(load_E, num_ranks, redundant, node_G, node_only):
    """The least largest rank load, from a program of its own: flows from every expert to every rank, in whole pairs."""
    import highspy

    h = highspy.Highs()
    h.setOptionValue("output_flag", False)
    h.setOptionValue("mip_rel_gap", 0.0)
    E = len(load_E)
    home_E = np.arange(E) // (E // num_ranks)
    top = h.addIntegral(lb=0, ub=int(load_E.sum()))
    sent, held = {}, {}
    for e in range(E):
        for g in range(num_ranks):
            allowed = home_E[e] == g or not node_only or node_G[home_E[e]] == node_G[g]
            sent[e, g] = h.addIntegral(lb=0, ub=int(load_E[e]) if allowed else 0)
            held[e, g] = h.addBinary()
            h.addConstr(sent[e, g] <= int(load_E[e]) * held[e, g])
    for e in range(E):
        h.addConstr(sum(sent[e, g] for g in range(num_ranks)) == int(load_E[e]))
    for g in range(num_ranks):
        h.addConstr(sum(held[e, g] for e in range(E) if home_E[e] != g) <= redundant)
        h.addConstr(sum(sent[e, g] for e in range(E)) <= top)
    h.minimize(top)
    assert h.modelStatusToString(h.getModelStatus()) == "Optimal"
    return round(h.getObjectiveValue())


@pytest.mark.parametrize(
    ("num_experts", "node_G", "redundant", "replicas"),
    [(8, [0, 0, 0, 0], 1, "any"), (8, [0, 1, 0, 1], 1, "node"), (12, [0, 0, 1, 1], 2, "any"), (16, [0, 0, 0, 0], 1, "any")],
)
def test_optima_are_those_of_highs(num_experts, node_G, redundant, replicas):
    pytest.importorskip("highspy", reason="the optima are checked by HiGHS; foremoe[test] installs it")
    load_MLE = random_loads(3, num_experts, seed=num_experts, sigma=1.3, pairs=700)
    problem = with_objective(make_problem(load_MLE, node_G, redundant, replicas=replicas), "balance")
    found = Exact().solve(problem, problem.static())
    assert (found.stop_N == Stop.OPTIMAL).all()
    for n, load_E in enumerate(problem.load_NE):
        assert row_objective(problem, found)[n] == highs_balance(load_E, 4, redundant, node_G, replicas == "node")


def with_objective(problem, objective):
    return dataclasses.replace(problem, cost=dataclasses.replace(problem.cost, objective=objective))


@pytest.mark.parametrize("sigma", [0.4, 0.8, 1.3])
def test_sixteen_experts_on_four_ranks_are_proven(sigma):
    problem = with_objective(make_problem(random_loads(25, 16, seed=1, sigma=sigma), [0, 0, 0, 0], 1), "balance")
    found = Exact().solve(problem, problem.static())
    assert (found.stop_N == Stop.OPTIMAL).all()
    assert (found.load_NG().max(axis=1) == found.bound_N).all()
    skew_N = found.load_NG().max(axis=1) / found.load_NG().mean(axis=1)
    assert skew_N.mean() < 1.02


def test_threads_change_no_byte():
    problem = with_objective(make_problem(random_loads(4, 8, seed=3), [0, 0, 1, 1], 1), "balance")
    one = Exact().solve(problem, problem.static())
    with row_runner(2):
        assert Exact().solve(problem, problem.static()).same_as(one)


def test_a_cancelled_row_keeps_its_start():
    problem = with_objective(make_problem(random_loads(6, 8, seed=4), [0, 0, 0, 0], 1), "balance")
    start, cancel, rows = problem.static(), threading.Event(), []

    def progress(num):
        rows.append(num)
        if len(rows) == 2:
            cancel.set()

    with row_runner(1, progress, cancel):
        found = Exact().solve(problem, start)
    assert rows == [1, 1]
    assert (found.stop_N[2:] == Stop.CANCELLED).all() and (found.stop_N[:2] == Stop.OPTIMAL).all()
    assert (found.quotas_NGS[2:] == start.quotas_NGS[2:]).all() and (found.expert_NGS[2:] == start.expert_NGS[2:]).all()
    assert (found.bound_N == load_bound(problem))[2:].all()


def test_a_limit_is_said_and_still_leaves_a_bound():
    problem = with_objective(make_problem(random_loads(2, 48, seed=5, sigma=1.3), np.arange(16) // 8, 1), "balance")
    found = Exact(node_limit=1).solve(problem, problem.static())
    objective_N = row_objective(problem, found)
    limited_N = found.stop_N == Stop.LIMIT  # how far a node takes differs from SCIP to SCIP
    assert limited_N.any() and (found.bound_N < objective_N)[limited_N].all() and (found.bound_N > 0).all()
    require_valid(problem, found)


def test_a_failing_row_falls_back_to_its_start(monkeypatch):
    problem = with_objective(make_problem(random_loads(2, 8, seed=6), [0, 0], 1), "balance")
    monkeypatch.setattr(Program, "solve", lambda self, **limits: None)
    found = Exact().solve(problem, problem.static())
    assert (found.stop_N == Stop.FELL_BACK).all() and (found.expert_NGS == problem.static().expert_NGS).all()
    assert (found.bound_N <= row_objective(problem, found)).all()


def test_only_a_wall_clock_limit_drops_determinism():
    assert Exact().deterministic and Exact(node_limit=5).deterministic
    timed = Exact(time_limit_s=30.0)
    assert not timed.deterministic
    problem = with_objective(make_problem(random_loads(2, 8, seed=7), [0, 0], 1), "balance")
    assert (timed.solve(problem, problem.static()).stop_N == Stop.OPTIMAL).all()
    assert parse(repr(timed)) == timed


def test_a_missing_module_is_one_sentence(monkeypatch):
    problem = with_objective(make_problem(random_loads(1, 4, seed=8), [0, 0], 1), "balance")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'foremoe\[exact\]'"):
        Exact().solve(problem, problem.static())


def test_seconds_are_refused():
    problem = with_objective(make_problem(random_loads(1, 4, seed=8), [0, 0], 1), "time")
    with pytest.raises(InputError, match=r"cannot minimise time; plan with the objective balance\.$"):
        Exact().solve(problem, problem.static())
