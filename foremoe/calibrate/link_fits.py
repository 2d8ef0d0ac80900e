"""Fits latency and bandwidth, by kind of link and by transfer backend, and the slowdown of compute by copies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.calibrate.gate import FAST, Constant
from foremoe.calibrate.nonnegative import residuals, robust
from foremoe.calibrate.points import Point
from foremoe.machine.cluster import Cluster

# Letters: N points, F unknowns.

LINK_OF = {"": "peer", " across nodes": "rdma", " from host": "host"}  # keyed by the end of a point's kind


class Basis(NamedTuple):
    """The points to which a constant was fitted, given as the residual of each point and the spread of its repeats."""

    off_N: Array
    spread_N: Array

    @classmethod
    def of(cls, off: Iterable[float], points: Iterable[Point]) -> "Basis":
        return cls(np.array(list(off), np.float64), np.array([p.spread for p in points], np.float64))


class LinkFit(NamedTuple):
    """Fitted latency and reciprocal bandwidth of messages, with the points to which they were fitted.

    If points differ in their numbers of messages, the time to start the first message is separated from the latency of a message.
    """

    latency_s: float
    byte_s: float
    basis: Basis

    @property
    def bytes_per_s(self) -> float:
        return FAST if self.byte_s * FAST <= 1.0 else 1.0 / self.byte_s

    def seconds(self, messages: float, num_bytes: float) -> float:
        return messages * self.latency_s + num_bytes * self.byte_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFit:
    """Bandwidth and latency of one transfer backend on one kind of link, for comparison with other backends.

    A `Cluster` has only one figure per kind of link.

    Attributes:
        backend: Name of the backend.
        link: Kind of link, ``"peer"``, ``"rdma"`` or ``"host"``.
        bytes_per_s: Bandwidth in bytes per second, fitted to copies of whole experts and of parts of experts.
        latency_s: Fixed time of a copy in seconds.
        contention: Compute time lost per second of concurrent copies.
        worst: Largest absolute relative residual of the backend's copies.
        spread: Median of the spread of repeats, over all copies.
    """

    backend: str
    link: str
    bytes_per_s: float
    latency_s: float
    contention: float
    worst: float
    spread: float


def preferred(points: Iterable[Point]) -> list[Point]:
    """Returns the points of the first backend on each kind of link, so that a constant is fitted to only one backend."""
    points, first = list(points), dict[str, str]()
    for p in points:
        first.setdefault(p.kind, p.backend)
    return [p for p in points if p.backend == first[p.kind]]


def link_fit(points: Iterable[Point], kind: str) -> LinkFit | None:
    """Returns the fit of the link that exchanges or copies of `kind` use, or None if `points` has none of this kind."""
    mine = [p for p in points if p.kind == kind]
    if not mine:
        return None
    factor_NF = np.array([[p.exchanges + p.copies, p.exchange_bytes + p.copy_bytes, 1.0] for p in mine])
    factor_NF = factor_NF[:, : 3 if np.ptp(factor_NF[:, 0]) else 2]
    seconds_N = np.array([p.seconds for p in mine])
    x_F = robust(factor_NF, seconds_N)
    return LinkFit(float(x_F[0]), float(x_F[1]), Basis.of(residuals(factor_NF @ x_F, seconds_N), mine))


def contention(points: Iterable[Point], links: Mapping[str, LinkFit | None]) -> tuple[float, Basis]:
    """Returns the compute time lost per second of copies, and its relative residuals. The keys of `links` are kinds of points."""
    mine, copying = [], []
    for p in points:
        link = links.get(LINK_OF[p.kind.removeprefix("beside copy")]) if p.kind.startswith("beside copy") else None
        if link is not None:
            mine.append(p)
            copying.append(link.seconds(p.copies, p.copy_bytes))
    if not sum(copying):
        return 0.0, Basis.of((), ())
    lost_N = np.array([p.seconds for p in mine])
    share = float(np.clip(lost_N.sum() / sum(copying), 0.0, 1.0))
    return share, Basis.of(share - lost_N / np.array(copying), mine)


def backend_fits(points: Sequence[Point]) -> tuple[BackendFit, ...]:
    """Returns a fit for every measured combination of a backend and a kind of link. Each fit uses only its own copies."""
    found = []
    for backend in dict.fromkeys(p.backend for p in points if p.backend):
        mine = [p for p in points if p.backend == backend]
        for end, link in LINK_OF.items():
            fitted = link_fit(mine, f"copy{end}")
            if fitted is None:
                continue
            beside = [p for p in mine if p.kind == f"beside copy{end}"]
            found.append(
                BackendFit(
                    backend=backend, link=link, bytes_per_s=fitted.bytes_per_s, latency_s=fitted.latency_s,
                    contention=contention(beside, {link: fitted})[0], worst=float(np.abs(fitted.basis.off_N).max()),
                    spread=float(np.median(fitted.basis.spread_N)),
                )
            )  # fmt: skip
    return tuple(found)


def copy_seconds(points: Iterable[Point], cluster: Cluster) -> list[tuple[float, float]]:
    """Returns the (measured, predicted) times in seconds of copies between ranks. No constant was fitted to these copies."""
    links = {
        "copy": (cluster.peer_latency_s, cluster.peer_bytes_per_s),
        "copy across nodes": (cluster.rdma_latency_s, cluster.rdma_bytes_per_s_per_rank),
    }
    copies = [(p, *links[p.kind]) for p in points if p.kind in links]
    return [(p.seconds, p.copies * latency_s + p.copy_bytes / bytes_per_s) for p, latency_s, bytes_per_s in copies]


def copy_checks(points: Sequence[Point], cluster: Cluster) -> tuple[Constant, ...]:
    """Compares the constants of the links, which were fitted to exchanges, with copies between ranks on each kind of link."""
    found = []
    for kind, name in (("copy", "copies inside a node"), ("copy across nodes", "copies between nodes")):
        mine = [p for p in points if p.kind == kind]
        if mine:
            seconds_N2 = np.array(copy_seconds(mine, cluster))
            share_N = seconds_N2[:, 1] / seconds_N2[:, 0]
            basis = Basis.of(share_N - 1.0, mine)
            found.append(constant(name, float(np.median(share_N)), "by constants / measured", basis))
    return tuple(found)


def constant(name: str, value: float, unit: str, basis: Basis | None) -> Constant:
    """Returns a constant with the statistics of its basis. If the basis is None, it was not measured and has no statistics."""
    if basis is None or not len(basis.off_N):
        return Constant(name=name, value=value, unit=unit, num_points=0, median=None, worst=None, spread=None)
    size_N = np.abs(basis.off_N)
    return Constant(
        name=name, value=value, unit=unit, num_points=len(size_N), median=float(np.median(size_N)), worst=float(size_N.max()),
        spread=float(np.median(basis.spread_N)),
    )  # fmt: skip
