"""Fit: from measured points to the constants of the cost model, each with how well it explains what was measured."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.calibrate.nonnegative import residuals, robust
from foremoe.calibrate.points import Measured, Point
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model

# Letters: N points, F unknowns.

_COUNTED_RATIO, _LEAST_RATIO = 2.0, 0.1  # of backward: by counting GEMMs where it was not measured; the smallest
_FAST = 1e15  # bytes/s of a link that takes no measurable time


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One fitted constant.

    Attributes:
        name: Name as in `Cluster`, or of the runtime (see `Fit.runtime`).
        num_points: Points it was fitted on.
        median: Median of the absolute relative residuals; None without points.
        worst: Largest of them; None without points.
    """

    name: str
    value: float
    unit: str
    num_points: int
    median: float | None
    worst: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The outcome.

    Attributes:
        cluster: The constants, with ``calibrated`` set.
        constants: The same one by one, with residuals.
        runtime: Seconds that foremoe's runtime takes with a plan beyond those without one, which no `Cluster` has: per layer and
            pass ``planned_layer_s`` (forward) and ``planned_backward_s``, per token and layer ``planned_token_s`` (forward).
    """

    cluster: Cluster
    constants: tuple[Constant, ...]
    runtime: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Constants and runtime as plain values."""
        return {"constants": [dataclasses.asdict(c) for c in self.constants], "runtime": self.runtime}


class _Link(NamedTuple):
    """Seconds of a message: latency and 1 / bandwidth; the residuals of what it was fitted on."""

    latency_s: float
    byte_s: float
    off_N: Array

    @property
    def bytes_per_s(self) -> float:
        return 1.0 / max(self.byte_s, 1.0 / _FAST)


def fit(measured: Measured, model: Model, *, name: str, source: str) -> Fit:
    """The constants that explain the points best, in the sense of relative residuals.

    Links first: tokens are on the way in every layer, so a link class is fitted on exchanges and only checked on copies. Then
    expert compute and layers forward in one system, and a ratio for the backward of each. What copies take from compute comes
    last, relative to the seconds that the constants give them.

    Raises:
        InputError: The points do not determine a constant that is needed.
    """
    points = measured.points
    inside = _link(points, "exchange", "exchanges", "exchange_bytes")
    rdma = _link(points, "exchange across nodes", "exchanges", "exchange_bytes")
    peer = inside or rdma  # nodes of one rank have no link inside
    host = _link(points, "copy from host", "copies", "copy_bytes")
    compute = [p for p in points if p.kind in ("experts", "layer")]
    if not any(p.kind == "experts" for p in compute) or host is None or peer is None:
        raise InputError("expert compute, exchanges and host copies must be measured; give calibrate more seconds.")
    exchange = peer if rdma is None else rdma
    unit_s = _forward(compute, exchange)
    pair_s, slot_s, flop_s, layer_s, moved_s = unit_s
    if pair_s <= 0:
        raise InputError("a pair takes no time in these measurements: other load has hidden it; measure again, for more seconds.")
    ratios = _ratios(compute, exchange, unit_s)
    rates = [model.flops_per_pair / pair_s] + ([1.0 / flop_s] if flop_s > 0 else [])
    peak = max(measured.flops_per_s, *rates)
    contention, off_copying = _contention(points, {"": peer, " across nodes": exchange, " from host": host})
    runtime, off_planned = _runtime(points)
    cluster = Cluster(
        name=name, num_ranks=len(measured.node_of_rank), node_of_rank_G=np.array(measured.node_of_rank, np.int32),
        flops_per_s=peak, compute_efficiency=rates[0] / peak, slot_overhead_s=slot_s,
        peer_bytes_per_s=peer.bytes_per_s, rdma_bytes_per_s=exchange.bytes_per_s, host_bytes_per_s=host.bytes_per_s,
        peer_latency_s=peer.latency_s, rdma_latency_s=exchange.latency_s, host_latency_s=host.latency_s,
        copy_contention=contention, memory_bytes=measured.memory_bytes,
        attention_efficiency=rates[1] / peak if flop_s > 0 else 1.0, backward_ratio=ratios["experts"],
        attention_backward_ratio=ratios["layer"], layer_overhead_s=layer_s, pair_overhead_s=moved_s, calibrated=True,
        source=source,
    )  # fmt: skip
    off = _by_group(compute, exchange, unit_s, ratios)
    rows = [
        ("flops_per_s", "FLOP/s", None), ("compute_efficiency", "share of peak", off["experts"]),
        ("slot_overhead_s", "s per busy slot", off["experts"]), ("attention_efficiency", "share of peak", off["layer"]),
        ("layer_overhead_s", "s per layer", off["layer"]), ("pair_overhead_s", "s per pair", off["layer"]),
        ("backward_ratio", "backward / forward", off["experts backward"]),
        ("attention_backward_ratio", "backward / forward", off["layer backward"]), ("peer_bytes_per_s", "bytes/s", peer.off_N),
        ("peer_latency_s", "s per message", peer.off_N), ("rdma_bytes_per_s", "bytes/s", None if rdma is None else rdma.off_N),
        ("rdma_latency_s", "s per message", None if rdma is None else rdma.off_N), ("host_bytes_per_s", "bytes/s", host.off_N),
        ("host_latency_s", "s per copy", host.off_N), ("copy_contention", "s lost per s of copy", off_copying),
    ]  # fmt: skip
    constants = [_constant(row, float(getattr(cluster, row)), unit, off_N) for row, unit, off_N in rows]
    units = {"planned_layer_s": "s per layer", "planned_token_s": "s per token", "planned_backward_s": "s per layer"}
    constants += [_constant(row, runtime[row], unit, off_planned) for row, unit in units.items() if row in runtime]
    return Fit(cluster=cluster, constants=tuple(constants), runtime=runtime)


def copy_seconds(points: Iterable[Point], cluster: Cluster) -> list[tuple[float, float]]:
    """(measured, by the constants) seconds of copies between ranks, which no constant was fitted on."""
    links = {
        "copy": (cluster.peer_latency_s, cluster.peer_bytes_per_s),
        "copy across nodes": (cluster.rdma_latency_s, cluster.rdma_bytes_per_s_per_rank),
    }
    copies = [(p, *links[p.kind]) for p in points if p.kind in links]
    return [(p.seconds, p.copies * latency_s + p.copy_bytes / bytes_per_s) for p, latency_s, bytes_per_s in copies]


def _link(points: Iterable[Point], kind: str, number: str, size: str) -> _Link | None:
    mine = [p for p in points if p.kind == kind]
    if not mine:
        return None
    factor_NF = np.array([[getattr(p, number), getattr(p, size)] for p in mine])
    seconds_N = np.array([p.seconds for p in mine])
    latency_s, byte_s = robust(factor_NF, seconds_N).tolist()
    return _Link(latency_s, byte_s, residuals(factor_NF @ [latency_s, byte_s], seconds_N))


def _amounts(points: Sequence[Point]) -> Array:
    """[N, 5]: amounts of what a pair, busy slot, FLOP of attention, layer and moved pair take seconds for."""
    return np.array([[p.pairs, p.busy, p.attention_flops, p.layers, p.moved] for p in points], np.float64).reshape(-1, 5)


def _on_links(points: Iterable[Point], link: _Link) -> Array:
    return np.array([p.exchanges * link.latency_s + p.exchange_bytes * link.byte_s for p in points])


def _forward(points: Sequence[Point], link: _Link) -> tuple[float, ...]:
    """Seconds per unit of `_amounts`, from forwards alone."""
    mine = [p for p in points if not p.backward]
    seconds_N = np.array([p.seconds for p in mine])
    return tuple(robust(_amounts(mine), seconds_N - _on_links(mine, link), seconds_N).tolist())


def _ratios(points: Sequence[Point], link: _Link, unit_s: tuple[float, ...]) -> dict[str, float]:
    """Seconds of backward over forward: of experts, and of the rest of a layer."""
    ratios: dict[str, float] = {}
    for kind in ("experts", "layer"):
        mine = [p for p in points if p.kind == kind and p.backward]
        mine = [p for p in mine if p.tokens] or mine  # not the few pairs, which are for the knee
        if not mine:
            ratios[kind] = _COUNTED_RATIO
            continue
        forward_N = _amounts(mine) @ unit_s
        backward_N = np.array([p.seconds for p in mine]) - _on_links(mine, link)
        ratios[kind] = max(float(np.median(backward_N / np.maximum(forward_N, 1e-12))), _LEAST_RATIO)
    return ratios


def _by_group(points: Sequence[Point], link: _Link, unit_s: tuple[float, ...], ratios: dict[str, float]) -> dict[str, Array]:
    """Residuals of forwards and of backwards, by kind."""
    factor_N = np.array([ratios[p.kind] if p.backward else 1.0 for p in points])
    off_N = residuals(factor_N * (_amounts(points) @ unit_s) + _on_links(points, link), np.array([p.seconds for p in points]))
    group_N = np.array([f"{p.kind} backward" if p.backward else p.kind for p in points])
    return {name: off_N[group_N == name] for name in ("experts", "experts backward", "layer", "layer backward")}


def _contention(points: Iterable[Point], links: dict[str, _Link]) -> tuple[float, Array]:
    """Seconds lost over seconds of copy, and residuals of the loss, relative to the copies; `links` by the end of a kind."""
    found = [(p, links[p.kind.removeprefix("beside copy")]) for p in points if p.kind.startswith("beside copy")]
    lost_N = np.array([p.seconds for p, _ in found])
    copying_N = np.array([p.copies * link.latency_s + p.copy_bytes * link.byte_s for p, link in found])
    if not copying_N.sum():
        return 0.0, np.zeros(0)
    share = float(np.clip(lost_N.sum() / copying_N.sum(), 0.0, 1.0))
    return share, share - lost_N / copying_N


def _runtime(points: Sequence[Point]) -> tuple[dict[str, float], Array]:
    """What layers by a plan take beyond the same layers at home, and the residuals of their whole seconds."""
    at_home = {_key(p): p.seconds for p in points if p.kind == "layer"}
    planned = [p for p in points if p.kind == "planned" and _key(p) in at_home]
    found: dict[str, float] = {}
    off: list[float] = []
    for backward, names in ((False, ("planned_layer_s", "planned_token_s")), (True, ("planned_backward_s",))):
        mine = [p for p in planned if p.backward == backward]
        if not mine:
            continue
        factor_NF = np.array([[p.layers, p.tokens][: len(names)] for p in mine])
        seconds_N, home_N = np.array([p.seconds for p in mine]), np.array([at_home[_key(p)] for p in mine])
        # Both were measured in turn, so that their difference is freer of other load than either.
        x_F = robust(factor_NF, seconds_N - home_N, seconds_N)
        found |= dict(zip(names, x_F.tolist(), strict=True))
        off += residuals(home_N + factor_NF @ x_F, seconds_N).tolist()
    return found, np.array(off)


def _key(p: Point) -> tuple[bool, float, float, float]:
    return p.backward, p.layers, p.tokens, p.moved


def _constant(name: str, value: float, unit: str, off_N: Array | None) -> Constant:
    size_N = np.zeros(0) if off_N is None else np.abs(off_N)
    median, worst = (float(np.median(size_N)), float(size_N.max())) if len(size_N) else (None, None)
    return Constant(name=name, value=value, unit=unit, num_points=len(size_N), median=median, worst=worst)
