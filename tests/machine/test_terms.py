"""Terms of a layer's time: tiles, window, host, returns, precisions; at their defaults they change nothing."""

import dataclasses

import numpy as np
import pytest

from bench.published_runs import recompute_seconds
from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster
from foremoe.machine.elements import element_shares, pair_overhead_seconds, token_element_seconds
from foremoe.machine.host import host_waits_s
from foremoe.machine.model import Model
from foremoe.machine.tiles import padded_pairs
from foremoe.machine.window import window_seconds

MODEL = Model.of(num_layers=2, num_experts=8, num_topk=2, hidden_size=64, ffn_size=96, attention_params=1000, num_heads=2)
PLAIN = dataclasses.replace(
    Cluster.preset("8xh100", 8), layer_overhead_s=1e-4, element_overhead_s=0.0, score_flops_per_s=None, tile_pairs=1
)


def test_pairs_are_rounded_up_to_tiles():
    quota_S = np.array([0, 1, 127, 128, 129])
    assert padded_pairs(quota_S, 128).tolist() == [0, 128, 128, 128, 256]
    assert (padded_pairs(quota_S, 1) == quota_S).all()
    assert padded_pairs(5, 4) == 8


def test_window_without_terms_is_attention_and_a_fixed_part():
    flops = MODEL.attention_flops(100, 5000)
    assert window_seconds(MODEL, PLAIN, 100, 5000) == flops / PLAIN.attention_flops_per_s + 1e-4


def test_every_term_of_the_window():
    model = dataclasses.replace(MODEL, shared_ffn_size=32)
    cluster = dataclasses.replace(PLAIN, score_flops_per_s=1e12, element_overhead_s=1e-11, attention_efficiency=0.25)
    projections_s = 2 * 1000 * 100 / (0.25 * cluster.flops_per_s)
    scores_s = 2 * (128 + 128) * 5000 / 1e12
    shared_s = 100 * 2 * 3 * 64 * 32 / cluster.expert_flops_per_s
    expected_s = projections_s + scores_s + shared_s + 100 * token_element_seconds(model, cluster) + 1e-4
    assert window_seconds(model, cluster, 100, 5000) == pytest.approx(expected_s, rel=1e-12)


def test_a_layer_takes_the_longer_of_host_and_device():
    waits = host_waits_s(1.0, np.array([2.0, 3.0, 9.0]), 3.0)
    assert waits == pytest.approx([1 / 3, 0.0, 0.0])


def test_returns_have_a_bandwidth_of_their_own():
    cluster = dataclasses.replace(PLAIN, return_bytes_per_s=None)
    assert cluster.return_seconds(1e9) == cluster.copy_seconds(1e9)[:2]
    slow = dataclasses.replace(cluster, return_bytes_per_s=1e9)
    assert slow.return_seconds(1e9) == (1.0 + slow.peer_latency_s, 1.0 + slow.rdma_latency_s)
    quick = dataclasses.replace(cluster, return_bytes_per_s=1e15)
    assert quick.return_seconds(1e9) == cluster.return_seconds(1e9)


def test_each_dispatch_has_its_bandwidth_inside_a_node():
    both = dataclasses.replace(PLAIN, exchange_bytes_per_s=2e9, plain_bytes_per_s=3e9)
    assert dataclasses.replace(both, dispatch="node").kernel_bytes_per_s == 2e9
    assert dataclasses.replace(both, dispatch="pairs").kernel_bytes_per_s == 3e9
    bare = dataclasses.replace(both, plain_bytes_per_s=None, dispatch="pairs")
    assert bare.kernel_bytes_per_s == bare.peer_bytes_per_s


def test_precision_is_a_table_of_a_preset():
    with pytest.raises(InputError, match="no precision 'fp4'"):
        Cluster.preset("8xh100", precision="fp4")
    assert Cluster.preset("8xh100").precision == "bf16"
    eight = Cluster.preset("8xh100", precision="FP8")
    assert (eight.precision, eight.flops_per_s) == ("fp8", 1979e12)
    assert Cluster.from_dict(eight.to_dict()).same_as(eight)
    assert "precision" not in Cluster.preset("8xh100").to_dict()


def test_elements_of_even_routing_are_counted_once():
    cluster = dataclasses.replace(PLAIN, pair_overhead_s=0.0, element_overhead_s=1e-11)
    both_s = token_element_seconds(MODEL, cluster) + MODEL.num_topk * pair_overhead_seconds(MODEL, cluster)
    assert both_s == pytest.approx(64 * 1e-11)
    assert pair_overhead_seconds(MODEL, PLAIN) == PLAIN.pair_overhead_s


def test_recompute_runs_parts_of_the_forward_again():
    model = dataclasses.replace(MODEL, shared_ffn_size=32)
    cluster = dataclasses.replace(PLAIN, score_flops_per_s=1e12, element_overhead_s=1e-11)
    assert sum(element_shares(model)) < 1.0

    def again_s(*parts: str) -> float:
        return recompute_seconds(model, cluster, parts, 100, 5000)

    assert again_s() == again_s("mla_up_proj") == 0.0
    assert again_s("core_attn") == pytest.approx(2 * (128 + 128) * 5000 / 1e12)
    assert again_s("mlp") == pytest.approx(100 * 2 * 3 * 64 * 32 / cluster.expert_flops_per_s)
    norms, activation, moved = element_shares(model)
    assert again_s("layernorm", "moe_act") == pytest.approx((norms + activation) * 100 * 64 * 1e-11)
    experts_s = 100 * (2 * model.flops_per_pair + 2 * model.shared_params) / cluster.expert_flops_per_s
    assert again_s("moe") == pytest.approx(experts_s + (activation + moved) * 100 * 64 * 1e-11)
