"""Rounds: what is sent at once, so that no link waits for another."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from slow_rounds import rounds_by_hand

from foremoe.plan.rounds import rounds_of

MESSAGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(-1, 5), st.integers(0, 5)), max_size=40)


def columns(messages):
    return np.array(messages, np.int64).reshape(-1, 4).T


@given(messages=MESSAGES, node_G=st.lists(st.integers(0, 1), min_size=6, max_size=6).map(np.array))
def test_rounds_are_the_first_that_are_free_at_both_ends(messages, node_G):
    round_I = rounds_of(*columns(messages), node_G)
    assert round_I.tolist() == rounds_by_hand(messages, node_G)
    ends = [
        (group, side, rank, bool(node_G[src] == node_G[dst]), round_)
        for (group, _, src, dst), round_ in zip(messages, round_I.tolist(), strict=True)
        for side, rank in (("out", src), ("in", dst))
        if src >= 0
    ]
    assert len(set(ends)) == len(ends)


def test_a_group_takes_as_many_rounds_as_its_busiest_rank_has_messages():
    """Four ranks of a node each get a copy from four of another: by destination, most would wait for the first one."""
    messages = [(0, turn, src, 4 + (src + turn) % 4) for src in range(4) for turn in range(4)]
    assert rounds_of(*columns(messages), np.array([0] * 4 + [1] * 4)).max() == 3


def test_more_rounds_than_are_told_apart_share_the_last_one():
    messages = [(0, 0, 0, 1)] * 100
    assert rounds_of(*columns(messages), np.array([0, 1])).tolist() == [min(i, 63) for i in range(100)]
