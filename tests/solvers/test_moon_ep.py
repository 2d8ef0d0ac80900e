"""MoonEp: exact balance inside a node, with one remote home rank for every rank that receives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from solver_util import (
    make_problem,
    problems,
    require_no_worse_than_static,
    require_relabelling,
    require_start_ignored,
    require_valid,
    served,
)

from foremoe.solvers.published.moon_ep import MoonEp


def node_loads(problem, load_N):
    return [load_N[problem.cluster.node_of_rank_G == node] for node in range(problem.cluster.num_nodes)]


def with_slots(problem, redundant):
    load_MLE, node_G = problem.load_MLE, problem.cluster.node_of_rank_G
    return make_problem(load_MLE, node_G, redundant, replicas=problem.replicas, home_LE=problem.home_LE)


@given(problem=problems())
def test_every_node_is_level_with_a_second_set_of_slots(problem):
    problem = with_slots(problem, problem.B)
    placement = MoonEp().solve(problem, problem.static())
    require_valid(problem, placement)
    for at_home_G, load_G in zip(problem.static().load_NG(), placement.load_NG(), strict=True):
        for before, after in zip(node_loads(problem, at_home_G), node_loads(problem, load_G), strict=True):
            assert after.sum() == before.sum() and after.max() - after.min() <= 1


@given(problem=problems())
def test_a_rank_receives_from_one_home_rank_of_its_node(problem):
    placement = MoonEp().solve(problem, problem.static())
    require_valid(problem, placement)
    require_no_worse_than_static(problem, placement)
    node_G = problem.cluster.node_of_rank_G
    for n, row in enumerate(served(placement)):
        home_of = {int(e): g for g, base_B in enumerate(problem.base_NGB[n]) for e in base_B}
        for g in range(problem.G):
            sources = {home_of[e] for rank, e in row if rank == g} - {g}
            assert len(sources) <= 1 and all(node_G[home] == node_G[g] for home in sources)


@given(problem=problems())
def test_start_does_not_matter(problem):
    require_start_ignored(MoonEp(), problem)


@given(problem=problems(distinct=True), seed=st.integers(0, 9))
def test_names_do_not_matter(problem, seed):
    require_relabelling(MoonEp(), problem, seed)


def test_a_giver_that_sinks_below_the_mean_is_filled_later():
    # Loads 13, 5 and 12 around the mean of 10: rank 0 gives 5 to rank 1 and gets 2 from rank 2.
    problem = make_problem([[[8, 5, 3, 2, 7, 5]]], [0, 0, 0], 2)
    (row,) = served(MoonEp().solve(problem, problem.static()))
    assert row == {(0, 0): 3, (0, 1): 5, (1, 2): 3, (1, 3): 2, (1, 0): 5, (2, 4): 5, (2, 5): 5, (0, 4): 2}
    assert MoonEp().solve(problem, problem.static()).load_NG().tolist() == [[10, 10, 10]]


def test_it_takes_as_many_slots_as_the_giver_has_experts():
    # Rank 1 lacks 9 pairs, of which no expert of rank 0 has more than 6.
    load_MLE, node_G = [[[6, 6, 6, 0, 0, 0]]], np.zeros(2)
    for redundant, expected in ((1, [12, 6]), (2, [9, 9]), (3, [9, 9])):
        problem = make_problem(load_MLE, node_G, redundant)
        assert MoonEp().solve(problem, problem.static()).load_NG().tolist() == [expected]
