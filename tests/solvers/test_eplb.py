"""Eplb: the published table, the kernel against the readable function, and the solver."""

import numpy as np
import pytest
from eplb_policy import PUBLISHED_LOAD, PUBLISHED_PLACES, rebalance
from hypothesis import given
from hypothesis import strategies as st
from solver_util import loads, make_problem, problems, require_valid

from foremoe.base.errors import InputError
from foremoe.solvers.published.eplb import Eplb, place_row


@st.composite
def cases(draw):
    """Loads, slots, groups, nodes and ranks that divide as the policy wants."""
    num_nodes, ranks_per_node, slots = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_ranks = num_nodes * ranks_per_node
    num_physical = num_ranks * slots
    num_experts = draw(st.sampled_from([e for e in range(1, num_physical + 1) if e % num_nodes == 0 or e < 5]))
    num_groups = draw(st.sampled_from([c for c in range(1, num_experts + 1) if num_experts % c == 0]))
    rows = draw(st.integers(1, 3))
    return np.array([draw(loads(num_experts)) for _ in range(rows)]), num_physical, num_groups, num_nodes, num_ranks


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_published_table(dtype):
    places_LP = rebalance(np.array(PUBLISHED_LOAD, dtype), 16, 4, 2, 8)
    assert places_LP.tolist() == PUBLISHED_PLACES


@given(case=cases())
def test_kernel_equals_the_readable_policy(case):
    load_LE, num_physical, num_groups, num_nodes, num_ranks = case
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    places_LP = rebalance(load_LE, num_physical, num_groups, num_nodes, num_ranks)
    expert_P = np.empty(num_physical, np.int64)
    for load_E, places_P in zip(load_LE, places_LP, strict=True):
        place_row(load_E.astype(np.float64), num_groups, num_nodes, num_ranks, expert_P)
        assert expert_P.tolist() == places_P.tolist()


@given(problem=problems())
def test_solver_serves_the_policy_s_shares(problem):
    placement = Eplb().solve(problem, problem.static())
    require_valid(problem, placement, keeps_homes=False)
    assert placement.same_as(Eplb().solve(problem, problem.static()))
    P = problem.G * problem.S
    for n, load_E in enumerate(problem.load_NE):
        if not load_E.any():
            assert (placement.expert_NGS[n] == problem.static().expert_NGS[n]).all()
            continue
        (places_P,) = rebalance(load_E[None], P, 1, 1, problem.G)
        assert (np.unique(placement.expert_NGS[n][placement.expert_NGS[n] >= 0]) == np.arange(problem.E)).all()
        for g, places_S in enumerate(places_P.reshape(problem.G, problem.S)):
            for e in set(places_S.tolist()):
                share = load_E[e] / (places_P == e).sum() * (places_S == e).sum()
                slot = placement.expert_NGS[n, g].tolist().index(e)
                assert abs(placement.quotas_NGS[n, g, slot] - share) <= (places_S == e).sum()


def test_groups_stay_on_their_node_whatever_the_order_of_ranks():
    rng = np.random.default_rng(0)
    node_G = np.array([0, 1, 1, 0])
    problem = make_problem(rng.integers(1, 100, (3, 2, 16)), node_G, 1, num_expert_groups=4)
    placement = Eplb().solve(problem, problem.static())
    require_valid(problem, placement, keeps_homes=False)
    straight = make_problem(problem.load_MLE, [0, 0, 1, 1], 1, num_expert_groups=4)
    in_order = Eplb().solve(straight, straight.static())
    assert (placement.expert_NGS[:, [0, 3, 1, 2]] == in_order.expert_NGS).all()
    for expert_GS in placement.expert_NGS:
        groups = [set((expert_GS[node_G == v][expert_GS[node_G == v] >= 0] // 4).tolist()) for v in (0, 1)]
        assert len(groups[0]) == len(groups[1]) == 2 and not groups[0] & groups[1]


def test_uneven_nodes_and_groups_that_do_not_divide_fall_back_to_one_node():
    load_MLE = np.random.default_rng(1).integers(1, 100, (2, 2, 16))
    flat = make_problem(load_MLE, [0, 0, 0, 0], 1)
    want = Eplb().solve(flat, flat.static())
    for node_G, groups in (([0, 0, 0, 1], 4), ([0, 0, 1, 1], 1), ([1, 0, 1, 0], 1)):
        problem = make_problem(load_MLE, node_G, 1, num_expert_groups=groups)
        assert Eplb().solve(problem, problem.static()).same_as(want)
    with pytest.raises(InputError, match="3 groups"):
        Eplb(num_groups=3).solve(flat, flat.static())
