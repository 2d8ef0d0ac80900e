"""Prices of an exchange: by hand, and beside what the simulator finds for even routing."""

import dataclasses
import itertools

import numpy as np
import pytest

import foremoe
from foremoe import Cluster, Model, Planner, Problem
from foremoe.machine.cluster import DISPATCHES
from foremoe.problem.exchange import pair_prices
from foremoe.problem.kernels.reached import alone, reached
from foremoe.simulate.stage import even_routing
from foremoe.simulate.traffic import exchange

MODEL = dataclasses.replace(Model.preset("mixtral-8x7b"), num_topk=2, hidden_size=50, bytes_per_activation=2.0)  # 100 bytes


def cluster(dispatch: str, num_ranks: int, **changes: object) -> Cluster:
    given = {
        "peer_bytes_per_s": 400.0,
        "exchange_bytes_per_s": 100.0,
        "rdma_bytes_per_s": 50.0,
        "plain_bytes_per_s": None,
        **changes,
    }
    return dataclasses.replace(Cluster.preset("8xh100", num_ranks, 2, dispatch=dispatch), **given)


@pytest.mark.parametrize(
    ("dispatch", "num_ranks", "changes", "prices"),
    [
        # One node of two: half of all pairs travel, at 4 bytes per ms; a message in 1/4 s.
        ("pairs", 2, {}, (0.25 / 2, 0.0, 0.5 * 0.25)),
        # Two nodes of two: half of all pairs cross, at 2 s each; peer links do less in the meantime.
        ("pairs", 4, {}, (0.0, 2.0 / 4, 0.5 * 2.0)),
        # Two ranks of a node share its NIC: it carries both, and the busiest rank's excess has all of it.
        ("pairs", 4, {"nic_sharing": 2}, (0.0, 4.0 / 4, 0.5 * 2.0)),
        # Top-2 of 8, 4 in every place: a token's second expert is elsewhere with 4/7.
        ("node", 4, {}, (0.0, 4 / 7 * 2.0 / 4, 0.0)),
        # One node of two by its kernels.
        ("node", 2, {}, (4 / 7 * 1.0 / 2, 0.5 * 4 / 7 * 1.0 / 2, 0.5 * 4 / 7 * 1.0)),
    ],
)
def test_by_hand(dispatch, num_ranks, changes, prices):
    assert pair_prices(MODEL, cluster(dispatch, num_ranks, **changes)) == pytest.approx(prices)


def test_what_a_token_reaches_is_what_distinct_experts_reach():
    places = np.arange(8) // 2  # 8 experts in 4 places
    chosen = list(itertools.combinations(range(8), 3))
    found = np.mean([place in places[list(experts)] for experts in chosen for place in range(4)])
    assert reached(1.0, 3 / 4, 3, 8) == pytest.approx(found)
    others = [[places[e] for e in experts].count(places[one]) == 1 for experts in chosen for one in experts]
    assert alone(1 / 4, 3, 8) == pytest.approx(np.mean(others))
    assert reached(0.0, 0.0, 3, 8) == 0.0 and reached(2.0, 6.0, 3, 8) == 2.0 and alone(1 / 8, 3, 8) == 1.0


def test_peer_links_that_are_busier_than_nics():
    """Two nodes of two: pairs from the other node need no peer link for the half that arrives on the rank that serves it."""
    prices = pair_prices(MODEL, cluster("node", 4, exchange_bytes_per_s=10.0, rdma_bytes_per_s=1e6))
    # Top-2 of 8, 2 on every rank: a token's second expert is elsewhere with 6/7.
    saved = 6 / 7
    assert prices == pytest.approx((saved * 10.0 / 4, 0.5 * saved * 10.0 / 4, 0.5 * saved * 10.0))


@pytest.mark.parametrize("num_topk", [1, 2, 4])
@pytest.mark.parametrize(("num_ranks", "peer", "rdma"), [(2, 1.0, 1e3), (4, 1.0, 1e3), (8, 1.0, 1e6), (8, 1e3, 1.0)])
def test_no_price_is_negative(num_ranks, num_topk, peer, rdma):
    model = dataclasses.replace(MODEL, num_topk=num_topk)
    for name in DISPATCHES:
        given = cluster(name, num_ranks, peer_bytes_per_s=peer, exchange_bytes_per_s=peer, rdma_bytes_per_s=rdma)
        assert min(pair_prices(model, given)) >= -1e-9


def test_one_expert_per_token_makes_nodes_no_better_than_pairs():
    model = dataclasses.replace(MODEL, num_topk=1)
    for num_ranks in (2, 8):
        pairs, node = (pair_prices(model, cluster(name, num_ranks, exchange_bytes_per_s=None)) for name in DISPATCHES)
        assert (pairs.peer_s, pairs.rdma_s) == pytest.approx((node.peer_s, node.rdma_s), abs=1e-9) or num_ranks == 2
        assert pairs.peer_s == pytest.approx(node.peer_s)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("num_ranks", [8, 16, 64])
@pytest.mark.parametrize("kind", ["8xh100", "8xpcie"])
def test_even_routing_takes_as_long_as_on_the_timeline(dispatch, num_ranks, kind):
    work = foremoe.synthetic_workload(
        "qwen3-30b-a3b", num_ranks=num_ranks, tokens_per_rank=1024, micro_steps=1, num_layers=2, regime="mid"
    )
    problem = even_routing(Problem.of(work, Cluster.preset(kind, num_ranks, dispatch=dispatch), redundant=0))
    plan, _ = Planner(rank=()).plan(problem)
    found = exchange(problem, plan, np.ones(problem.N, np.int64))
    simulated_s = 4 * (np.maximum(found.peer_N, found.rdma_N) + problem.cluster.exchange_latency_s)
    priced_s = (plan.cost_ML.dispatch_s + plan.cost_ML.combine_s).reshape(-1)
    np.testing.assert_allclose(priced_s, simulated_s, rtol=0.03)
