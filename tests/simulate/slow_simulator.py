"""The simulator once more, slow and obvious: no link is shared with exchanges, everything in plain seconds and dictionaries."""

import math
from collections import defaultdict

import numpy as np

from foremoe.plan.rounds import rounds_of
from foremoe.plan.split import split_over_sources
from foremoe.plan.transfers import Link
from foremoe.problem.schedule import Phase


def flow(problem, plan, n):
    """int64 [G, G]: pairs that every source (first axis) sends every rank, by the split law."""
    split_GP = [
        split_over_sources(problem.load_NGE, plan.expert_NGS, plan.quota_NGS, problem.cluster.node_of_rank_G, g)[n]
        for g in range(problem.G)
    ]
    return np.array(split_GP, np.int64).reshape(problem.G, problem.G, -1).sum(axis=2)


def exchange_seconds(problem, plan, n):
    """Peer and RDMA seconds of one dispatch, from every source's split."""
    cluster = problem.cluster
    if cluster.dispatch == "node":
        return node_exchange_seconds(problem, plan, n)
    node_G, sent_GG = cluster.node_of_rank_G, flow(problem, plan, n)
    np.fill_diagonal(sent_GG, 0)
    near_GG = node_G[:, None] == node_G[None, :]
    peer_GG, rdma_GG = np.where(near_GG, sent_GG, 0), np.where(near_GG, 0, sent_GG)
    return busiest(problem, [peer_GG.sum(axis=1), peer_GG.sum(axis=0)], [rdma_GG.sum(axis=1), rdma_GG.sum(axis=0)])


def busiest(problem, peer_2G, rdma_2G):
    """Seconds of the busiest rank and NIC with so many pairs or messages out and in."""
    cluster, nic = problem.cluster, defaultdict(float)
    for way in range(2):
        for node in range(cluster.num_nodes):
            for i, g in enumerate(np.flatnonzero(cluster.node_of_rank_G == node)):
                nic[way, node, i // cluster.nic_sharing] += rdma_2G[way][g]
    size = problem.model.token_bytes
    return np.max(peer_2G) * size / cluster.kernel_bytes_per_s, max(nic.values()) * size / cluster.rdma_bytes_per_s


def node_exchange_seconds(problem, plan, n):
    """The same where a token goes once to every node and rank that serve it, a source's pairs drawn one by one."""
    node_G, G, K = problem.cluster.node_of_rank_G, problem.G, problem.model.num_topk
    sent_GG, tokens_G = flow(problem, plan, n), problem.load_NGE[n].sum(axis=1) / K

    def reached(tokens, pairs):
        if pairs <= 0:
            return 0.0
        drawn_K = np.arange(K)
        return tokens * (1 - np.prod(np.maximum(0, 1 - pairs / (tokens * K) * problem.E / (problem.E - drawn_K))))

    peer_2G, rdma_2G = np.zeros((2, G)), np.zeros((2, G))
    for src in range(G):
        place = np.flatnonzero(node_G == node_G[src]).tolist().index(src)
        for there in range(problem.cluster.num_nodes):
            ranks = np.flatnonzero(node_G == there)
            sender = src
            if there != node_G[src]:
                sender = ranks[place % len(ranks)]
                crossed = reached(tokens_G[src], sent_GG[src, ranks].sum())
                rdma_2G[0, src] += crossed
                rdma_2G[1, sender] += crossed
            for r in ranks:
                if r != sender:
                    came = reached(tokens_G[src], sent_GG[src, r])
                    peer_2G[0, sender] += came
                    peer_2G[1, r] += came
    return busiest(problem, peer_2G, rdma_2G)


def counted_exchange_seconds(problem, plan, n):
    """The same, every token followed on its way: an expert's first tokens of a source go to the first slot that it may use."""
    cluster, G, S = problem.cluster, problem.G, plan.expert_NGS.shape[2]
    node_G, routed, (m, layer) = cluster.node_of_rank_G, problem.routed, divmod(n, problem.L)
    column = int(np.flatnonzero(routed.moe_layer_L == problem.moe_layer_L[layer])[0])
    peer, nic = defaultdict(int), defaultdict(int)
    for g in range(G):
        split_P = split_over_sources(problem.load_NGE, plan.expert_NGS, plan.quota_NGS, node_G, g)[n]
        slots = defaultdict(list)
        for p in range(G * S):
            slots[int(plan.expert_NGS[n].reshape(-1)[p])] += [p // S] * int(split_P[p])
        for t in np.flatnonzero((routed.micro_step_T == m) & (routed.rank_T == g)):
            ranks = {slots[int(e)].pop(0) for e in routed.topk_TLK[t, column]}
            for node in {int(node_G[r]) for r in ranks}:
                there = np.flatnonzero(node_G == node)
                place = int((node_G[:g] == node_G[g]).sum())
                sender = g if node == node_G[g] else int(there[place % len(there)])
                if sender != g:
                    for way, r in (("out", g), ("in", sender)):
                        i = int((node_G[:r] == node_G[r]).sum())
                        nic[way, node_G[r], i // cluster.nic_sharing] += 1
                for r in ranks & set(there.tolist()) - {sender}:
                    peer["out", sender] += 1
                    peer["in", r] += 1
    size = problem.model.token_bytes
    most = [max(of.values(), default=0) * size for of in (peer, nic)]
    return most[0] / cluster.kernel_bytes_per_s, most[1] / cluster.rdma_bytes_per_s


def fills_of(plan, cluster):
    """Per (node, layer, expert) that copies read from a host store: home, and the rank that writes it."""
    t, fills = plan.transfers, {}
    by_host = [c for c in range(len(t)) if t.link_C[c] == Link.HOST]
    for c in sorted(by_host, key=lambda c: (t.need_C[c], t.dst_C[c])):
        dst, home = int(t.dst_C[c]), int(plan.home_LE[t.layer_C[c], t.expert_C[c]] // plan.B)
        node = int(cluster.node_of_rank_G[dst])
        near = cluster.node_of_rank_G[home] == node
        fills.setdefault((node, int(t.layer_C[c]), int(t.expert_C[c])), (home, home if near else dst))
    return fills


def _of_pairs(model):
    """Share of the time per element that is of pairs: gathered twice, added up once, three times the expert's width."""
    of_pairs = model.num_topk * (3 + 3 * model.ffn_size / model.hidden_size)
    return of_pairs / (16 + of_pairs)


def stage_seconds(problem, plan, prefetch, known, plan_s):
    """Seconds of the stage, and (start, end) of every copy."""
    cluster, model, G, B = problem.cluster, problem.model, problem.G, problem.B
    node_G, t = cluster.node_of_rank_G, plan.transfers
    latency_s = 0.0 if G == 1 else cluster.rdma_latency_s if cluster.num_nodes > 1 else cluster.peer_latency_s
    nic_G = {}
    for node in range(cluster.num_nodes):
        for i, g in enumerate(np.flatnonzero(node_G == node)):
            nic_G[g] = (node, i // cluster.nic_sharing)
    links = {
        Link.PEER: (cluster.peer_bytes_per_s, cluster.peer_latency_s),
        Link.RDMA: (cluster.rdma_bytes_per_s, cluster.rdma_latency_s),
        Link.HOST: (cluster.host_bytes_per_s, cluster.host_latency_s),
    }
    own = np.inf if cluster.return_bytes_per_s is None else cluster.return_bytes_per_s  # of gradients
    free, slow = defaultdict(float), defaultdict(float)  # link -> free again; rank -> seconds lost to copies
    ready_G = np.zeros(G)  # when a rank may go on
    times, stored = {}, {}

    def send(src, dst, path, num_bytes, ready, most=np.inf):
        bandwidth, fixed = links[path]
        bandwidth = min(bandwidth, most)
        took = num_bytes / bandwidth + fixed
        if path == Link.HOST:
            used = [("host", dst)]
        elif path == Link.PEER:
            used = [("peer out", src), ("peer in", dst)]
        else:
            used = [("rdma out", nic_G[src]), ("rdma in", nic_G[dst])]
        start = max([ready, *(free[link] for link in used)])
        for link in used:
            free[link] = start + took
        for g in {src, dst} - {-1}:
            slow[g] += cluster.copy_contention * took * (2 if src == dst else 1)
        return start, start + took

    def fill(place):
        """When the expert is there; it takes its links before its first copy, and may have been on its way from the begin."""
        if place not in stored:
            home, writer = fills[place]
            arrived = 0.0 if home == writer else send(home, writer, Link.RDMA, model.expert_bytes, 0.0)[1]
            bandwidth, fixed = links[Link.HOST]
            took = model.expert_bytes / bandwidth + fixed
            free["store", writer] = stored[place] = max(arrived, free["store", writer]) + took
            slow[writer] += cluster.copy_contention * took
        return stored[place]

    def copy(c, ready):
        src, dst = int(t.src_C[c]), int(t.dst_C[c])
        if t.link_C[c] == Link.HOST:
            ready = max(ready, fill((int(node_G[dst]), int(t.layer_C[c]), int(t.expert_C[c]))))
        times[c] = send(src, dst, Link(int(t.link_C[c])), model.expert_bytes, ready)

    uses = problem.schedule.uses(problem.L)
    triples = list(zip(uses.micro_step_U.tolist(), uses.layer_U.tolist(), uses.phase_U.tolist(), strict=True))
    blocks = {(m, layer) for m, layer, phase in triples if phase == Phase.REFORWARD}
    late = {c for c in range(len(t)) if known == "router" and t.phase_C[c] == Phase.FORWARD}
    begin = {c: max(0, t.need_C[c] - prefetch, t.after_C[c] + 1) for c in range(len(t))}
    fills = fills_of(plan, cluster)
    round_of = rounds_of(t.need_C, t.slot_C, t.src_C, t.dst_C, cluster)  # its laws have tests of their own
    in_order = sorted(range(len(t)), key=lambda c: (t.need_C[c], round_of[c], c))
    begins = defaultdict(list)
    for c in in_order:
        if c not in late:
            begins[begin[c]].append(c)
    gone = defaultdict(list)  # buffer -> ends of gradients that left it
    returned = 0.0
    for c in begins[0]:
        copy(c, 0.0)
    for u in range(len(uses.use_U)):
        m, l, phase = int(uses.micro_step_U[u]), int(uses.layer_U[u]), int(uses.phase_U[u])  # noqa: E741
        n = m * problem.L + l
        peer_s, rdma_s = exchange_seconds(problem, plan, n)
        swap_s = 0.0 if G == 1 else latency_s + max(peer_s, rdma_s)
        window_G = np.full(G, cluster.layer_overhead_s)
        if problem.tokens_MG is not None:
            squares_G = np.zeros(G) if problem.attention_MG is None else problem.attention_MG[m]
            tokens_G = problem.tokens_MG[m].astype(float)
            scores_per_s = cluster.score_flops_per_s or cluster.attention_flops_per_s
            window_G += model.attention_flops(tokens_G, 0) / cluster.attention_flops_per_s
            window_G += model.attention_flops(0, squares_G) / scores_per_s
            window_G += tokens_G * 6 * model.hidden_size * model.shared_ffn_size / cluster.expert_flops_per_s
            window_G += tokens_G * (1 - _of_pairs(model)) * model.hidden_size * cluster.element_overhead_s
        compute_G, busy_G = np.zeros(G), np.zeros(G)
        for g in range(G):
            for s in range(problem.S):
                e, quota = plan.expert_NGS[n, g, s], plan.quota_NGS[n, g, s]
                element_s = _of_pairs(model) * model.hidden_size / model.num_topk * cluster.element_overhead_s
                tiles = math.ceil(quota / cluster.tile_pairs)
                compute_G[g] += tiles * cluster.tile_pairs * model.flops_per_pair / cluster.expert_flops_per_s
                compute_G[g] += quota * (cluster.pair_overhead_s + element_s)
                if quota > 0 or (s < B and problem.load_NE[n, e] > 0):
                    busy_G[g] += 1
        slot_back_s = cluster.slot_backward_s
        slot_back_s = cluster.backward_ratio * cluster.slot_overhead_s if slot_back_s is None else slot_back_s
        back_G = cluster.backward_ratio * compute_G + slot_back_s * busy_G
        compute_G += cluster.slot_overhead_s * busy_G
        if plan.num_replicas:
            tokens_G = np.zeros(G) if problem.tokens_MG is None else problem.tokens_MG[m]
            compute_G += cluster.planned_layer_s + cluster.planned_token_s * tokens_G
        needed = [c for c in in_order if t.need_C[c] == u]
        own_G = {g: [c for c in needed if t.dst_C[c] == g] for g in range(G)}
        away = [(g, s) for g in range(G) for s in range(B, problem.S) if plan.quota_NGS[n, g, s] > 0]

        def begin_of(g, dispatched, phase=phase, own_G=own_G, away=away):
            """When the first products of a rank may begin: its weights are there, its gradient buffers have been left."""
            begin = max([dispatched, *(times[c][1] for c in own_G[g])])
            for rank, s in away if phase == Phase.BACKWARD else ():
                left = gone[rank, s]
                if rank == g and len(left) >= problem.slot_depth:
                    begin = max(begin, left[-problem.slot_depth])
            return begin

        again = phase == Phase.BACKWARD and problem.schedule.reforward and (int(uses.micro_step_U[u]), l) not in blocks
        if phase != Phase.BACKWARD or again:
            now = max(ready_G[g] + window_G[g] + slow.pop(g, 0.0) for g in range(G))
            if phase == Phase.FORWARD:
                now += plan_s
            if known == "router":
                for c in needed:
                    if c not in times:
                        copy(c, now)
            back = max(begin_of(g, now + swap_s) + compute_G[g] for g in range(G)) + swap_s
            if phase != Phase.BACKWARD:
                for c in begins[u + 1]:
                    copy(c, back)
            ready_G[:] = back
        if phase == Phase.BACKWARD:
            now = max(ready_G[g] + slow.pop(g, 0.0) for g in range(G)) + swap_s
            first_G = [now if again else begin_of(g, now) for g in range(G)]
            back = max(first_G[g] + back_G[g] for g in range(G)) + swap_s
            leaving = [(0, s, g, int(plan.home_LE[l, plan.expert_NGS[n, g, s]] // B)) for g, s in away]
            rounds = rounds_of(*np.array(leaving, np.int64).reshape(-1, 4).T, cluster).tolist()
            for _, (_, s, g, home) in sorted(zip(rounds, leaving, strict=True), key=lambda x: x[0]):
                path = Link.PEER if node_G[g] == node_G[home] else Link.RDMA
                _, end = send(g, home, path, model.gradient_bytes, back, own)
                gone[g, s].append(end)
                returned = max(returned, end)
            for c in begins[u + 1]:
                copy(c, back)
            ready_G = back + cluster.window_backward_ratio * window_G
    return max(ready_G.max(), returned), times
