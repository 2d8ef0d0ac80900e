"""Fits the cost model's constants to measured points and computes the residuals of each constant."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.calibrate.gate import LEAST_RATIO, MOST_RESIDUAL, Constant, Fault, faults
from foremoe.calibrate.link_fits import (
    BackendFit,
    Basis,
    LinkFit,
    backend_fits,
    constant,
    contention,
    copy_checks,
    link_fit,
    preferred,
)  # fmt: skip
from foremoe.calibrate.nonnegative import nonnegative, residuals, robust
from foremoe.calibrate.points import Measured, Point
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model

# Letters: N points, F unknowns.

_COUNTED_RATIO = 2.0  # ratio of backward to forward if it was not measured, from the number of GEMMs
_MEASURED_BY = {"peer": "exchange", "rdma": "exchange across nodes", "host": "copy from host"}
_LINK_WORDS = {"peer": "links inside a node", "rdma": "links between nodes", "host": "the host store"}
# Constants of a cluster, their units, and the group of points to which each is fitted.
_ROWS = (
    ("flops_per_s", "FLOP/s", ""), ("compute_efficiency", "share of peak", "experts"),
    ("slot_overhead_s", "s per busy slot", "experts"), ("attention_efficiency", "share of peak", "layer"),
    ("layer_overhead_s", "s per layer", "layer"), ("pair_overhead_s", "s per pair", "layer"),
    ("host_layer_s", "s per layer", "launches"),
    ("planned_layer_s", "s per layer", "planned"), ("planned_token_s", "s per token", "planned"),
    ("backward_ratio", "backward / forward", "experts backward"),
    ("slot_backward_s", "s per busy slot", "experts backward"),
    ("attention_backward_ratio", "backward / forward", "layer backward"), ("peer_bytes_per_s", "bytes/s", "peer"),
    ("peer_latency_s", "s per message", "peer"), ("rdma_bytes_per_s", "bytes/s", "rdma"),
    ("rdma_latency_s", "s per message", "rdma"), ("host_bytes_per_s", "bytes/s", "host"),
    ("host_latency_s", "s per copy", "host"), ("copy_contention", "s lost per s of copy", "copying"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Result of a fit: the constants, their residuals, and any reasons why the constants do not count as calibrated.

    Attributes:
        cluster: Cluster with the fitted constants. Its ``residual`` is the largest of all residuals. It is ``calibrated`` if
            there are no `faults`.
        constants: The fitted constants one by one, with their residuals.
        checks: Comparison of copies between ranks with the constants of the links. The constants were not fitted to these copies.
        backends: Fit of every measured transfer backend on every kind of link that the backend serves.
        kept: Links that could not be measured. Their figures are taken from another cluster.
        faults: Reasons from `foremoe.calibrate.gate` why the constants do not count as calibrated, as sentences.
    """

    cluster: Cluster
    constants: tuple[Constant, ...]
    checks: tuple[Constant, ...]
    backends: tuple[BackendFit, ...]
    kept: tuple[str, ...]
    faults: tuple[Fault, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the constants, their points and the verdict as a dict of plain values."""
        lists = {name: [dataclasses.asdict(x) for x in getattr(self, name)] for name in ("constants", "checks", "backends")}
        verdict = {"calibrated": self.cluster.calibrated, "residual": self.cluster.residual, "faults": [*map(str, self.faults)]}
        return {**verdict, **lists, "kept": list(self.kept)}


def fit(measured: Measured, model: Model, *, name: str, source: str, base: Cluster | None = None) -> Fit:
    """Fits the constants with the smallest relative residuals.

    The constants of links are fitted first. They are fitted to exchanges, which every layer has, and are only checked with
    copies. Expert compute is fitted next, forward and backward. Then layers are fitted, with a ratio for their backward pass. The
    fixed time to call the experts counts as part of a layer. The slowdown of compute by copies is fitted last, relative to the
    time that the constants predict for the copies. If several backends were measured on a kind of link, the first one is used.

    Args:
        measured: Points to fit.
        model: Sizes of the measured model.
        name: Name of the cluster.
        source: Origin of the figures, as text. Figures from `base` and reasons against calibration are added to the text.
        base: Cluster whose figures are used for links that were not measured. Defaults to the preset 8xh100.

    Raises:
        InputError: The points do not determine a required constant.
    """
    base = Cluster.preset("8xh100") if base is None else base
    points = preferred(measured.points)
    links = {link: link_fit(points, kind) for link, kind in _MEASURED_BY.items()}
    exchange = links["rdma"] or links["peer"]
    compute = [p for p in points if p.kind in ("experts", "layer")]
    if not any(p.kind == "experts" for p in compute) or (exchange is None and any(p.exchanges for p in compute)):
        raise InputError("expert compute and the exchanges of layers must be measured; give calibrate more seconds.")
    units = _units(compute, exchange)
    (pair_s, slot_s, call_s), (flop_s, layer_s, moved_s) = units.experts.tolist(), units.layer.tolist()
    if pair_s <= 0:
        raise InputError("a pair takes no time in these measurements, because of other load; measure again, for more seconds.")
    pair_rate = model.flops_per_pair / pair_s
    peak = max(measured.flops_per_s, pair_rate, 1.0 / flop_s if flop_s > 0 else 0.0)
    flop_s = units.layer[0] = flop_s or 1.0 / peak  # a cluster's attention must take some time
    contended, off_copying = contention(points, links)
    planned_s, off_planned = _planned(points)
    cluster = Cluster(
        name=name, num_ranks=len(measured.node_of_rank), node_of_rank_G=np.array(measured.node_of_rank, np.int32),
        flops_per_s=peak, compute_efficiency=pair_rate / peak, slot_overhead_s=slot_s, **_link_fields(links, base),
        copy_contention=contended if len(off_copying.off_N) else base.copy_contention, memory_bytes=measured.memory_bytes,
        attention_efficiency=min(1.0, 1.0 / (flop_s * peak)),
        backward_ratio=float(units.experts_backward[0]) / pair_s, slot_backward_s=float(units.experts_backward[1]),
        attention_backward_ratio=units.layer_ratio, layer_overhead_s=layer_s + call_s, pair_overhead_s=moved_s,
        host_layer_s=_host_layer_s(compute, exchange, units), planned_layer_s=planned_s[0], planned_token_s=planned_s[1],
        source=source,
    )  # fmt: skip
    bases = {**_by_group(compute, exchange, units), "copying": off_copying, "planned": off_planned}
    if units.host_s:  # forward was limited by the host alone, and backward by the device
        bases |= {"launches": bases["layer"], "layer": bases["layer backward"]}
    bases |= {link: fitted.basis for link, fitted in links.items() if fitted is not None}
    constants = tuple(constant(row, float(getattr(cluster, row)), unit, bases.get(key)) for row, unit, key in _ROWS)
    checks, kept = copy_checks(points, cluster), tuple(_LINK_WORDS[link] for link, fitted in links.items() if fitted is None)
    why = faults((*constants, *checks))
    notes = [source, *([f"not measured, figures of {base.name}: {', '.join(kept)}"] if kept else [])]
    notes += ["not calibrated: " + "; ".join(f"{fault.names}: {fault.what}" for fault in why)] if why else []
    cluster = dataclasses.replace(
        cluster, calibrated=not why, residual=max(c.worst for c in (*constants, *checks) if c.worst is not None),
        source="; ".join(notes),
    )  # fmt: skip
    return Fit(cluster=cluster, constants=constants, checks=checks, backends=backend_fits(measured.points), kept=kept, faults=why)


def _link_fields(links: dict[str, LinkFit | None], base: Cluster) -> dict[str, Any]:
    """Returns the bandwidth and latency of every kind of link, fitted if the link was measured, and otherwise from `base`."""
    # Links between nodes were measured with all ranks of a NIC at once.
    fields: dict[str, Any] = {"nic_sharing": base.nic_sharing if links["rdma"] is None else 1}
    for link, fitted in links.items():
        for name in ("bytes_per_s", "latency_s"):
            fields[f"{link}_{name}"] = getattr(base, f"{link}_{name}") if fitted is None else getattr(fitted, name)
    return fields


class _Units(NamedTuple):
    """Seconds per unit of `_amounts`, float64 [3], for each group of points."""

    experts: Array
    experts_backward: Array
    layer: Array
    layer_ratio: float  # backward over forward time
    host_s: float = 0.0  # host time of a layer's forward pass, if the host takes longer than the device

    def seconds(self, p: Point) -> float:
        amount_F = _amounts([p])[0]
        if p.kind == "experts":
            return float(amount_F @ (self.experts_backward if p.backward else self.experts))
        device_s = float(amount_F @ self.layer)
        return self.layer_ratio * device_s if p.backward else max(device_s, p.layers * self.host_s)


def _amounts(points: Sequence[Point]) -> Array:
    """Returns amounts of work, [N, 3]: pairs, busy slots and calls for experts; attention FLOPs, layers and pairs for layers."""
    rows = ([p.pairs, p.busy, p.calls] if p.kind == "experts" else [p.attention_flops, p.layers, p.moved] for p in points)
    return np.array(list(rows), np.float64).reshape(-1, 3)


def _off_links(points: Sequence[Point], link: LinkFit | None) -> Array:
    """Returns the seconds minus the time of exchanges, float64 [N]. A single rank exchanges nothing."""
    return np.array([p.seconds - (link.seconds(p.exchanges, p.exchange_bytes) if link else 0.0) for p in points])


def _units(points: Sequence[Point], link: LinkFit | None) -> _Units:
    """Returns the seconds per unit of all groups, fitted one by one. If backward was not measured, it is derived from GEMMs."""
    experts, back, layer, layer_back = (
        [p for p in points if p.kind == kind and p.backward == backward]
        for kind in ("experts", "layer") for backward in (False, True)
    )  # fmt: skip
    once_F = _seconds_per_unit(experts, link)
    back_F = _seconds_per_unit(back, link) if back else _COUNTED_RATIO * once_F
    back_F[0] = max(back_F[0], LEAST_RATIO * once_F[0])
    if not layer:
        return _Units(once_F, back_F, np.zeros(3), _COUNTED_RATIO)
    layer_F = _seconds_per_unit(layer, link)
    ratio_N = _off_links(layer_back, link) / np.maximum(_amounts(layer_back) @ layer_F, 1e-12)
    ratio = max(float(np.median(ratio_N)), LEAST_RATIO) if layer_back else _COUNTED_RATIO
    device = _Units(once_F, back_F, layer_F, ratio)
    if not layer_back:
        return device
    # If the host launches a forward pass more slowly than the device runs it, only the backward pass shows the device's time.
    layers_N1, seconds_N = np.array([[p.layers] for p in layer]), np.array([p.seconds for p in layer])
    # Host times vary, so outliers do not lose weight.
    host_s = float(nonnegative(layers_N1, _off_links(layer, link), seconds_N, np.ones(len(layer)))[0])
    host = _Units(once_F, back_F, _seconds_per_unit(layer_back, link) / _COUNTED_RATIO, _COUNTED_RATIO, host_s)
    worst, by_host = (float(np.abs(_off([*layer, *layer_back], link, units)).max()) for units in (device, host))
    return host if worst > MOST_RESIDUAL and by_host < worst else device


def _seconds_per_unit(points: Sequence[Point], link: LinkFit | None) -> Array:
    return robust(_amounts(points), _off_links(points, link), np.array([p.seconds for p in points]))


def _host_layer_s(points: Sequence[Point], link: LinkFit | None, units: _Units) -> float:
    """Returns `Cluster.host_layer_s`. The host's part of a backward pass is at most the shortest measured backward pass."""
    back = [p for p in points if p.kind == "layer" and p.backward]
    if not units.host_s:
        return 0.0
    # With noise, a backward pass that is mostly exchange may have no time left.
    shortest_s = max(0.0, float((_off_links(back, link) / [p.layers for p in back]).min()))
    return (units.host_s + shortest_s) / (1.0 + units.layer_ratio)


def _off(points: Sequence[Point], link: LinkFit | None, units: _Units) -> Array:
    seconds_N = np.array([p.seconds for p in points])
    return residuals(np.array([units.seconds(p) for p in points]) + seconds_N - _off_links(points, link), seconds_N)


def _by_group(points: Sequence[Point], link: LinkFit | None, units: _Units) -> dict[str, Basis]:
    """Returns the residuals and spreads of forward and of backward passes, by kind."""
    off_N, spread_N = _off(points, link, units), np.array([p.spread for p in points])
    group_N = np.array([f"{p.kind} backward" if p.backward else p.kind for p in points])
    return {name: Basis(off_N[group_N == name], spread_N[group_N == name]) for name in np.unique(group_N).tolist()}


def _planned(points: Sequence[Point]) -> tuple[tuple[float, float], Basis]:
    """Returns the time that a plan adds to a layer's forward pass, per layer and per token, and the residuals of whole passes."""
    at_home, mine = ([p for p in points if p.kind == kind and not p.backward] for kind in ("layer", "planned"))
    if not mine or len(mine) != len(at_home):
        return (0.0, 0.0), Basis(np.zeros(0), np.zeros(0))
    factor_N2 = np.array([[p.layers, p.tokens] for p in mine])
    seconds_N, home_N = (np.array([p.seconds for p in kind]) for kind in (mine, at_home))
    # Both were measured in turn, so their difference is affected less by other load than either of them.
    layer_s, token_s = robust(factor_N2, seconds_N - home_N, seconds_N).tolist()
    off_N = residuals(home_N + factor_N2 @ [layer_s, token_s], seconds_N)
    return (layer_s, token_s), Basis(off_N, np.array([p.spread for p in mine]))
