"""Certify: bounds that no placement undercuts, up to those of the linear program."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import balance, make_problem

import foremoe
from foremoe.base.errors import InputError
from foremoe.machine.cluster import DISPATCHES, Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.bounds import row_bound
from foremoe.problem.objective import problem_rates, row_objective, row_times
from foremoe.problem.placement import Stop
from foremoe.problem.problem import Problem
from foremoe.solvers import Certify, Chain, Exact
from foremoe.testing import SolverTests
from foremoe.testing.strategies import placements, problems

# Letters: N rows.


class TestCertify(SolverTests):
    solver = Certify(steps=40)


@given(st.data(), st.sampled_from([1, 40, 300]))
def test_rows_stay_and_bounds_only_rise(data, steps):
    problem = data.draw(problems(min_ranks=2, min_redundant=1))
    start = data.draw(placements(problem))
    found = Certify(steps).solve(problem, start)
    assert (found.expert_NGS == start.expert_NGS).all() and (found.quotas_NGS == start.quotas_NGS).all()
    if problem.cost.objective == "balance":
        assert found.same_as(start)
    else:
        assert (found.bound_N >= row_bound(problem)).all()
        assert (found.bound_N <= row_objective(problem, found) * (1 + 1e-9)).all()


@given(st.data())
def test_no_exact_placement_undercuts_the_bound(data):
    problem = data.draw(problems(max_ranks=3, max_base=2, max_redundant=1, max_micro_steps=1, max_layers=1, max_pairs=9))
    problem = dataclasses.replace(problem, cost=dataclasses.replace(problem.cost, objective="time"))
    best = Exact().solve(problem, problem.static())
    best_N = row_objective(problem, best)
    for reached in (best, problem.static()):
        assert (Certify(200).solve(problem, reached).bound_N <= best_N * (1 + 1e-5)).all()


def real(tokens, dispatch="pairs", model="qwen3-30b-a3b", num_ranks=16, **changes):
    work = foremoe.synthetic_workload(model, num_ranks=num_ranks, tokens_per_rank=tokens, micro_steps=1, num_layers=2)
    cluster = dataclasses.replace(Cluster.preset("8xh100", num_ranks, dispatch=dispatch), **changes)
    return Problem.of(work, cluster, redundant=1)


def linear_program_s(problem: Problem, n: int) -> float:
    """Seconds of a row's linear program over replicas and quotas by HiGHS, from the rates alone; exposed copies aside."""
    highspy = pytest.importorskip("highspy", reason="the bound is checked by HiGHS; foremoe[test] installs it")
    rates, node_G, home_E = problem_rates(problem), problem.cluster.node_of_rank_G, problem.home_LE[n % problem.L] // problem.B
    h = highspy.Highs()
    h.setOptionValue("output_flag", False)
    h.setOptionValue("solver", "ipm")
    h.setOptionValue("run_crossover", "off")
    us, slowest = 1e6, h.addVariable(obj=1.0)
    load_G, made_G = [[] for _ in node_G], [[] for _ in node_G]
    for e, home in enumerate(home_E):
        served_G = [[] for _ in node_G]
        opened_G = []
        for g, node in enumerate(node_G):
            copy_s = rates.replica_peer_s if node == node_G[home] else rates.replica_rdma_s
            opened_G.append(h.addVariable(ub=1.0, obj=copy_s * us) if g != home else None)
        for source, pairs in enumerate(problem.load_NGE[n, :, e].astype(float)):
            if pairs == 0:
                continue
            for g, node in enumerate(node_G):
                link_s = 0.0 if g == source else rates.peer_pair_s if node == node_G[source] else rates.rdma_pair_s
                share = h.addVariable(obj=pairs * link_s * us)
                served_G[g].append((share, pairs))
                if g != home:
                    h.addConstr(share <= opened_G[g])
            h.addConstr(h.qsum([served_G[g][-1][0] for g in range(problem.G)]) == 1.0)
        for g in range(problem.G):
            load_G[g] += [(rates.pair_s * us * pairs) * share for share, pairs in served_G[g]]
            if opened_G[g] is not None:
                made_G[g].append(opened_G[g])
                load_G[g].append((rates.slot_s * us) * opened_G[g])
    busy_G = np.bincount(home_E[problem.load_NE[n] > 0], minlength=problem.G)
    for g in range(problem.G):
        h.addConstr(h.qsum(made_G[g]) <= problem.R)
        h.addConstr(h.qsum(load_G[g]) + float(rates.slot_s * us * busy_G[g]) <= slowest)
    h.minimize()
    return h.getObjectiveValue() / us + rates.fixed_s + row_times(problem).base_N[n]


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_steps_end_at_the_linear_program(dispatch):
    problem = real(8192, dispatch, "gpt-oss-20b")
    start = Chain().solve(problem, problem.static())
    before_N, bound_N = row_bound(problem), Certify(3000).solve(problem, start).bound_N
    least_s = linear_program_s(problem, 0)
    assert before_N[0] < bound_N[0] <= least_s * (1 + 1e-6)
    assert bound_N[0] >= 0.99 * least_s


@pytest.mark.parametrize(("dispatch", "share"), [("pairs", 0.5), ("node", 1.0)])
def test_gaps_close_to_half_where_they_are_wide(dispatch, share):
    """Under node dispatch they are 0.2 % to begin with."""
    problem = real(8192, dispatch)
    start = Chain().solve(problem, problem.static())
    objective_N, bound_N = row_objective(problem, start), Certify().solve(problem, start).bound_N
    assert (objective_N / bound_N - 1).mean() <= share * (objective_N / row_bound(problem) - 1).mean()


def test_a_plan_carries_the_bound():
    problem = real(8192)
    plan, _ = Planner(rank=(Chain(), Certify())).plan(problem)
    whole, _ = Planner().plan(problem)
    assert (plan.expert_MLGS == whole.expert_MLGS).all()
    assert (plan.bound_ML > whole.bound_ML).all() and (plan.stop_ML == Stop.LIMIT).all()
    plan.check(problem)


@pytest.mark.parametrize("search", [Certify(), Exact(node_limit=1)])
def test_a_heuristic_may_follow_a_search_that_proved_a_bound(search):
    loads = np.random.default_rng(1).integers(1, 9000, (1, 3, 8))
    problem = dataclasses.replace(make_problem(loads, [0, 0, 1, 1], 1), replicas="node")
    slow = {"flops_per_s": 1e14, "return_bytes_per_s": None}
    problem = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, **slow))
    plan, _ = Planner(rank=(search, Chain())).plan(problem)
    assert (plan.bound_ML.ravel() > row_bound(problem) * (1 + 1e-6)).any()
    plan.check(problem)


def test_rdma_faster_than_peer_links_keeps_bounds_below():
    problem = real(1024, rdma_bytes_per_s=4e11, peer_bytes_per_s=5e10)
    start = Chain().solve(problem, problem.static())
    assert (Certify().solve(problem, start).bound_N <= row_objective(problem, start)).all()


@pytest.mark.parametrize("node_G", [[0, 0, 1, 1, 2], [0] * 5])
def test_level_rows_of_unknown_sources_are_optimal_at_home(node_G):
    problem = make_problem([[[130] * 5]], node_G, 1)
    found = Certify(500).solve(problem, problem.static())
    assert (found.bound_N <= row_objective(problem, found)).all() and (found.stop_N == Stop.OPTIMAL).all()


@given(st.data(), st.sampled_from([1, 500]))
def test_no_placement_undercuts_the_bound(data, steps):
    problem = data.draw(problems(min_ranks=2, min_redundant=1))
    problem = dataclasses.replace(problem, cost=dataclasses.replace(problem.cost, objective="time"))
    bound_N = Certify(steps).solve(problem, data.draw(placements(problem))).bound_N
    for other in (problem.static(), data.draw(placements(problem)), Chain().solve(problem, problem.static())):
        assert (bound_N <= row_objective(problem, other) * (1 + 1e-9)).all()


def test_a_row_that_meets_its_bound_is_optimal():
    work = foremoe.synthetic_workload("qwen3-30b-a3b", num_ranks=16, tokens_per_rank=256, micro_steps=1, num_layers=2)
    problem = Problem.of(work, Cluster.preset("8xpcie", 16), redundant=1)
    found = Certify().solve(problem, Chain().solve(problem, problem.static()))
    assert (found.stop_N == Stop.OPTIMAL).any()


def test_under_balance_all_stays():
    problem = balance(real(1024))
    start = Chain().solve(problem, problem.static())
    assert Certify().solve(problem, start) is start


def test_no_step_is_refused():
    with pytest.raises(InputError, match="steps of Certify"):
        Certify(0)
