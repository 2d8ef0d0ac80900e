"""Rounds: what is sent at once, so that no link waits for another."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foremoe.machine.cluster import Cluster
from foremoe.plan.rounds import rounds_of

MESSAGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(-1, 5), st.integers(0, 5)), max_size=40)


def cluster_of(node_G, nic_sharing=1):
    _, node_G = np.unique(node_G, return_inverse=True)
    table = Cluster.preset("8xh100", len(node_G)).to_dict() | {"nic_sharing": nic_sharing, "node_of_rank": node_G.tolist()}
    del table["ranks_per_node"]
    return Cluster.from_dict(table)


def columns(messages):
    return np.array(messages, np.int64).reshape(-1, 4).T


def ends(messages, cluster):
    """What each message takes of its group: (group, side, link of its end), twice; nothing for one of no rank."""
    node_G, nic_G = cluster.node_of_rank_G, cluster.nic_of_rank_G
    for group, _, src, dst in messages:
        if src < 0:
            yield ()
        elif node_G[src] == node_G[dst]:
            yield (group, "out", "rank", src), (group, "in", "rank", dst)
        else:
            yield (group, "out", "nic", int(nic_G[src])), (group, "in", "nic", int(nic_G[dst]))


@given(messages=MESSAGES, node_G=st.lists(st.integers(0, 1), min_size=6, max_size=6), nic_sharing=st.integers(1, 3))
def test_a_group_takes_as_many_rounds_as_its_busiest_link_has_messages(messages, node_G, nic_sharing):
    cluster = cluster_of(node_G, nic_sharing)
    round_I, taken = rounds_of(*columns(messages), cluster), list(ends(messages, cluster))
    once = Counter((end, x) for both, x in zip(taken, round_I.tolist(), strict=True) for end in both)
    assert set(once.values()) <= {1}
    busy = Counter(end for both in taken for end in both)
    for group in range(3):
        rounds = [
            x for (*_, src, _), x, (g, *_) in zip(messages, round_I.tolist(), messages, strict=True) if g == group and src >= 0
        ]
        assert max(rounds, default=-1) + 1 == max((num for end, num in busy.items() if end[0] == group), default=0)


@given(messages=MESSAGES)
def test_messages_of_no_rank_are_in_the_first_round(messages):
    round_I = rounds_of(*columns(messages), cluster_of([0, 0, 0, 1, 1, 1]))
    assert all(x == 0 for (*_, src, _), x in zip(messages, round_I.tolist(), strict=True) if src < 0)


def test_ranks_of_one_nic_take_turns():
    """Two ranks of a NIC send to two NICs: one after the other, though each has one message only."""
    cluster = cluster_of([0, 0, 1, 1, 2, 2], nic_sharing=2)
    assert sorted(rounds_of(*columns([(0, 0, 0, 2), (0, 0, 1, 4)]), cluster).tolist()) == [0, 1]


def test_a_message_makes_room_for_a_later_one():
    """In the first round that is free at both ends, the last one would need a third."""
    messages = [(0, 0, 0, 4), (0, 1, 1, 5), (0, 2, 1, 3), (0, 3, 0, 3)]
    assert rounds_of(*columns(messages), cluster_of([0] * 3 + [1] * 3)).max() == 1


def test_more_rounds_than_are_told_apart_share_the_last_one():
    assert rounds_of(*columns([(0, 0, 0, 1)] * 100), cluster_of([0, 1])).tolist() == [min(i, 63) for i in range(100)]
