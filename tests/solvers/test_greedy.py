"""Greedy: level the most and the least loaded rank, again and again."""

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

from foremoe.solvers.greedy import Greedy


def by_hand(load_of, base_GB, node_G, redundant):
    """The rule from its description: {(rank, expert): pairs}. Slots are lists, so that equal experts are tried in slot order."""
    ranks, num_base = range(len(base_GB)), len(base_GB[0])
    home = {e: g for g in ranks for e in base_GB[g]}
    slots = [[[e, load_of[e]] for e in base_B] + [[None, 0] for _ in range(redundant)] for base_B in base_GB]
    load = lambda g: sum(amount for _, amount in slots[g])  # noqa: E731

    def place_for(e, g):
        """Slot of rank g that can take pairs of e, or None."""
        held = [slot for slot in slots[g] if slot[0] == e]
        return (held + [slot for slot in slots[g][num_base:] if slot[0] is None] + [None])[0]

    def step():
        giver = max(ranks, key=load)
        for source in sorted(slots[giver], key=lambda slot: -slot[1]):
            if source[1] == 0:
                break
            e = source[0]
            takers = [
                r for r in ranks if load(giver) - load(r) >= 2 and node_G[r] == node_G[home[e]] and place_for(e, r) is not None
            ]
            if takers:
                taker = min(takers, key=load)
                amount = min((load(giver) - load(taker)) // 2, source[1])
                to = place_for(e, taker)
                to[0], to[1] = e, to[1] + amount
                source[1] -= amount
                if source[1] == 0 and source in slots[giver][num_base:]:
                    source[0] = None
                return True
        return False

    while step():
        pass
    return {(g, e): amount for g in ranks for e, amount in slots[g] if amount}


@given(problem=problems())
def test_equals_the_rule_written_plainly(problem):
    placement = Greedy().solve(problem, problem.static())
    require_valid(problem, placement)
    require_no_worse_than_static(problem, placement)
    assert served(placement) == rows_by_hand(problem, by_hand)


@given(problem=problems(), seed=st.integers(0, 9))
def test_start_and_names_do_not_matter(problem, seed):
    require_start_ignored(Greedy(), problem)
    require_relabelling(Greedy(), problem, seed)


def test_levels_two_ranks():
    problem = make_problem([[[90, 10, 20, 0]]], [0, 0], 1)
    assert Greedy().solve(problem, problem.static()).load_NG().tolist() == [[60, 60]]


def test_stays_inside_nodes_of_one_rank():
    problem = make_problem([[[90, 0]]], [0, 1], 1, replicas="node")
    assert Greedy().solve(problem, problem.static()).same_as(Greedy().solve(problem, problem.static()))
    assert Greedy().solve(problem, problem.static()).load_NG().tolist() == [[90, 0]]


def test_a_replica_that_gives_everything_away_leaves_its_slot():
    problem = make_problem([[[0, 774, 176, 374]]], [0] * 4, 1)
    placement = Greedy().solve(problem, problem.static())
    require_valid(problem, placement)
    assert served(placement) == rows_by_hand(problem, by_hand)
