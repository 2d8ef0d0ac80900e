"""The gate, which decides whether a fit counts as calibrated and suggests how to improve it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster

MOST_RESIDUAL, MOST_SPREAD = 0.25, 0.10
MOST_TAKEN = 1.0  # residual above which a fit is useless, because errors exceed the times themselves
LEAST_RATIO = 0.1  # smallest ratio of backward to forward
FAST = 1e15  # bytes/s of a link that takes no measurable time
# Limits of fitted values. `copy_contention` has no lower limit, because copy engines may take no time from compute.
LIMITS = {
    "compute_efficiency": 1.0, "attention_efficiency": 1.0, "slot_overhead_s": 0.0, "slot_backward_s": 0.0,
    "layer_overhead_s": 0.0, "pair_overhead_s": 0.0, "backward_ratio": LEAST_RATIO, "attention_backward_ratio": LEAST_RATIO,
    "peer_bytes_per_s": FAST, "peer_latency_s": 0.0, "rdma_bytes_per_s": FAST, "rdma_latency_s": 0.0,
    "host_bytes_per_s": FAST, "host_latency_s": 0.0, "copy_contention": 1.0,
}  # fmt: skip

# Constants that the host's launches decide. Their repeats always vary.
_BY_HOST = ("host_layer_s", "planned_layer_s", "planned_token_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A fitted constant, or another figure that the fit relies on.

    Attributes:
        name: Name of the field in `Cluster`, or name of a check.
        value: Fitted value.
        unit: Unit of the value.
        num_points: Number of points to which it was fitted, or 0 if it was not measured.
        median: Median of the absolute relative residuals, or None without points.
        worst: Largest absolute relative residual, or None without points.
        spread: Median of `Point.spread` over the points of the constant, or None without points.
    """

    name: str
    value: float
    unit: str
    num_points: int
    median: float | None
    worst: float | None
    spread: float | None


class Fault(NamedTuple):
    """A reason why constants do not count as calibrated. The text is a sentence with the figure, its limit and a remedy."""

    names: str
    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.names}: {self.what}; {self.cure}."


def require_taken(cluster: Cluster, file: str, otherwise: str) -> None:
    """Raises InputError for a cluster file whose residual is too large for decisions.

    Args:
        cluster: Content of the file.
        file: Name of the file.
        otherwise: Sentence of the message that says how to accept the file despite its residual.

    Raises:
        InputError: The residual is above `MOST_TAKEN`.
    """
    if cluster.residual is not None and cluster.residual > MOST_TAKEN:
        fault = f"the fit in {file} has a residual of {cluster.residual:.0%}, above {MOST_TAKEN:.0%}"
        cure = "measure again with foremoe calibrate and nothing else running, or use a preset"
        raise InputError(f"{fault}, so its times cannot be used; {cure}. {otherwise}")


def at_limit(constant: Constant) -> bool:
    """Returns True if a constant was measured and its fitted value is at the limit of the constant, up to rounding."""
    limit = LIMITS.get(constant.name)
    return constant.num_points > 0 and limit is not None and math.isclose(constant.value, limit, rel_tol=1e-9)


def faults(constants: Iterable[Constant]) -> tuple[Fault, ...]:
    """Returns one fault for every figure that fails.

    A figure fails if its residual is above `MOST_RESIDUAL`, if the spread of its repeats is above `MOST_SPREAD`, or if the
    constant is at its limit. Figures that were not measured cannot fail.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for constant in constants:
        for why in _faults(constant):
            # Constants of one system of equations have the same points, and therefore the same sentence.
            found.setdefault(why, []).append(constant.name)
    return tuple(Fault(", ".join(names), *why) for why, names in found.items())


def _faults(c: Constant) -> Iterator[tuple[str, str]]:
    if c.worst is None or c.spread is None:
        return
    if c.worst > MOST_RESIDUAL:
        cure = "measure at the sizes of your run, or for more seconds with nothing else running"
        yield f"worst residual of {c.num_points} points {c.worst:.1%}, above {MOST_RESIDUAL:.0%}", cure
    if at_limit(c):
        cure = "the points do not determine it, so measure more tokens or larger sizes"
        yield f"at its limit, {c.value:g} {c.unit}", cure
    if c.spread > MOST_SPREAD and c.name not in _BY_HOST:
        yield f"repeats spread by {c.spread:.1%}, above {MOST_SPREAD:.0%}", "stop all other work, or give more seconds"
