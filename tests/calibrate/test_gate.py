"""The gate: a fit counts as calibrated if and only if its points come back, its constants are free and its repeats agree."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples
from test_fit import BASE, MODEL, machine, seconds_of, truths

from foremoe.calibrate import Constant, Fit, Measured, Point, fit
from foremoe.calibrate.gate import MOST_RESIDUAL, MOST_SPREAD, at_limit, faults
from foremoe.cli.calibrate import report
from foremoe.machine.cluster import Cluster

# What a point of each kind says something of; of "planned" layers only forwards do.
NAMES_OF = {
    "experts": "compute_efficiency, slot_overhead_s", "layer": "layer_overhead_s", "exchange": "peer_bytes_per_s, peer_latency_s",
    "copy from host": "host_bytes_per_s, host_latency_s", "copy": "copies inside a node",
    "beside copy from host": "copy_contention", "planned": "planned_layer_s, planned_token_s",
}  # fmt: skip
free_truths = truths.filter(lambda truth: truth.copy_contention < 0.95)


def fitted(measured: Measured) -> Fit:
    return fit(measured, MODEL, name="found", source="test")


def changed(measured: Measured, which: list[int], **fields) -> Measured:
    points = [dataclasses.replace(p, **fields) if i in which else p for i, p in enumerate(measured.points)]
    return dataclasses.replace(measured, points=tuple(points))


def host_forward_s(found: Cluster, points: Sequence[Point]) -> float:
    """What the host takes in a layer's forward, from what it takes in both passes."""
    back = [p for p in points if p.kind == "layer" and p.backward]
    rate, latency_s = found.peer_bytes_per_s, found.peer_latency_s
    shortest_s = min((p.seconds - p.exchanges * latency_s - p.exchange_bytes / rate) / p.layers for p in back)
    return (1.0 + found.window_backward_ratio) * found.host_layer_s - max(0.0, shortest_s)


def forwards(points: Sequence[Point], kind: str) -> list[Point]:
    return [p for p in points if p.kind == kind and not p.backward]


def judged(p: Point) -> bool:
    """Returns whether a constant was fitted to a point or is checked by it."""
    return p.kind in NAMES_OF and not (p.kind == "planned" and p.backward)


def off(p: Point, found: Cluster, points: Sequence[Point]) -> float:
    """How far a point is from what the constants give it, told without the fit."""
    if p.kind.startswith("beside"):
        copying_s = seconds_of(p, found, "host" if p.kind.endswith("host") else "peer")
        return abs(found.copy_contention * copying_s - p.seconds) / copying_s
    if p.kind == "planned":
        home_s = {id(q): h.seconds for q, h in zip(forwards(points, "planned"), forwards(points, "layer"), strict=True)}[id(p)]
        return abs(home_s + p.layers * found.planned_layer_s + p.tokens * found.planned_token_s - p.seconds) / p.seconds
    if p.kind == "layer":
        found = dataclasses.replace(found, backward_ratio=found.window_backward_ratio)
        if not p.backward and found.host_layer_s:
            links_s = p.exchanges * found.peer_latency_s + p.exchange_bytes / found.peer_bytes_per_s
            host_s = links_s + p.layers * host_forward_s(found, points)
            return abs(max(seconds_of(p, found), host_s) - p.seconds) / p.seconds
    return abs(seconds_of(p, found, "host" if p.kind.endswith("host") else "peer") - p.seconds) / p.seconds


@given(truth=free_truths, spread=st.floats(0, MOST_SPREAD))
@examples(15)
def test_a_clean_measurement_is_calibrated(truth, spread):
    measured = machine(truth)
    found = fitted(changed(measured, list(range(len(measured.points))), spread=spread))
    assert found.cluster.calibrated and not found.faults and found.cluster.residual < 0.01
    assert "not calibrated" not in found.cluster.source and "calibrated, residual" in found.cluster.standing


@given(truth=free_truths, noise=st.floats(0, 0.3), seed=st.integers(0, 1000), factor=st.sampled_from([1.0, 1.3, 3.0, 11.35]))
def test_calibrated_means_that_every_point_comes_back_within_the_bound(truth, noise, seed, factor):
    """Under any noise, and with one point that other load made slow."""
    measured = machine(truth, noise=noise, seed=seed)
    chosen = int(np.random.default_rng(seed).choice([i for i, p in enumerate(measured.points) if p.kind in NAMES_OF]))
    found = fitted(changed(measured, [chosen], seconds=measured.points[chosen].seconds * factor))
    points = changed(measured, [chosen], seconds=measured.points[chosen].seconds * factor).points
    worst = max(off(p, found.cluster, points) for p in points if judged(p))
    assert found.cluster.residual == pytest.approx(worst, rel=1e-6, abs=1e-9)
    assume(abs(worst - MOST_RESIDUAL) > 1e-9)
    assert found.cluster.calibrated == (worst <= MOST_RESIDUAL and not any(map(at_limit, found.constants)))
    if worst > MOST_RESIDUAL:
        assert any(f"{worst:.1%}, above 25%" in fault.what for fault in found.faults), found.faults
        assert f"{worst:.1%}, above 25%" in found.cluster.source and f"residual {worst:.0%}" in found.cluster.standing


@given(kind=st.sampled_from([kind for kind in NAMES_OF if kind != "planned"]), spread=st.floats(0, 1))
def test_repeats_that_spread_are_named(kind, spread):
    measured = machine(BASE)
    found = fitted(changed(measured, [i for i, p in enumerate(measured.points) if p.kind == kind], spread=spread))
    # One of two points' contention: the other one's repeats agree.
    told = spread / 2 if kind.startswith("beside") else spread
    assert found.cluster.calibrated == (told <= MOST_SPREAD)
    for fault in found.faults:
        assert f"repeats spread by {told:.1%}, above 10%" == fault.what and "more seconds" in fault.cure
    if found.faults:
        assert any(NAMES_OF[kind] in fault.names for fault in found.faults)


@pytest.mark.parametrize(
    ("truth", "name", "number"),
    [
        ({"peer_bytes_per_s": 1e18}, "peer_bytes_per_s", "1e+15 bytes/s"),
        ({"host_bytes_per_s": 1e18}, "host_bytes_per_s", "1e+15 bytes/s"),
        ({"peer_latency_s": 0.0}, "peer_latency_s", "0 s per message"),
        ({"slot_overhead_s": 0.0}, "slot_overhead_s", "0 s per busy slot"),
        ({"attention_flops_per_s": 1e30}, "attention_efficiency", "1 share of peak"),
        ({"backward_ratio": 0.01}, "backward_ratio", "0.1 backward / forward"),
        ({"copy_contention": 1.5}, "copy_contention", "1 s lost per s of copy"),
    ],
)
def test_a_constant_at_its_limit_is_named(truth, name, number):
    class Truth:  # a `Cluster` would refuse some of these
        def __getattr__(self, field: str) -> float:
            return truth.get(field, getattr(BASE, field))

    found = fitted(machine(Truth()))
    assert not found.cluster.calibrated
    told = [fault for fault in found.faults if name in fault.names.split(", ") and "at its limit" in fault.what]
    assert told and number in told[0].what and "larger sizes" in str(told[0])
    assert f"at its limit, {number}" in found.cluster.source


def test_no_loss_beside_copies_is_a_figure_and_no_limit():
    found = fitted(machine(dataclasses.replace(BASE, copy_contention=0.0)))
    assert found.cluster.calibrated and found.cluster.copy_contention == 0.0


def test_the_case_that_passed_before_there_was_a_gate():
    """Host copies that take as long whatever their size, and copies that cost compute eleven times their own seconds."""
    measured = machine(BASE)
    host = [i for i, p in enumerate(measured.points) if p.kind == "copy from host"]
    beside = next(i for i, p in enumerate(measured.points) if p.kind == "beside copy")
    lost_s = 11.35 * seconds_of(measured.points[beside], BASE)
    found = fitted(changed(changed(measured, host, seconds=1e-3), [beside], seconds=lost_s))
    assert not found.cluster.calibrated and found.cluster.standing == "fitted, not calibrated, residual 1035%"
    text = " ".join(map(str, found.faults))
    assert "host_bytes_per_s: at its limit, 1e+15 bytes/s" in text and "1035.0%, above 25%" in text
    warned = "its residual is above 100%: commands refuse new.toml without --accept-fit"
    assert warned in report(found, measured, "8xh100", "new.toml")
    assert warned not in report(fitted(measured), measured, "8xh100", "new.toml")


def test_what_was_not_measured_cannot_fail():
    kept = Constant(name="rdma_latency_s", value=0.0, unit="s", num_points=0, median=None, worst=None, spread=None)
    assert faults([kept]) == ()


def alone() -> Measured:
    """What one rank measures: no exchanges, no copies between ranks."""
    one = machine(BASE)
    points = [p for p in one.points if "exchange" not in p.kind and p.kind not in ("copy", "beside copy")]
    still = [
        dataclasses.replace(
            p, exchanges=0.0, exchange_bytes=0.0,
            seconds=p.seconds - p.exchanges * BASE.peer_latency_s - p.exchange_bytes / BASE.peer_bytes_per_s,
        )
        for p in points
    ]  # fmt: skip
    return dataclasses.replace(one, points=tuple(still), node_of_rank=(0,))


@pytest.mark.parametrize("preset", Cluster.preset_names())
def test_one_rank_keeps_the_links_of_another_cluster(preset):
    base = Cluster.preset(preset)
    found = fit(alone(), MODEL, name="found", source="test", base=base)
    for name in ("peer_bytes_per_s", "peer_latency_s", "rdma_bytes_per_s", "rdma_latency_s", "nic_sharing"):
        assert getattr(found.cluster, name) == getattr(base, name)
    assert found.cluster.host_bytes_per_s == pytest.approx(BASE.host_bytes_per_s, rel=0.01)
    assert found.cluster.expert_flops_per_s == pytest.approx(BASE.expert_flops_per_s, rel=0.01)
    assert found.kept == ("links inside a node", "links between nodes")
    assert f"figures of {preset}: links inside a node, links between nodes" in found.cluster.source
    assert found.cluster.calibrated and not found.cluster.with_ranks(8, 8).calibrated


def test_constants_stand_on_the_first_backend_and_every_backend_is_shown():
    measured = machine(BASE)
    named = [dataclasses.replace(p, backend="first") if "copy" in p.kind else p for p in measured.points]
    slow = [
        dataclasses.replace(p, backend="second", seconds=3 * p.seconds)
        for p in measured.points
        if p.kind in ("copy from host", "beside copy from host")
    ]
    found = fitted(dataclasses.replace(measured, points=(*named, *slow)))
    assert found.cluster.same_as(fitted(measured).cluster)
    rate = {(b.backend, b.link): b.bytes_per_s for b in found.backends}
    assert set(rate) == {("first", "peer"), ("first", "host"), ("second", "host")}
    assert rate["second", "host"] == pytest.approx(rate["first", "host"] / 3, rel=0.01)
    assert all(b.contention == pytest.approx(BASE.copy_contention, rel=0.01) for b in found.backends)
