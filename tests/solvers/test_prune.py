"""Prune: a subset of the replicas it is given, within its limits, and fewer where these allow it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import balance, require_valid

import foremoe
from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.simulate import simulate
from foremoe.solvers import Chain, Prune
from foremoe.solvers.kernels.price import price_row
from foremoe.solvers.kernels.rows import Placed, problem_rows, row_of
from foremoe.testing import SolverTests
from foremoe.testing.strategies import placements, problems

# Letters: N rows, G ranks, S slots per rank.


class TestPrune(SolverTests):
    solver = Prune(within=0.05)


def priced(problem, placement):
    """Seconds of every row as the search sees them, and those of one pair."""
    rows = problem_rows(problem)
    found = []
    for n in range(problem.N):
        expert_GS, quota_GS = placement.expert_NGS[n], placement.quotas_NGS[n]
        row = row_of(rows, n, expert_GS)
        found.append(
            (price_row(row, row.rates, Placed(expert_GS, quota_GS, quota_GS.sum(axis=1, dtype=np.int64))), row.rates.pair_s)
        )
    return np.array(found).T


@given(st.data(), st.sampled_from([0.0, 0.01, 0.2, 2.0]))
def test_replicas_go_within_the_limits(data, within):
    problem = data.draw(problems(min_ranks=2, min_redundant=1))
    start = data.draw(placements(problem))
    pruned = Prune(within).solve(problem, start)
    require_valid(problem, pruned)
    held = [[set(rank[rank >= 0].tolist()) for rank in row] for row in start.expert_NGS]
    for row, before in zip(pruned.expert_NGS, held, strict=True):
        assert all(set(rank[rank >= 0].tolist()) <= there for rank, there in zip(row, before, strict=True))
    most_N, load_NG = start.load_NG().max(axis=1), start.load_NG()
    more_N = within * load_NG.sum(axis=1) / problem.G
    assert (pruned.load_NG().max(axis=1) <= most_N + more_N).all()
    if problem.cost.objective == "time":
        (before_s, pair_s), (after_s, _) = priced(problem, start), priced(problem, pruned)
        assert (after_s <= before_s + pair_s * more_N + 1e-12 * np.abs(before_s)).all()


def test_a_wide_limit_under_balance_leaves_no_replica():
    work = foremoe.synthetic_workload("gpt-oss-20b", num_ranks=4, tokens_per_rank=256, micro_steps=1, num_layers=2)
    problem = balance(Problem.of(work, Cluster.preset("8xh100", 4), redundant=1))
    start = Chain().solve(problem, problem.static())
    assert (start.expert_NGS[..., problem.B :] >= 0).any()
    assert (Prune(10.0).solve(problem, start).expert_NGS[..., problem.B :] < 0).all()


def test_fewer_copies_take_no_longer_where_ranks_share_links():
    work = foremoe.synthetic_workload("qwen3-30b-a3b", num_ranks=32, tokens_per_rank=8192, micro_steps=1, num_layers=4)
    problem = Problem.of(work, Cluster.preset("8xh100", 32, dispatch="node"), redundant=1)
    whole, _ = Planner().plan(problem)
    fewer, _ = Planner(rank=(Chain(), Prune()), guard=False).plan(problem)
    assert len(fewer.transfers) < 0.97 * len(whole.transfers)
    assert simulate(problem, fewer).total_s <= 1.005 * simulate(problem, whole).total_s


def test_a_negative_limit_is_refused():
    with pytest.raises(InputError, match="within of Prune"):
        Prune(-0.1)
