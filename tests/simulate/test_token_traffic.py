"""Messages counted token by token, against a slow count over what the split law sends, and against the estimate."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from slow_simulator import counted_exchange_seconds

import foremoe
from foremoe.simulate import even_routing, simulate
from foremoe.simulate.systems import ep_groups
from foremoe.simulate.traffic import exchange
from foremoe.testing import strategies as draws


def cluster_of(num_ranks, ranks_per_node, **changes):
    cluster = foremoe.Cluster.preset("8xh100", num_ranks, ranks_per_node=ranks_per_node, dispatch="node")
    return dataclasses.replace(cluster, **changes)


def recorded(seed=0, num_ranks=4, ranks_per_node=2, num_tokens=96, even=False, **changes):
    """A problem of random routing with its tokens; some of them are not known."""
    rng, L, E, K = np.random.default_rng(seed), 2, 8, 3
    topk_TLK = np.argsort(rng.random((num_tokens, L, E)) ** (1.0 if even else rng.uniform(0.2, 3.0, (L, E))), axis=2)[:, :, :K]
    lengths_Q = np.full(num_tokens // 8, 8)
    trace = foremoe.RoutingTrace(topk_TLK=topk_TLK, num_experts=E, seq_len_Q=lengths_Q, known_T=rng.random(num_tokens) < 0.9)
    work = foremoe.Workload.from_trace(trace, num_ranks=num_ranks, tokens_per_rank=num_tokens // num_ranks // 2)
    model = dataclasses.replace(
        foremoe.Model.preset("qwen3-30b-a3b"), name="small", num_layers=L, num_experts=E, num_topk=K
    )  # fmt: skip
    routed = foremoe.RoutedTokens.of(trace, work)
    cluster = cluster_of(num_ranks, ranks_per_node, **changes)
    return foremoe.Problem.of(work, cluster, model=model, routed=routed), trace, work


@examples(40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 2), (4, 4), (4, 1), (8, 3), (2, 1)]), st.data())
def test_equals_a_slow_count(seed, sizes, data):
    problem, _, _ = recorded(seed, *sizes, nic_sharing=data.draw(st.integers(1, 2)))
    plan = data.draw(draws.plans(problem))
    found = exchange(problem, plan, np.ones(problem.N, np.int64))
    for n in range(problem.N):
        expected = counted_exchange_seconds(problem, plan, n)
        assert (found.peer_N[n], found.rdma_N[n]) == pytest.approx(expected, rel=1e-12, abs=0)


def test_the_estimate_meets_the_count_of_independent_tokens():
    problem, _, _ = recorded(3, num_tokens=8192, even=True)
    plan, _ = foremoe.Planner().plan(problem)
    counted = exchange(problem, plan, np.ones(problem.N, np.int64))
    guessed = exchange(dataclasses.replace(problem, routed=None), plan, np.ones(problem.N, np.int64))
    assert counted.rdma_N == pytest.approx(guessed.rdma_N, rel=0.03)
    assert counted.peer_N == pytest.approx(guessed.peer_N, rel=0.03)
    assert (counted.rdma_N != guessed.rdma_N).any()


def test_groups_count_their_own_tokens():
    whole, _, work = recorded(5, 4, 1)
    routed = whole.routed
    for i, group in enumerate(ep_groups(work, 2)):
        mine = foremoe.Problem.of(group, cluster_of(2, 1), model=whole.model, routed=routed.of_ranks(2 * i, 2))
        plan, _ = foremoe.Planner().plan(mine)
        found = exchange(mine, plan, np.ones(mine.N, np.int64))
        assert found.rdma_N == pytest.approx([counted_exchange_seconds(mine, plan, n)[1] for n in range(mine.N)])


def test_other_tokens_are_refused():
    problem, _, _ = recorded(1)
    other, trace, work = recorded(2)
    plan, _ = foremoe.Planner().plan(problem)
    with pytest.raises(foremoe.InputError, match="differ by"):
        simulate(dataclasses.replace(problem, routed=other.routed), plan)
    lacking = dataclasses.replace(problem.routed, moe_layer_L=np.array([0, 7]))
    with pytest.raises(foremoe.InputError, match="lack some"):
        simulate(dataclasses.replace(problem, routed=lacking), plan)
    with pytest.raises(foremoe.InputError, match="not from"):
        foremoe.RoutedTokens.of(recorded(4)[1], work)
    counts = foremoe.Workload.from_counts(work.load_MLGE, num_topk=work.num_topk)
    with pytest.raises(foremoe.InputError, match="deal the trace"):
        foremoe.RoutedTokens.of(trace, counts)


def test_other_loads_have_no_tokens():
    problem, _, _ = recorded()
    assert even_routing(problem).routed is None
    assert problem[:1].routed is None
    assert problem.with_load(problem.load_MLE).routed is None
    rerouted = dataclasses.replace(foremoe.Planner(), foresight=foremoe.Rerouted(0.5))
    assert rerouted.plan(problem)[0].load_MLE.shape == problem.load_MLE.shape
