"""Kernels of Search against plain references: the exact split, the bound."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from solver_util import balance, least_maximum, make_problem, placed_rows, require_split

from foremoe.problem.kernels.load_bound import bound_row
from foremoe.solvers.rows import Placed
from foremoe.solvers.search.search import Search
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
