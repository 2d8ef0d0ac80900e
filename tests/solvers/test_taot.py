"""Taot: transport from overloaded to idle ranks, near before far."""

import dataclasses

import pytest
from hypothesis import given
from solver_util import make_problem, problems, require_no_worse_than_static, require_start_ignored, require_valid, served

from foremoe.base.errors import InputError
from foremoe.solvers import Taot
from foremoe.testing import SolverTests


class TestTaot(SolverTests):
    solver = Taot()


@given(problem=problems())
def test_it_is_valid_and_never_worse_than_homes(problem):
    placement = Taot().solve(problem, problem.static())
    require_valid(problem, placement)
    require_no_worse_than_static(problem, placement)
    require_start_ignored(Taot(), problem)


def moved(load_E, node_G, **changes):
    """(rank, expert) -> pairs served away from home, of one row with one redundant slot per rank."""
    problem = dataclasses.replace(make_problem([[load_E]], node_G, 1), **changes)
    base = len(load_E) // len(node_G)
    places = served(Taot().solve(problem, problem.static()))[0]
    return {(g, e): pairs for (g, e), pairs in places.items() if e // base != g}


def test_flows_stay_in_the_node_where_they_can():
    """Worked by hand: ranks 0 and 2 are over an even share of 1000; their idle neighbours take what they give."""
    assert moved([1600, 400, 1500, 500], [0, 0, 1, 1]) == {(1, 0): 600, (3, 2): 500}


def test_excess_that_the_node_cannot_take_crosses():
    """Node 0 has 600 pairs more than its share: rank 1 is filled from inside, ranks 2 and 3 from outside."""
    load_E = [1800, 800, 700, 700]
    assert moved(load_E, [0, 0, 1, 1]) == {(1, 0): 200, (2, 0): 300, (3, 0): 300}
    assert moved(load_E, [0, 0, 1, 1], replicas="node") == {(1, 0): 200}


def test_a_flow_is_served_by_the_smallest_expert_that_fills_it():
    assert moved([900, 500, 300, 100, 100, 100], [0, 0]) == {(1, 0): 700}  # no other has 700
    assert moved([500, 900, 600, 300, 300, 200], [0, 0]) == {(1, 2): 600}  # expert 2 moves whole
    assert moved([500, 500, 500, 100, 100, 100], [0, 0]) == {(1, 0): 500}  # none has 600: the largest, the first of them


@pytest.mark.parametrize("options", [{"epsilon": 0.0}, {"epsilon": float("nan")}, {"rounds": 0}], ids=repr)
def test_bad_options_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        Taot(**options)
