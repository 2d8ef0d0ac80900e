"""Quota: threshold search over a greedy spill."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import (
    make_problem,
    problems,
    require_no_worse_than_static,
    require_relabelling,
    require_start_ignored,
    require_valid,
    rows_by_hand,
    served,
)

from foremoe.base.errors import InputError
from foremoe.base.parallel import row_runner
from foremoe.solvers.published.quota import Quota, quota_row

solvers = st.builds(Quota, min_pairs=st.sampled_from((0, 1, 3, 40)))


def spill(target, load_of, base_GB, node_G, redundant, solver):
    """One threshold, from the description: ``(maximum, {(rank, expert): pairs})``."""
    ranks, floor = range(len(base_GB)), max(1, solver.min_pairs)
    start = [sum(load_of[e] for e in base_B) for base_B in base_GB]
    now, free = list(start), [redundant] * len(base_GB)
    pairs = {(g, e): load_of[e] for g in ranks for e in base_GB[g]}
    for giver in sorted((g for g in ranks if start[g] > target), key=lambda g: -start[g]):
        for e in sorted(base_GB[giver], key=lambda e: -load_of[e]):
            while now[giver] > target:
                want = min(max(now[giver] - target, floor), pairs[giver, e])
                takers = [r for r in ranks if start[r] < target and now[r] < target and free[r] and node_G[r] == node_G[giver]]
                if not takers:
                    break
                taker = max(takers, key=lambda r: target - now[r])
                amount = min(want, target - now[taker])
                if amount < floor:
                    break
                pairs[taker, e], free[taker] = amount, free[taker] - 1
                pairs[giver, e] -= amount
                now[giver] -= amount
                now[taker] += amount
    return max(now), {place: amount for place, amount in pairs.items() if amount}


def by_hand(load_of, base_GB, node_G, redundant, solver):
    low = -(-sum(load_of.values()) // len(base_GB))
    high = max(sum(load_of[e] for e in base_B) for base_B in base_GB)
    best, pairs = spill(high, load_of, base_GB, node_G, redundant, solver)
    while low < high:
        target = (low + high) // 2
        reached, found = spill(target, load_of, base_GB, node_G, redundant, solver)
        if reached < best:
            best, pairs = reached, found
        if reached > target:
            low = target + 1
        high = min(high, best)
    return pairs


@given(problem=problems(), solver=solvers)
def test_equals_the_rule_written_plainly(problem, solver):
    placement = solver.solve(problem, problem.static())
    require_valid(problem, placement)
    require_no_worse_than_static(problem, placement)
    assert served(placement) == rows_by_hand(problem, lambda *row: by_hand(*row, solver))


@given(problem=problems(), solver=solvers)
def test_replicas_are_worth_the_floor(problem, solver):
    quota_NGR = solver.solve(problem, problem.static()).quotas_NGS[:, :, problem.B :]
    assert not ((quota_NGR > 0) & (quota_NGR < solver.min_pairs)).any()


@given(problem=problems(), solver=solvers, seed=st.integers(0, 9))
def test_start_and_names_do_not_matter(problem, solver, seed):
    require_start_ignored(solver, problem)
    require_relabelling(solver, problem, seed)


@given(problem=problems())
def test_python_and_compiled_kernel_agree(problem):
    placement, start = Quota().solve(problem, problem.static()), problem.static()
    options = Quota().options(problem.replicas == "node", problem)
    for n in range(problem.N):
        expert_GS, quota_GS = start.expert_NGS[n].copy(), start.quotas_NGS[n].copy()
        quota_row.py_func(problem.load_NE[n], problem.cluster.node_of_rank_G, problem.B, options, expert_GS, quota_GS)
        assert (expert_GS == placement.expert_NGS[n]).all() and (quota_GS == placement.quotas_NGS[n]).all()


def test_one_hot_expert_is_spread_over_all_ranks():
    problem = make_problem([[[90, 0, 0]]], [0, 0, 0], 1)
    placement = Quota().solve(problem, problem.static())
    assert placement.load_NG().tolist() == [[30, 30, 30]]
    assert Quota(min_pairs=31).solve(problem, problem.static()).load_NG().tolist() == [[28, 31, 31]]
    assert Quota(min_pairs=46).solve(problem, problem.static()).load_NG().tolist() == [[44, 46, 0]]


def test_equal_rooms_go_to_the_lowest_rank():
    # Rank 0 gives 26 to rank 2, whose room then equals rank 1's; the next piece goes to rank 1.
    load_E = [26] * 5 + [96, 0, 0, 0, 0] + [70, 0, 0, 0, 0] + [104, 0, 0, 0, 0]
    problem = make_problem([[load_E]], [0] * 4, 2)
    placement = Quota().solve(problem, problem.static())
    assert placement.load_NG().tolist() == [[100] * 4]
    assert placement.expert_NGS[0, :, 5:].tolist() == [[-1, -1], [1, -1], [0, 15], [-1, -1]]


def test_threads_do_not_change_the_result():
    problem = make_problem(np.random.default_rng(0).integers(0, 1000, (100, 6, 8)), [0, 0, 1, 1], 1)
    results = []
    for num_threads in (1, 3):
        with row_runner(num_threads):
            results.append(Quota().solve(problem, problem.static()))
    assert results[0].same_as(results[1])


@pytest.mark.parametrize("options", [{"min_pairs": -1}, {"min_pairs": 1.5}])
def test_bad_options_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        Quota(**options)


def test_repr_is_the_configuration():
    assert repr(Quota(min_pairs=64)) == "Quota(min_pairs=64)"
