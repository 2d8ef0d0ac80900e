"""A plan names the levels that ran; a level that should have run and has not is refused."""

from __future__ import annotations

import dataclasses

import pytest
from planner_problems import problem_of

import foremoe
from foremoe.base.errors import InputError
from foremoe.planner.planner import Planner
from foremoe.solvers import Anneal, AsGiven, ExpertAware
from foremoe.synthetic.tokens import synthetic_trace


@pytest.fixture(scope="module")
def trace() -> foremoe.RoutingTrace:
    return synthetic_trace("mixtral-8x7b", num_sequences=24, mean_length=40.0, num_layers=2, seed=0, regime="mid")


def test_a_home_level_that_has_not_run_is_refused_with_the_cure():
    problem = problem_of()
    with pytest.raises(InputError, match=r"home=Anneal\(.*\) has not run: it would move \d+ experts; decide homes with"):
        Planner(home=Anneal()).plan(problem)
    planner = Planner(home=Anneal())
    decided = dataclasses.replace(problem, home_LE=planner.homes(problem))
    plan, _ = planner.plan(decided)
    plan.check(decided)
    assert plan.header.planner == repr(planner)


def test_a_home_level_that_moves_nothing_has_run():
    still = Anneal(move_price=1e9)
    problem = problem_of()
    assert (Planner(home=still).homes(problem) == problem.home_LE).all()
    plan, _ = Planner(home=still).plan(problem)
    assert plan.header.planner == repr(Planner(home=still))


def test_a_pack_level_that_has_not_dealt_is_refused_with_the_cure(trace):
    planner, cluster = Planner(pack=ExpertAware()), foremoe.Cluster.preset("8xh100", num_ranks=4)
    sizes = {"num_ranks": 4, "tokens_per_rank": 100}
    as_given = foremoe.Problem.of(Planner().workload(trace, **sizes), cluster)
    with pytest.raises(InputError, match=r"AsGiven\(shuffle=False\) dealt this problem, not pack=ExpertAware"):
        planner.plan(as_given)
    problem = foremoe.Problem.of(planner.workload(trace, **sizes), cluster)
    problem = dataclasses.replace(problem, home_LE=planner.homes(problem))
    plan, _ = planner.plan(problem)
    assert plan.header.planner == repr(planner) and plan.header.dealt.packer == repr(planner.pack)
    # Whoever dealt it: a planner without a pack level takes any problem.
    assert Planner().plan(problem)[0].header.planner == repr(Planner())


def test_counts_from_elsewhere_were_dealt_by_nobody_known():
    problem = problem_of()
    assert problem.dealt is None
    plan, _ = Planner(pack=ExpertAware()).plan(problem)
    assert plan.header.planner == repr(Planner(pack=AsGiven()))
