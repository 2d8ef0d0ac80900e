"""Pack solvers: the laws of the level, and what each of them promises beyond."""

import dataclasses
import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe.base.errors import InputError
from foremoe.machine.elements import pair_overhead_seconds
from foremoe.machine.window import window_seconds
from foremoe.problem.exchange import pair_prices
from foremoe.solvers import AsGiven, BalancedTokens, ExpertAware, PackSolver
from foremoe.solvers.pack import expert_aware
from foremoe.solvers.pack import kernels as pack_kernels
from foremoe.solvers.pack.balanced_tokens import attention_flops, model_of, rank_tokens
from foremoe.solvers.pack.value import home_pairs, home_ranks
from foremoe.testing import PackSolverTests
from foremoe.testing.level_tests import Batch, batches


class TestAsGivenLaws(PackSolverTests):
    solver = AsGiven()


class TestAsGivenShuffledLaws(PackSolverTests):
    solver = AsGiven(shuffle=True)
    few_micro_steps = False


class TestBalancedTokensLaws(PackSolverTests):
    solver = BalancedTokens()


class TestExpertAwareLaws(PackSolverTests):
    solver = ExpertAware(sweeps=30)


class TestExpertAwareAloneLaws(PackSolverTests):
    solver = ExpertAware(skew_weight=1.0, sweeps=30, ranks_per_node=2)


PACKERS = [BalancedTokens(), ExpertAware(sweeps=30), ExpertAware(skew_weight=1.0, ranks_per_node=2)]
AWARE = [ExpertAware(sweeps=20), ExpertAware(skew_weight=1.0, ranks_per_node=2, sweeps=20)]


def tokens_in_budget(batch, found):
    """Tokens per rank [M, G] of the micro-steps within the budget."""
    tokens_MG = rank_tokens(np.array(batch.seq_len_Q), *found, batch.num_ranks)
    return tokens_MG[tokens_MG.sum(axis=1) <= batch.num_ranks * batch.tokens_per_rank]


def late_attention(batch, found):
    attention_Q = attention_flops(batch.trace())
    per_rank = {}
    for m, g, amount in zip(*found, attention_Q, strict=True):
        per_rank[m, g] = per_rank.get((m, g), 0.0) + amount
    return sum(max(v for (n, _), v in per_rank.items() if n == m) for m in set(found[0].tolist()))


@pytest.mark.parametrize("packer", [BalancedTokens(), *AWARE], ids=repr)
@given(batch=batches())
@examples(40)
@example(batch=Batch([1, 9, 4, 7], [0] * 4, 2, 10, 4, 1, False, 0))
def test_the_fullest_rank_is_no_fuller_than_limit_or_file_order(packer, batch):
    mine = tokens_in_budget(batch, batch.pack(packer)).max(initial=0)
    assert mine <= max(batch.tokens_per_rank, tokens_in_budget(batch, batch.pack(AsGiven())).max(initial=0))


@given(batch=batches(max_groups=1))
def test_balanced_tokens_never_loses_to_file_order(batch):
    mine, given_ = batch.pack(BalancedTokens()), batch.pack(AsGiven())
    assert mine[0].max() <= given_[0].max()
    if mine[0].max() == given_[0].max():
        assert late_attention(batch, mine) <= late_attention(batch, given_) * (1 + 1e-12)


def test_balanced_tokens_spreads_long_sequences_over_ranks():
    batch = Batch([9, 1, 9, 1, 1, 1, 9, 1, 9, 1, 1, 1], [0] * 12, 4, 12, 8, 1, False, 0)
    found = batch.pack(BalancedTokens())
    assert found[0].max() == 0 and sorted(found[1][np.array(batch.seq_len_Q) == 9]) == [0, 1, 2, 3]
    assert sorted(rank_tokens(np.array(batch.seq_len_Q), *found, 4)[0]) == [11, 11, 11, 11]


def test_balanced_tokens_needs_fewer_micro_steps_where_next_fit_wastes_room():
    batch = Batch([6, 5, 4, 5], [0] * 4, 2, 5, 4, 1, False, 0)
    assert batch.pack(AsGiven())[0].tolist() == [0, 1, 1, 2]
    assert batch.pack(BalancedTokens())[0].max() == 1


@pytest.mark.parametrize("packer", AWARE, ids=repr)
@given(batch=batches())
@examples(40)
def test_expert_aware_never_loses_to_its_starts_under_its_objective(packer, batch):
    trace = batch.trace()
    value = lambda found: packer.objective(trace, *found, num_ranks=batch.num_ranks)  # noqa: E731
    mine = value(batch.pack(packer, trace))
    for other in (AsGiven(), BalancedTokens()):
        assert mine <= value(batch.pack(other, trace))


@given(batch=batches(max_sequences=10), data=st.data())
def test_the_objective_is_its_plain_form(batch, data):
    trace, G, L, E = batch.trace(), batch.num_ranks, batch.num_layers, batch.num_experts
    packer = ExpertAware(
        skew_weight=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        redundant=data.draw(st.integers(0, 2)),
        ranks_per_node=data.draw(st.integers(1, 3)),
    )
    rng = np.random.default_rng(batch.seed)
    home_LE = rng.permuted(np.tile(np.arange(E), (L, 1)), axis=1)
    micro_step_Q, rank_Q = batch.pack(AsGiven(), trace)
    model = model_of(trace)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=G, ranks_per_node=packer.ranks_per_node)
    flops_per_s = cluster.flops_per_s * cluster.compute_efficiency
    latency_s = 0.0 if G == 1 else cluster.rdma_latency_s if cluster.num_nodes > 1 else cluster.peer_latency_s
    per_pair_s = 3 * (model.flops_per_pair / flops_per_s + pair_overhead_seconds(model, cluster))
    prices = pair_prices(model, cluster)
    near_s, far_s, over_s = 4 * prices.peer_s, 4 * prices.rdma_s, per_pair_s + 4 * prices.late_s
    total, wanted_VLE = 0.0, np.zeros((cluster.num_nodes, L, E))
    for m in range(micro_step_Q.max() + 1):
        window_G = np.zeros(G)
        load_LG = np.zeros((L, G))
        for q in np.flatnonzero(micro_step_Q == m):
            n, g = batch.seq_len_Q[q], rank_Q[q]
            window_G[g] += float(window_seconds(model, cluster, n, n**2)) - cluster.layer_overhead_s
            for t in range(trace.cuts[q], trace.cuts[q + 1]):
                if trace.known_T is not None and not trace.known_T[t]:
                    continue
                for layer, e in [(i, e) for i in range(L) for e in trace.topk_TLK[t, i]]:
                    home = home_LE[layer, e] * G // E
                    load_LG[layer, home] += 1
                    if cluster.node_of_rank_G[home] != cluster.node_of_rank_G[g]:
                        total += far_s
                        wanted_VLE[cluster.node_of_rank_G[g], layer, e] += 1
                    elif home != g:
                        total += near_s
        total += 3 * L * (window_G.max() + cluster.layer_overhead_s)
        mean_L = load_LG.mean(axis=1)
        total += (per_pair_s * mean_L + packer.skew_weight * over_s * (load_LG.max(axis=1) - mean_L)).sum()
        total += L * (4 * latency_s + 3 * cluster.slot_overhead_s * -(-E // G))
    for v, wanted_LE in enumerate(wanted_VLE):
        num = packer.redundant * (cluster.node_of_rank_G == v).sum()
        total -= (far_s - near_s) * np.sort(wanted_LE, axis=1)[:, ::-1][:, :num].sum()
    got = packer.objective(trace, micro_step_Q, rank_Q, num_ranks=G, home_LE=home_LE)
    assert got == pytest.approx(total, rel=1e-7)  # windows are whole FLOPs


@given(batch=batches(), data=st.data())
def test_the_search_adds_up_its_own_gains_rightly(batch, data):
    seen = []
    original = pack_kernels.anneal
    packer = ExpertAware(
        skew_weight=data.draw(st.sampled_from([0.0, 1.0])),
        redundant=data.draw(st.sampled_from([0, 1])),
        ranks_per_node=2,
        sweeps=data.draw(st.sampled_from([3, 30])),
    )
    trace = batch.trace()
    value = lambda *found: packer.objective(trace, *found, num_ranks=batch.num_ranks)  # noqa: E731

    def watched(*args):
        # The last three are the state: micro-steps, ranks, tokens.
        before = value(args[-3], args[-2])
        gain_s = original(*args)
        seen.append((before + gain_s, value(args[-3], args[-2]), gain_s))
        return gain_s

    # Hot, so that many changes are accepted that lengthen the stage.
    with mock.patch.object(pack_kernels, "anneal", watched), mock.patch.object(expert_aware, "_HEAT", 1.0):
        batch.pack(packer, trace)
    for told, real, gain_s in seen:
        assert gain_s <= 0.0
        # The search keeps to the replicas foreseen before it; those foreseen after it can only be better.
        assert real <= told * (1 + 1e-9)
        assert packer.redundant or told == pytest.approx(real, rel=1e-9)


def test_no_micro_step_is_emptied():
    micro_step_Q, rank_Q = np.array([0, 1]), np.zeros(2, np.int64)
    lengths_X, pairs_XLG = np.array([1, 1, 0]), np.zeros((3, 1, 2), np.int32)
    low_Q, high_Q, order_Q = np.zeros(2, np.int64), np.full(2, 2), np.arange(2)
    sequences = pack_kernels.Sequences(
        lengths_X, lengths_X.astype(float), pairs_XLG, np.zeros((3, 2)), order_Q, order_Q, low_Q, high_Q
    )
    terms, tokens_MG = pack_kernels.Terms(1.0, 0.0, 9, 9), np.array([[1, 0], [1, 0]])
    pack_kernels.anneal(sequences, terms, 500, 1e9, np.uint64(0), micro_step_Q, rank_Q, tokens_MG)
    assert sorted(micro_step_Q) == [0, 1]


@pytest.mark.parametrize("num_sequences", [8, 12, 16])
def test_no_rank_is_filled_above_its_room_for_the_sake_of_locality(num_sequences):
    # All experts chosen live on rank 0, where every sequence would be served without dispatch.
    topk_TLK = np.tile([[0, 1]], (10 * num_sequences, 4, 1))
    trace = foremoe.RoutingTrace(topk_TLK=topk_TLK, num_experts=8, seq_len_Q=np.full(num_sequences, 10))
    packer = ExpertAware(skew_weight=0.0, redundant=0, ranks_per_node=1)
    solve = lambda tokens_per_rank: packer.solve(trace, num_ranks=2, tokens_per_rank=tokens_per_rank)  # noqa: E731
    found = solve(40)
    tokens_MG = rank_tokens(trace.seq_len_Q, *found, 2)
    assert tokens_MG.max() == 40 and (tokens_MG[:, 0] == np.minimum(40, tokens_MG.sum(axis=1))).all()
    assert not solve(1000)[1].any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("skew_weight", [0.1, 1.0])
def test_expert_aware_comes_close_to_the_best_of_all_packings_of_small_batches(seed, skew_weight):
    rng = np.random.default_rng(seed)
    batch = Batch(rng.integers(2, 9, 6).tolist(), [0] * 6, 2, 9, 4, 2, False, seed)
    packer, trace = ExpertAware(skew_weight=skew_weight, redundant=0, ranks_per_node=1, sweeps=1000), batch.trace()
    found = batch.pack(packer, trace)
    num, room = int(found[0].max()) + 1, tokens_in_budget(batch, batch.pack(BalancedTokens())).max(initial=batch.tokens_per_rank)
    best = np.inf
    for steps in itertools.product(range(num), repeat=6):
        if len(set(steps)) < num:
            continue
        for ranks in itertools.product(range(2), repeat=6):
            placed = np.array(steps, np.int32), np.array(ranks, np.int32)
            tokens_MG = rank_tokens(np.array(batch.seq_len_Q), *placed, 2)
            if tokens_MG.max() <= room and tokens_MG.sum(axis=1).max() <= 18:
                best = min(best, packer.objective(trace, *placed, num_ranks=2))
    # Limits so tight that only three sequences at once can change places leave it a little short.
    assert packer.objective(trace, *found, num_ranks=2) <= best * 1.002


def test_sequences_start_where_their_experts_live():
    # Sequences of two kinds, each with experts of one node only; file order puts them on the wrong one.
    topk_TLK = np.repeat([[[4, 5]], [[0, 1]], [[6, 7]], [[2, 3]]], 40, axis=0)
    trace = foremoe.RoutingTrace(topk_TLK=topk_TLK, num_experts=8, seq_len_Q=np.full(16, 10))
    packed = lambda packer, **more: packer.solve(trace, num_ranks=4, tokens_per_rank=40, **more)[1]  # noqa: E731
    node_Q = np.repeat([1, 0, 1, 0], 4)
    assert (packed(ExpertAware(ranks_per_node=2, redundant=0)) // 2 == node_Q).all()
    swapped_LE = np.array([[4, 5, 6, 7, 0, 1, 2, 3]])
    assert (packed(ExpertAware(ranks_per_node=2, redundant=0), home_LE=swapped_LE) // 2 == 1 - node_Q).all()
    with pytest.raises(InputError, match="permutation"):
        packed(ExpertAware(), home_LE=np.zeros((1, 8)))


def test_sequences_of_like_use_gather_for_the_replicas_to_come():
    # Two kinds of sequences; the experts of both live on both nodes, so that homes speak for neither.
    kind_Q = np.array([0, 0, 0, 1, 1, 0, 1, 1] * 2)
    topk_TLK = np.repeat(np.array([[0, 1, 4, 5], [2, 3, 6, 7]])[kind_Q][:, None], 10, axis=0)
    trace = foremoe.RoutingTrace(topk_TLK=topk_TLK, num_experts=8, seq_len_Q=np.full(16, 10))
    apart_Q, mixed_Q = 2 * kind_Q, 2 * (np.arange(16) % 2)
    for redundant in (0, 1):
        packer = ExpertAware(ranks_per_node=2, skew_weight=0.0, redundant=redundant)
        value = lambda rank_Q: packer.objective(trace, np.zeros(16, np.int32), rank_Q, num_ranks=4)  # noqa: B023, E731
        assert value(apart_Q) < value(mixed_Q) if redundant else value(apart_Q) == value(mixed_Q)
    node_Q = ExpertAware(ranks_per_node=2, skew_weight=0.0).solve(trace, num_ranks=4, tokens_per_rank=40)[1] // 2
    assert (node_Q == kind_Q).all() or (node_Q == 1 - kind_Q).all()


def test_kinds_of_sequences_are_mixed_so_that_ranks_are_even():
    # File order keeps apart what loads rank 0 and what loads rank 1.
    topk_TLK = np.repeat([[[0, 1]], [[2, 3]]], 80, axis=0)
    trace = foremoe.RoutingTrace(topk_TLK=topk_TLK, num_experts=4, seq_len_Q=np.full(16, 10))
    work = foremoe.Workload.from_trace(trace, num_ranks=2, tokens_per_rank=40, packer=ExpertAware(skew_weight=1.0))
    assert work.M == 2 and (work.load_MLE.reshape(2, 2, 2).sum(axis=2) == 80).all()
    given_ = foremoe.Workload.from_trace(trace, num_ranks=2, tokens_per_rank=40)
    assert (given_.load_MLE.reshape(2, 2, 2).sum(axis=2).max(axis=1) == 160).all()


@given(batch=batches(max_sequences=8))
@examples(20)
def test_kernels_equal_plain_python(batch):
    packer = ExpertAware(sweeps=3, skew_weight=0.5)
    compiled = batch.pack(packer)
    helpers = ["add_rows", "apply", "attention_and_dispatch_s", "count_pairs", "largest_with", "packing_of", "propose", "tops"]
    kept = {name: getattr(pack_kernels, name) for name in ("anneal", *helpers, "exchange_load")}
    for name, kernel in kept.items():
        setattr(pack_kernels, name, kernel.py_func)
    try:
        # numpy warns where a random state wraps around, which is meant.
        with np.errstate(over="ignore"):
            interpreted = batch.pack(packer)
    finally:
        for name, kernel in kept.items():
            setattr(pack_kernels, name, kernel)
    assert (compiled[0] == interpreted[0]).all() and (compiled[1] == interpreted[1]).all()


@pytest.mark.parametrize("packer", PACKERS, ids=repr)
def test_packers_are_values_and_work_where_packers_go(packer):
    assert foremoe.parse(repr(packer)) == packer and hash(packer) == hash(foremoe.parse(repr(packer)))
    planner = foremoe.Planner().using(packer)
    assert planner.pack == packer
    trace = foremoe.synthetic_trace("qwen3-30b-a3b", num_sequences=20, mean_length=30, num_layers=2, regime="mid")
    groups = np.repeat([0, 1], 10)
    work = planner.workload(trace, num_ranks=4, tokens_per_rank=50, sample_group_Q=groups)
    assert work.tokens_MG.sum() == trace.T and work.dealt.packer == repr(packer)


def test_pairs_by_home_rank_are_counted_per_sequence():
    batch = Batch([4, 1, 6], [0, 0, 0], 2, 8, 7, 2, True, 3)
    trace = batch.trace()
    pairs_XLG = home_pairs(trace, 2, home_ranks(trace, 2, None))
    assert pairs_XLG.shape == (4, 2, 2) and not pairs_XLG[3].any()
    work = foremoe.Workload.from_trace(trace, num_ranks=2, tokens_per_rank=8)
    of_rank_GE = np.arange(7) * 2 // 7 == np.arange(2)[:, None]
    assert (pairs_XLG.sum(axis=0) == work.load_MLE.sum(axis=0) @ of_rank_GE.T).all()


@dataclasses.dataclass(frozen=True)
class Broken(PackSolver):
    """As given, with one law broken."""

    how: str

    def solve(self, trace, *, num_ranks, tokens_per_rank, sample_group_Q=None, seed=0):
        group_Q = np.zeros(trace.Q, np.int64) if self.how == "mixes groups" else sample_group_Q
        tokens = {"budget": 2 * tokens_per_rank, "where file order needs": max(1, tokens_per_rank // 2)}.get(
            self.how, tokens_per_rank
        )
        micro_step_Q, rank_Q = AsGiven().solve(trace, num_ranks=num_ranks, tokens_per_rank=tokens, sample_group_Q=group_Q)
        if self.how == "does not exist":
            rank_Q += 1
        if self.how == "leave no gaps":
            micro_step_Q += micro_step_Q > 0
        if self.how == "results for one input":
            rank_Q = np.random.default_rng().integers(num_ranks, size=trace.Q, dtype=np.int32)
        return micro_step_Q, rank_Q


@pytest.mark.parametrize(
    ("how", "law"),
    [
        ("does not exist", "test_packings_are_valid"),
        ("leave no gaps", "test_packings_are_valid"),
        ("mixes groups", "test_packings_are_valid"),
        ("budget", "test_packings_are_valid"),
        ("where file order needs", "test_packings_are_valid"),
        ("results for one input", "test_the_same_input_gives_the_same_bytes"),
    ],
)
def test_the_suite_catches_a_broken_packer(how, law):
    suite = type("TestBroken", (PackSolverTests,), {"solver": Broken(how)})()
    inner = getattr(suite, law).hypothesis.inner_test
    run = settings(phases=(Phase.generate,), database=None)(given(batch=batches())(lambda batch: inner(suite, batch)))
    with pytest.raises(AssertionError, match=how):
        run()
