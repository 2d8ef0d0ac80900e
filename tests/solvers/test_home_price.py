"""Homes under time: what moves cost, what living near saves, and homes that change only where that pays."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from solver_util import make_problem, problems

import foremoe
from foremoe.planner.planner import Planner
from foremoe.problem.estimate import problem_rates
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers.home.anneal import TRIAL, Anneal
from foremoe.solvers.home.price import move_seconds, price_L, row_seconds_L


@given(problem=problems(), min_gain=st.floats(0.0, 0.3), state_bytes=st.floats(0.0, 100.0))
@examples(30)
def test_under_time_homes_change_only_if_the_model_says_that_it_pays(problem, min_gain, state_bytes):
    solver = Anneal(sweeps=20, min_gain=min_gain, state_bytes=state_bytes)
    home_LE = solver.solve(problem)
    changed_L = (home_LE != problem.home_LE).any(axis=1)
    seconds_L = []
    for homes_LE in (problem.home_LE, home_LE):
        there = dataclasses.replace(problem, home_LE=homes_LE)
        plan, _ = Planner(rank=(TRIAL,)).plan(there)
        seconds_L.append(row_objective(there, plan.placement))
    now_L, new_L = (s.reshape(problem.M, problem.L).sum(axis=0) for s in seconds_L)
    paid_L = new_L + price_L(problem, home_LE, state_bytes)
    assert (paid_L <= (1 - min_gain) * now_L * (1 + 1e-9))[changed_L].all()


def test_moves_are_priced_by_the_busiest_rank_and_link():
    problem = make_problem(np.ones((1, 1, 8)), [0, 0, 1, 1], 1)
    peer_s, rdma_s = move_seconds(problem, 12.0)
    num_bytes = problem.model.expert_params * 14
    assert peer_s == pytest.approx(num_bytes / problem.cluster.peer_bytes_per_s + problem.cluster.peer_latency_s)
    assert rdma_s == pytest.approx(num_bytes / problem.cluster.rdma_bytes_per_s + problem.cluster.rdma_latency_s)
    assert price_L(problem, problem.home_LE, 12.0).tolist() == [0.0]
    # Ranks 0 and 1 swap one expert; ranks 0 and 3 the other: of rank 0's two moves one goes to each link.
    assert price_L(problem, np.array([[2, 6, 0, 3, 4, 5, 1, 7]]), 12.0).tolist() == [rdma_s]
    # Ranks 0 and 1 swap both; then ranks 0 and 2 do.
    assert price_L(problem, np.array([[2, 3, 0, 1, 4, 5, 6, 7]]), 12.0).tolist() == [2 * peer_s]
    assert price_L(problem, np.array([[4, 5, 2, 3, 0, 1, 6, 7]]), 12.0).tolist() == [2 * rdma_s]
    # Rank 0 sends one expert to rank 1 and one to rank 2, and receives one each from ranks 2 and 3; then the other way round.
    assert price_L(problem, np.array([[4, 2, 6, 3, 0, 5, 1, 7]]), 12.0).tolist() == [2 * rdma_s]
    assert price_L(problem, np.array([[4, 6, 1, 3, 0, 5, 2, 7]]), 12.0).tolist() == [2 * rdma_s]


@given(problem=problems(), by_rank=st.booleans())
def test_what_drawing_near_saves_is_counted_pair_by_pair(problem, by_rank):
    if problem.load_MLGE is None:
        return
    node_G, rates = problem.cluster.node_of_rank_G.astype(np.int64), problem_rates(problem)
    domain_G = np.arange(problem.G) if by_rank else node_G
    for layer in range(problem.L):
        send_EV = Anneal()._send_EV(problem, layer, domain_G, rates)
        rank_E = problem.home_LE[layer] // problem.B
        mine = send_EV[np.arange(problem.E), domain_G[rank_E]].sum()
        load_GE = problem.load_MLGE[:, layer].sum(axis=0)
        far = sum(load_GE[g, e] for g, e in np.ndindex(load_GE.shape) if node_G[g] != node_G[rank_E[e]])
        near = load_GE.sum() - far - load_GE[rank_E, np.arange(problem.E)].sum()
        if by_rank or (np.bincount(node_G) == 1).all():
            assert mine == pytest.approx(rates.rdma_pair_s * far + rates.peer_pair_s * near, rel=1e-9, abs=1e-15)
        else:
            # Which rank of the node an expert lives on is left open: its mean stands for it.
            assert rates.rdma_pair_s * far * (1 - 1e-9) - 1e-15 <= mine


def gathered(ranks_per_node=4, tokens=4000, micro_steps=4):
    """Sources of node v want experts that all live in the next node; loads are even."""
    G, E = 8, 16
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=G, ranks_per_node=ranks_per_node)
    model = dataclasses.replace(foremoe.Model.preset("qwen3-30b-a3b"), num_experts=E, num_topk=2)
    load_MLGE = np.zeros((micro_steps, 1, G, E), np.int32)
    half = np.arange(E) < E // 2
    load_MLGE[:, :, : G // 2, ~half] = tokens
    load_MLGE[:, :, G // 2 :, half] = tokens
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=2)
    return Problem.of(work, cluster, model=model)


@pytest.mark.parametrize("replicas", ["any", "node"])
@pytest.mark.parametrize("redundant", [0, 1])
def test_homes_draw_near_to_their_tokens_where_that_pays(replicas, redundant):
    problem = dataclasses.replace(gathered(), replicas=replicas, redundant=redundant)
    node_E = Anneal().solve(problem)[0] // problem.B // 4
    assert (node_E == (np.arange(problem.E) < problem.E // 2)).all()
    # One pair of tokens does not pay for any move, and without sources nothing is known to be near.
    little = dataclasses.replace(gathered(tokens=1), replicas=replicas, redundant=redundant)
    assert (Anneal().solve(little) == little.home_LE).all()
    blind = dataclasses.replace(problem, load_MLGE=None)
    assert (Anneal().solve(blind) == blind.home_LE).all()


def test_homes_draw_near_to_ranks_in_one_node():
    problem = gathered(ranks_per_node=8, tokens=1)
    load_MLGE = np.zeros_like(problem.load_MLGE)
    for e in range(problem.E):
        load_MLGE[:, 0, (e // 2 + 3) % 8, e] = 200_000
    problem = dataclasses.replace(problem, load_MLGE=load_MLGE, load_MLE=load_MLGE.sum(axis=2))
    rank_E = Anneal(state_bytes=0.0).solve(problem)[0] // problem.B
    assert (rank_E == (np.arange(problem.E) // 2 + 3) % 8).all()


def test_a_trial_plans_every_micro_step_of_a_short_step():
    problem = gathered(micro_steps=3)
    whole = row_objective(problem, TRIAL.solve(problem, problem.static())).sum()
    assert row_seconds_L(problem, problem.home_LE, TRIAL, 3).tolist() == [pytest.approx(whole)]
    assert row_seconds_L(problem, problem.home_LE, TRIAL, 9).tolist() == [pytest.approx(whole)]
