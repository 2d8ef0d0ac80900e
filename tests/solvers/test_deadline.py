"""Deadline: every copy takes the way on which it ends first, given the copies of its use before it."""

import dataclasses

import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st
from solver_util import make_problem

from foremoe.placement import Placement
from foremoe.slots import SharedSlots
from foremoe.solvers.deadline import Deadline, choose_paths, copy_seconds
from foremoe.testing import describe, placements, problems
from foremoe.transfers import Path, Transfers, derive_transfers

PROBLEMS = problems(min_ranks=2, min_redundant=1)


def copies_of(problem, placement):
    return derive_transfers(
        placement.expert_NGS, placement.quotas_NGS, problem.home_LE, schedule=problem.schedule, slots=problem.slots,
        order_M=np.arange(problem.M, dtype=np.int32), node_of_rank_G=problem.cluster.node_of_rank_G,
        resident_LGS=problem.resident_LGS,
    )  # fmt: skip


def paths_by_hand(problem, transfers):
    """Per copy: the free times of every link it may use, in a dict that is emptied for every use."""
    node_of, seconds, out = problem.cluster.node_of_rank_G, copy_seconds(problem.cluster, problem.model.expert_bytes), []
    need, free = None, {}
    for c in range(len(transfers)):
        if transfers.need_C[c] != need:
            need, free = transfers.need_C[c], {}
        dst = int(transfers.dst_C[c])
        src = int(problem.home_LE[transfers.layer_C[c], transfers.expert_C[c]]) // problem.B
        direct = Path.PEER if node_of[src] == node_of[dst] else Path.RDMA
        links = {direct: [(direct, "out", src), (direct, "in", dst)], Path.HOST: [(Path.HOST, "in", dst)]}
        end = {path: max(free.get(link, 0.0) for link in links[path]) + seconds[path] for path in links}
        best = min(links, key=lambda path: (end[path], path == Path.HOST))
        free.update(dict.fromkeys(links[best], end[best]))
        out.append((int(best), -1 if best == Path.HOST else src))
    return out


@given(st.data())
def test_paths_are_those_of_list_scheduling_by_hand(data):
    problem = data.draw(PROBLEMS)
    note(describe(problem))
    transfers = copies_of(problem, data.draw(placements(problem)))
    found = Deadline().solve(problem, transfers)
    assert list(zip(found.path_C.tolist(), found.src_C.tolist(), strict=True)) == paths_by_hand(problem, transfers)
    same = {f.name for f in dataclasses.fields(Transfers)} - {"path_C", "src_C"}
    assert all((getattr(found, name) == getattr(transfers, name)).all() for name in same)
    assert Deadline().solve(problem, found).same_as(found)


@given(st.data())
def test_a_copy_never_crosses_nodes_by_peer_nor_stays_inside_by_rdma(data):
    problem = data.draw(PROBLEMS)
    found = Deadline().solve(problem, copies_of(problem, data.draw(placements(problem))))
    node_G = problem.cluster.node_of_rank_G
    assert ((found.path_C == Path.HOST) == (found.src_C == -1)).all()
    direct_C = found.src_C >= 0
    together_C = node_G[found.src_C[direct_C]] == node_G[found.dst_C[direct_C]]
    assert (together_C == (found.path_C[direct_C] == Path.PEER)).all()


@given(st.data())
def test_copies_given_out_of_order_get_the_same_paths(data):
    problem = data.draw(PROBLEMS)
    transfers = copies_of(problem, data.draw(placements(problem)))
    # Whole uses change places; inside a use the order is part of the question.
    order_C = np.argsort(-transfers.need_C, kind="stable")
    there, here = Deadline().solve(problem, transfers.take(order_C)), Deadline().solve(problem, transfers)
    assert there.same_as(here.take(order_C))


@given(st.data())
def test_a_way_that_is_not_there_is_not_taken(data):
    problem = data.draw(PROBLEMS)
    transfers = copies_of(problem, data.draw(placements(problem)))
    ask = lambda *allowed: choose_paths(transfers, problem.home_LE, problem.cluster, problem.model.expert_bytes, allowed)  # noqa: E731
    assert (ask(Path.HOST).path_C == Path.HOST).all()
    assert not (ask(Path.PEER, Path.RDMA).path_C == Path.HOST).any()
    node_G = problem.cluster.node_of_rank_G
    home_C = problem.home_LE[transfers.layer_C, transfers.expert_C] // problem.B
    assert ((ask(Path.PEER, Path.HOST).path_C == Path.HOST) | (node_G[home_C] == node_G[transfers.dst_C])).all()


def fan_out(num_ranks, **links):
    """Expert 0, at home on rank 0, copied to every other rank of the node in one use."""
    load_E = np.zeros(num_ranks, np.int32)
    load_E[0] = 10 * num_ranks
    problem = make_problem(load_E[None, None], np.zeros(num_ranks, int), 1)
    cluster = dataclasses.replace(problem.cluster, peer_latency_s=0.0, host_latency_s=0.0, **links)
    problem = dataclasses.replace(problem, cluster=cluster, slots=SharedSlots())
    expert_NGS, quota_NGS = problem.static().expert_NGS.copy(), problem.static().quotas_NGS.copy()
    expert_NGS[0, 1:, 1], quota_NGS[0, 1:, 1], quota_NGS[0, 0, 0] = 0, 10, 10
    return problem, copies_of(problem, Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS))


def test_host_copies_relieve_a_home_that_feeds_many_ranks():
    problem, transfers = fan_out(8, peer_bytes_per_s=4e9, host_bytes_per_s=1e9)
    path_C = Deadline().solve(problem, transfers).path_C
    # The first three peer copies end before one host copy would; the fourth ends with it, and the tie goes to the peer.
    forward_C = transfers.need_C == transfers.need_C[0]
    assert path_C[forward_C].tolist() == [Path.PEER] * 4 + [Path.HOST] * 3


def test_a_slow_host_link_is_left_alone():
    problem, transfers = fan_out(8, peer_bytes_per_s=400e9, host_bytes_per_s=1e9)
    found = Deadline().solve(problem, transfers)
    assert (found.path_C == Path.PEER).all() and (found.src_C == 0).all()


def test_no_copies_are_no_problem():
    problem, transfers = fan_out(4, peer_bytes_per_s=4e9, host_bytes_per_s=1e9)
    assert len(Deadline().solve(problem, transfers.take(np.zeros(0, np.int64)))) == 0
