"""Deadline: every copy takes the way on which it ends first, given the copies of its use before it."""

import dataclasses

import numpy as np
from hypothesis import given, note, target
from hypothesis import strategies as st
from reference import dense_reference, run_reference
from solver_util import make_problem

from foremoe.plan.links import choose_links
from foremoe.plan.rounds import rounds_of
from foremoe.plan.transfers import Link, TransferList, derive_transfers
from foremoe.planner.parsing import parse
from foremoe.planner.planner import Planner
from foremoe.problem.estimate import problem_rates, row_times
from foremoe.problem.placement import Placement
from foremoe.problem.schedule import Phase
from foremoe.solvers.path.deadline import Deadline
from foremoe.testing import describe, placements, problems
from foremoe.testing.samples import random_sources

PROBLEMS = problems(min_ranks=2, min_redundant=1)
# Few experts on several ranks: the same one goes to many, and stays with some.
SPREAD = problems(min_ranks=4, max_base=1, min_redundant=1, max_redundant=2, min_micro_steps=2, max_pairs=12, replicas=("any",))


def copies_of(problem, placement):
    return derive_transfers(
        placement.expert_NGS, placement.quotas_NGS, problem.home_LE, schedule=problem.schedule, slot_depth=problem.slot_depth,
        node_of_rank_G=problem.cluster.node_of_rank_G,
    )  # fmt: skip


class Timeline:
    """All copies on one timeline, to ask whether the host store pays for one."""

    def __init__(self, problem):
        self.problem, self.cluster, self.free, self.stored = problem, problem.cluster, {}, {}
        uses, times = problem.schedule.uses(problem.L), row_times(problem)
        self.begin, now = [], 0.0
        for m, layer, phase in zip(uses.micro_step_U, uses.layer_U, uses.phase_U, strict=True):
            self.begin.append(now)
            hides = times.hide_backward_N if phase == Phase.BACKWARD else times.hide_forward_N
            now += hides[m * problem.L + layer]
        self.late = self.later = 0.0
        bytes_ = problem.model.expert_bytes
        self.seconds = dict(zip(Link, self.cluster.copy_seconds(bytes_), strict=True))
        self.seconds[Link.RDMA] = bytes_ / self.cluster.rdma_bytes_per_s + self.cluster.rdma_latency_s

    def next_use(self):
        self.late = self.later

    def nic(self, g):
        node_G = self.cluster.node_of_rank_G
        return int(node_G[g]), int((node_G[:g] == node_G[g]).sum()) // self.cluster.nic_sharing

    def direct(self, ready, src, dst):
        near = self.cluster.node_of_rank_G[src] == self.cluster.node_of_rank_G[dst]
        link, ends = (Link.PEER, (src, dst)) if near else (Link.RDMA, (self.nic(src), self.nic(dst)))
        links = [(link, "out", ends[0]), (link, "in", ends[1])]
        return link, links, max([ready, *(self.free.get(key, 0.0) for key in links)]) + self.seconds[link]

    def stores(self, home, dst, layer, expert):
        """When the expert is stored, what changes if it is to be, and how long that keeps links busy."""
        place = (int(self.cluster.node_of_rank_G[dst]), layer, expert)
        if place in self.stored:
            return self.stored[place], {}, 0.0
        link, links, sent = self.direct(0.0, home, dst)
        writer, changes, busy = home, {}, self.seconds[Link.HOST]
        if link == Link.RDMA:
            writer, changes, busy = dst, dict.fromkeys(links, sent), busy + self.seconds[link]
        else:
            sent = 0.0
        stored = max(sent, self.free.get(("store", writer), 0.0)) + self.seconds[Link.HOST]
        return stored, changes | {("store", writer): stored, ("stored", *place): stored}, busy

    def times(self, need, home, dst, layer, expert):
        ready = self.begin[max(0, need - 2)] + self.late
        stored, changes, busy = self.stores(home, dst, layer, expert)
        end = max(ready, stored, self.free.get(("host", dst), 0.0)) + self.seconds[Link.HOST]
        return ready, end, changes, busy + self.seconds[Link.HOST]

    def pays(self, need, home, dst, layer, expert):
        ready, end, _, busy = self.times(need, home, dst, layer, expert)
        due, (_, _, direct) = self.begin[need] + self.late, self.direct(ready, home, dst)
        return direct > due and max(end, due) + self.cluster.copy_contention * busy < direct

    def take(self, path, need, home, src, dst, layer, expert):
        ready, end, changes, _ = self.times(need, home, dst, layer, expert)
        if path == Link.HOST:
            self.free.update({key: value for key, value in changes.items() if key[0] != "stored"} | {("host", dst): end})
            self.stored.update({key[1:]: value for key, value in changes.items() if key[0] == "stored"})
        else:
            _, links, end = self.direct(ready, src, dst)
            self.free.update(dict.fromkeys(links, end))
        self.later = max(self.later, end - self.begin[need])


def in_rounds(problem, transfers):
    """Copies by use, then by the round in which they would come from their homes."""
    home_C = problem.home_LE[transfers.layer_C, transfers.expert_C] // problem.B
    round_C = rounds_of(transfers.need_C, transfers.slot_C, home_C, transfers.dst_C, problem.cluster)
    return sorted(range(len(round_C)), key=lambda c: (transfers.need_C[c], round_C[c], c))


def paths_by_hand(problem, transfers):
    """``(link, source)`` of every copy: the way that ends first, by the free times of every link that it may use in its use."""
    t, node_of, out = transfers, problem.cluster.node_of_rank_G, {}
    seconds = problem.cluster.copy_seconds(problem.model.expert_bytes)
    timeline = Timeline(problem)
    in_order = in_rounds(problem, transfers)
    for need in sorted(set(t.need_C.tolist())):
        free = {}
        timeline.next_use()
        for c in (c for c in in_order if t.need_C[c] == need):
            dst, layer, expert = int(t.dst_C[c]), int(t.layer_C[c]), int(t.expert_C[c])
            home = int(problem.home_LE[layer, expert]) // problem.B
            path = Link.PEER if node_of[home] == node_of[dst] else Link.RDMA
            links, host = [(path, "out", home), (path, "in", dst)], (Link.HOST, "in", dst)
            found = [(max(free.get(link, 0.0) for link in links) + seconds[path], 0, int(path), home, links)]
            if timeline.pays(need, home, dst, layer, expert):
                found.append((free.get(host, 0.0) + seconds[Link.HOST], 1, int(Link.HOST), -1, [host]))
            end, _, path, src, links = min(found, key=lambda way: way[:2])
            free.update(dict.fromkeys(links, end))
            out[c] = (path, src)
            timeline.take(path, need, home, src, dst, layer, expert)
    return [out[c] for c in range(len(t))]


@given(st.data())
def test_paths_are_those_of_list_scheduling_by_hand(data):
    problem = data.draw(st.one_of(PROBLEMS, SPREAD))
    note(describe(problem))
    transfers = copies_of(problem, data.draw(placements(problem)))
    found = Deadline().solve(problem, transfers)
    same = {f.name for f in dataclasses.fields(TransferList)} - {"link_C", "src_C"}
    assert all((getattr(found, name) == getattr(transfers, name)).all() for name in same)
    assert list(zip(found.link_C.tolist(), found.src_C.tolist(), strict=True)) == paths_by_hand(problem, transfers)
    assert Deadline().solve(problem, found).same_as(found)


@given(st.data())
def test_plans_obey_the_laws_and_compute_what_dense_computes(data):
    problem = data.draw(SPREAD)
    note(describe(problem))
    planner = Planner(rank=(), guard=False, path=Deadline())
    plan, _ = planner.plan(problem, data.draw(placements(problem)), num_threads=1)
    plan.check(problem)
    assert parse(plan.header.planner) == planner
    target(float((plan.transfers.src_C < 0).sum()))
    load_MLGE = random_sources(problem, np.random.default_rng(7))
    dense = dense_reference(load_MLGE, backward=problem.schedule.trains)
    assert all(run_reference(plan, load_MLGE, land=land).difference(dense) < 1e-10 for land in ("early", "late"))


@given(st.data())
def test_copies_given_out_of_order_get_the_same_paths(data):
    problem = data.draw(PROBLEMS)
    transfers = copies_of(problem, data.draw(placements(problem)))
    # Whole uses change places; inside a use the order is part of the question.
    order_C = np.argsort(-transfers.need_C, kind="stable")
    there, here = Deadline().solve(problem, transfers.cut(C=order_C)), Deadline().solve(problem, transfers)
    assert there.same_as(here.cut(C=order_C))


@given(st.data())
def test_a_way_that_is_not_there_is_not_taken(data):
    problem = data.draw(PROBLEMS)
    transfers = copies_of(problem, data.draw(placements(problem)))
    ask = lambda *allowed: choose_links(transfers, problem.home_LE, problem.cluster, problem.model.expert_bytes, allowed)  # noqa: E731
    assert (ask(Link.HOST).link_C == Link.HOST).all()
    assert not (ask(Link.PEER, Link.RDMA).link_C == Link.HOST).any()
    node_G = problem.cluster.node_of_rank_G
    home_C = problem.home_LE[transfers.layer_C, transfers.expert_C] // problem.B
    assert ((ask(Link.PEER, Link.HOST).link_C == Link.HOST) | (node_G[home_C] == node_G[transfers.dst_C])).all()


def fan_out(num_ranks, alone=False, **links):
    """Expert 0, at home on rank 0, copied to every other rank in one use; all in one node, or rank 0 `alone` in another."""
    load_E = np.zeros(num_ranks, np.int32)
    load_E[0] = 10 * num_ranks
    problem = make_problem(load_E[None, None], np.minimum(np.arange(num_ranks), int(alone)), 1)
    cluster = dataclasses.replace(problem.cluster, peer_latency_s=0.0, rdma_latency_s=0.0, host_latency_s=0.0, **links)
    problem = dataclasses.replace(problem, cluster=cluster, slot_depth=3)
    expert_NGS, quota_NGS = problem.static().expert_NGS.copy(), problem.static().quotas_NGS.copy()
    expert_NGS[0, 1:, 1], quota_NGS[0, 1:, 1], quota_NGS[0, 0, 0] = 0, 10, 10
    return problem, copies_of(problem, Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS))


def test_host_copies_relieve_a_home_that_feeds_many_ranks():
    problem, transfers = fan_out(16, peer_bytes_per_s=4e9, host_bytes_per_s=1e9)
    link_C = Deadline().solve(problem, transfers).link_C
    # Writing the store takes as long as four peer copies, and so does a copy from there: the ninth peer copy would end later.
    forward_C = transfers.need_C == transfers.need_C[0]
    assert link_C[forward_C].tolist() == [Link.PEER] * 8 + [Link.HOST] * 7
    stored = choose_links(transfers, problem.home_LE, problem.cluster, problem.model.expert_bytes).link_C
    # Nothing known of time, a full store: the fourth peer copy ends with one from there, and the tie goes to the peer.
    assert stored[forward_C].tolist() == [Link.PEER] * 4 + [Link.HOST] * 11


def test_a_cluster_without_host_stores_copies_from_ranks_alone():
    problem, transfers = fan_out(8, peer_bytes_per_s=4e9, host_bytes_per_s=0.0)
    assert (Deadline().solve(problem, transfers).link_C == Link.PEER).all()
    problem, transfers = fan_out(9, alone=True, rdma_bytes_per_s=1e6, host_bytes_per_s=0.0)
    assert (Deadline().solve(problem, transfers).link_C != Link.HOST).all()
    rates = problem_rates(problem)
    assert rates.copy_rdma_s == problem.model.expert_bytes / problem.cluster.rdma_bytes_per_s_per_rank


def test_a_slow_host_link_is_left_alone():
    problem, transfers = fan_out(8, peer_bytes_per_s=400e9, host_bytes_per_s=1e9)
    found = Deadline().solve(problem, transfers)
    assert (found.link_C == Link.PEER).all() and (found.src_C == 0).all()


def test_its_text_is_that_of_older_plans():
    """It is part of every plan's bytes."""
    assert repr(Deadline()) == "Deadline()" and parse("Deadline()") == Deadline()


def test_no_copies_are_no_problem():
    problem, transfers = fan_out(4, peer_bytes_per_s=4e9, host_bytes_per_s=1e9)
    assert len(Deadline().solve(problem, transfers.cut(C=np.zeros(0, np.int64)))) == 0
