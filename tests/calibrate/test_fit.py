"""The fit: constants that made the points come back, with noise, with points far off, and from both sides of the knee."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from foremoe.base.errors import InputError
from foremoe.calibrate import Measured, Point, fit
from foremoe.calibrate.link_fits import copy_seconds
from foremoe.calibrate.nonnegative import nonnegative, robust
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model

MODEL = Model(
    name="test", num_layers=4, first_moe_layer=0, num_experts=32, num_topk=4, hidden_size=256, ffn_size=512, bytes_per_weight=4.0,
    bytes_per_activation=4.0, attention_params=4 * 256 * 256, num_heads=4, qk_head_dim=64, v_head_dim=64, source="test",
)  # fmt: skip
BASE = Cluster(
    name="truth", num_ranks=2, node_of_rank_G=np.zeros(2, np.int32), flops_per_s=1e11, compute_efficiency=0.5,
    slot_overhead_s=1e-4, peer_bytes_per_s=1e9, rdma_bytes_per_s=1e9, host_bytes_per_s=8e9, peer_latency_s=2e-4,
    rdma_latency_s=2e-4, host_latency_s=3e-5, copy_contention=0.6, memory_bytes=8 << 30, attention_efficiency=0.3,
    backward_ratio=2.2, layer_overhead_s=5e-4, pair_overhead_s=1e-6, calibrated=True, source="test",
)  # fmt: skip
PLANNED_LAYER_S, PLANNED_TOKEN_S = 3e-4, 2e-7


def seconds_of(p: Point, truth: Cluster, link: str = "peer") -> float:
    """What a machine with these constants takes."""
    rate, latency_s = getattr(truth, f"{link}_bytes_per_s"), getattr(truth, f"{link}_latency_s")
    compute = (
        p.pairs * MODEL.flops_per_pair / truth.expert_flops_per_s + p.busy * truth.slot_overhead_s
        + p.attention_flops / truth.attention_flops_per_s + p.layers * truth.layer_overhead_s + p.moved * truth.pair_overhead_s
    )  # fmt: skip
    if p.backward:
        compute = truth.backward_ratio * (compute - p.busy * truth.slot_overhead_s) + p.busy * truth.backward_slot_s
    messages, sent = p.exchanges + p.copies, p.exchange_bytes + p.copy_bytes
    return compute + messages * latency_s + sent / rate


def machine(truth: Cluster, noise: float = 0.0, seed: int = 0, nodes: tuple[int, ...] = (0, 0)) -> Measured:
    """All points of a machine with these constants; seconds are off by a factor of standard deviation `noise`."""
    rng = np.random.default_rng(seed)
    points: list[Point] = []
    way = " across nodes" if len(set(nodes)) > 1 else ""
    link = "rdma" if way else "peer"

    def add(p: Point, link: str = link, extra_s: float = 0.0) -> None:
        exact = seconds_of(p, truth, link) + extra_s
        points.append(dataclasses.replace(p, seconds=exact * float(np.exp(noise * rng.standard_normal()))))

    for backward in (False, True):
        for per_slot in (8, 48, 200, 800, 1600):
            for busy in (8, 32):
                add(Point(kind="experts", seconds=1.0, backward=backward, pairs=per_slot * busy, busy=busy))
        for tokens in (256, 1024, 2048):
            for share in (0.5, 0.8):
                pairs = tokens * 2 * 4
                work = {
                    "layers": 2.0, "tokens": 2.0 * tokens, "moved": share * 2 * pairs, "exchanges": 4.0,
                    "attention_flops": 2 * float(MODEL.attention_flops(tokens, tokens * 64)),
                    "exchange_bytes": 2.0 * MODEL.token_bytes * share * pairs,
                }  # fmt: skip
                more_s = 0.0 if backward else 2 * (PLANNED_LAYER_S + PLANNED_TOKEN_S * tokens)
                add(Point(kind="layer", seconds=1.0, backward=backward, **work))
                # Measured in turn with the layer, so under the same noise.
                points.append(Point(kind="planned", seconds=points[-1].seconds + more_s, backward=backward, **work))
    for num_bytes in (1e3, 1e5, 1e6, 1e7):
        add(Point(kind=f"exchange{way}", seconds=1.0, exchanges=2, exchange_bytes=2 * num_bytes))
        add(Point(kind=f"copy{way}", seconds=1.0, copies=4, copy_bytes=4 * num_bytes))
        add(Point(kind="copy from host", seconds=1.0, copies=4, copy_bytes=4 * num_bytes), "host")
    for kind, where in ((f"copy{way}", link), ("copy from host", "host")):
        p = Point(kind=f"beside {kind}", seconds=1.0, copies=16, copy_bytes=1e8)
        points.append(dataclasses.replace(p, seconds=truth.copy_contention * seconds_of(p, truth, where)))
    return Measured(
        points=tuple(points), flops_per_s=truth.flops_per_s, memory_bytes=truth.memory_bytes, node_of_rank=nodes, hardware="test",
        versions={},
    )  # fmt: skip


truths = st.builds(
    lambda **fields: dataclasses.replace(BASE, **fields),
    compute_efficiency=st.floats(0.05, 0.9),
    attention_efficiency=st.floats(0.05, 0.9),
    slot_overhead_s=st.floats(2e-5, 1e-3),
    layer_overhead_s=st.floats(1e-4, 3e-3),
    pair_overhead_s=st.floats(3e-7, 5e-6),
    backward_ratio=st.floats(1.0, 4.0),
    slot_backward_s=st.floats(2e-5, 3e-3),
    peer_bytes_per_s=st.floats(2e8, 2e10),
    peer_latency_s=st.floats(1e-5, 1e-3),
    host_bytes_per_s=st.floats(1e9, 2e10),
    host_latency_s=st.floats(1e-5, 1e-4),
    copy_contention=st.floats(0.0, 1.0),
)
FITTED = (
    "compute_efficiency", "slot_overhead_s", "attention_efficiency", "layer_overhead_s", "pair_overhead_s", "backward_ratio",
    "slot_backward_s",
    "peer_bytes_per_s", "peer_latency_s", "host_bytes_per_s", "host_latency_s", "copy_contention", "flops_per_s",
)  # fmt: skip


@given(truth=truths)
@examples(15)
def test_without_noise_every_constant_comes_back(truth):
    found = fit(machine(truth), MODEL, name="found", source="test")
    for name in FITTED:
        assert getattr(found.cluster, name) == pytest.approx(getattr(truth, name), rel=0.02, abs=1e-9), name
    assert found.cluster.planned_layer_s == pytest.approx(PLANNED_LAYER_S, rel=0.02)
    assert found.cluster.planned_token_s == pytest.approx(PLANNED_TOKEN_S, rel=0.02)
    assert all(c.worst is None or c.worst < 0.01 for c in found.constants)
    assert all(by_constants == pytest.approx(s, rel=0.01) for s, by_constants in copy_seconds(machine(truth).points, truth))


@given(truth=truths, seed=st.integers(0, 1000))
@examples(15)
def test_with_noise_the_fitted_machine_takes_as_long_as_the_real_one(truth, seed):
    found = fit(machine(truth, noise=0.04, seed=seed), MODEL, name="found", source="test").cluster
    # Not constant by constant: two that always come together may trade places without harm.
    for backward in (False, True):
        p = Point(
            kind="layer", seconds=1.0, backward=backward, pairs=6000, busy=32, layers=1, moved=6000, attention_flops=1e9,
            exchanges=2, exchange_bytes=4e6,
        )  # fmt: skip
        assert seconds_of(p, found) == pytest.approx(seconds_of(p, truth), rel=0.10)


@given(seed=st.integers(0, 1000), factor=st.sampled_from([2.0, 5.0]))
@examples(10)
def test_a_few_points_that_other_load_made_slow_move_little(seed, factor):
    measured = machine(BASE, noise=0.01, seed=seed)
    rng = np.random.default_rng(seed)
    points = list(measured.points)
    experts = [i for i, p in enumerate(points) if p.kind == "experts"]
    for i in rng.choice(experts, 2, replace=False):
        points[i] = dataclasses.replace(points[i], seconds=points[i].seconds * factor)
    found = fit(dataclasses.replace(measured, points=tuple(points)), MODEL, name="found", source="test").cluster
    assert found.expert_flops_per_s == pytest.approx(BASE.expert_flops_per_s, rel=0.1)
    assert found.backward_ratio == pytest.approx(BASE.backward_ratio, rel=0.1)


def test_the_knee_is_told_from_few_pairs_per_slot():
    """Where a slot's fixed part is as much as hundreds of pairs, and where it is nothing."""
    for slot_s in (0.0, 2e-3):
        truth = dataclasses.replace(BASE, slot_overhead_s=slot_s)
        found = fit(machine(truth, noise=0.02), MODEL, name="found", source="test").cluster
        assert found.slot_overhead_s == pytest.approx(slot_s, rel=0.1, abs=1e-5)
        assert found.expert_flops_per_s == pytest.approx(truth.expert_flops_per_s, rel=0.1)


def test_links_across_nodes_have_constants_of_their_own():
    truth = dataclasses.replace(BASE, rdma_bytes_per_s=2e8, rdma_latency_s=1e-3)
    found = fit(machine(truth, nodes=(0, 1)), MODEL, name="found", source="test").cluster
    assert found.num_nodes == 2 and found.peer_bytes_per_s == Cluster.preset("8xh100").peer_bytes_per_s
    assert "figures of 8xh100: links inside a node" in found.source
    assert found.rdma_bytes_per_s == pytest.approx(2e8, rel=0.02) and found.rdma_latency_s == pytest.approx(1e-3, rel=0.02)
    assert found.expert_flops_per_s == pytest.approx(truth.expert_flops_per_s, rel=0.02)


def test_points_that_tell_too_little_are_refused():
    measured = machine(BASE)
    without = dataclasses.replace(measured, points=tuple(p for p in measured.points if p.kind != "experts"))
    with pytest.raises(InputError, match="more seconds"):
        fit(without, MODEL, name="found", source="test")
    flat = tuple(dataclasses.replace(p, seconds=1e-3 * p.busy) if p.kind == "experts" else p for p in measured.points)
    with pytest.raises(InputError, match="takes no time"):
        fit(dataclasses.replace(measured, points=flat), MODEL, name="found", source="test")


@given(seed=st.integers(0, 10_000), num=st.integers(3, 12), unknowns=st.integers(1, 4))
def test_nonnegative_least_squares_cannot_be_improved(seed, num, unknowns):
    rng = np.random.default_rng(seed)
    factor_NF = rng.random((num, unknowns)) * 10.0 ** rng.integers(-6, 6, unknowns)
    seconds_N, scale_N, weight_N = rng.standard_normal(num), rng.random(num) + 0.5, rng.random(num)
    x_F = nonnegative(factor_NF, seconds_N, scale_N, weight_N)
    slope_F = factor_NF.T @ (weight_N * (factor_NF @ x_F - seconds_N) / scale_N**2) / factor_NF.max(axis=0)
    assert (x_F >= 0).all()
    assert (slope_F >= -1e-7).all() and np.abs(slope_F[x_F > 0]).max(initial=0.0) < 1e-7


def test_one_bad_point_in_ten_hardly_moves_a_line():
    size_N = np.arange(1.0, 11.0)
    seconds_N = 2.0 * size_N
    seconds_N[4] *= 10.0
    assert robust(size_N[:, None], seconds_N)[0] == pytest.approx(2.0, rel=0.02)


def test_a_slot_costs_in_backward_what_its_gradients_take_whatever_it_costs_in_forward():
    """As on a GPU: a busy slot reads weights in forward and totals of gradients in backward."""
    truth = dataclasses.replace(BASE, slot_overhead_s=3e-6, slot_backward_s=19e-6, compute_efficiency=0.9, flops_per_s=8e12)
    truth = dataclasses.replace(truth, attention_efficiency=BASE.attention_flops_per_s / 8e12)
    found = fit(machine(truth, noise=0.02), MODEL, name="found", source="test")
    assert found.cluster.calibrated, found.faults
    assert found.cluster.slot_backward_s == pytest.approx(19e-6, rel=0.1)
    assert found.cluster.slot_overhead_s == pytest.approx(3e-6, rel=0.3)


@given(host_s=st.floats(5e-3, 5e-2))
@examples(10)
def test_forwards_that_the_host_is_slower_with_say_what_the_host_takes(host_s):
    measured = machine(BASE)
    points = [
        dataclasses.replace(p, seconds=2 * host_s) if p.kind == "layer" and not p.backward and p.seconds < 2 * host_s else p
        for p in machine(dataclasses.replace(BASE, backward_ratio=2.0)).points
    ]
    found = fit(dataclasses.replace(measured, points=tuple(points)), MODEL, name="found", source="test").cluster
    longest_s = max(p.seconds for p in machine(BASE).points if p.kind == "layer" and not p.backward)
    if 2 * host_s < longest_s:
        return  # the device tells some of them
    shortest_s = min(p.seconds for p in points if p.kind == "layer" and p.backward) / 2
    exchange_s = 2 * BASE.peer_latency_s
    assert found.host_layer_s == pytest.approx((host_s + shortest_s) / 3, abs=exchange_s + 1e-3)
    assert found.attention_flops_per_s == pytest.approx(BASE.attention_flops_per_s, rel=0.02)


def of_a_gpu(name):
    """The fit of what was measured on a GPU."""
    table = json.loads((Path(__file__).parent / f"{name}_points.json").read_text())
    points = tuple(Point(**p) for p in table["points"])
    measured = Measured(
        points=points, flops_per_s=table["flops_per_s"], memory_bytes=table["memory_bytes"], node_of_rank=(0,),
        hardware=table["hardware"], versions={},
    )  # fmt: skip
    return fit(measured, Model.preset("qwen3-30b-a3b"), name=name, source="test")


def test_what_an_h200_measured_is_calibrated():
    """Busy slots take 2.3 us in forward and 17 us in backward there, and the host is slower than short layers."""
    found = of_a_gpu("h200")
    assert found.cluster.calibrated and not found.faults
    assert found.cluster.slot_overhead_s < 3e-6 and 1.5e-5 < found.cluster.slot_backward_s < 2e-5
    assert 8e-4 < found.cluster.host_layer_s < 9e-4
    # Each layer with a plan is compared with the layer at home that was measured in turn with it.
    assert 3.5e-4 < found.cluster.planned_layer_s < 4.5e-4 and found.cluster.planned_token_s == 0.0
    assert all(c.worst < 0.05 for c in found.constants if c.name.startswith("planned"))


def test_a_host_that_is_slower_with_every_forward_is_no_long_layer():
    """On an H100 with a slower host, all forwards of layers take as long as their launches, whose times spread by 19 %."""
    found = of_a_gpu("h100")
    assert found.cluster.calibrated and not found.faults
    assert found.cluster.host_layer_s > 1e-3 and found.cluster.layer_overhead_s < 2e-4
    assert 0.5 < found.cluster.attention_efficiency < 0.7
    constants = {constant.name: constant for constant in found.constants}
    assert constants["host_layer_s"].spread > 0.1 > constants["attention_efficiency"].spread
