"""Gate: decides whether a fit counts as calibrated, and says how to improve it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster

MOST_RESIDUAL, MOST_SPREAD = 0.25, 0.10
MOST_TAKEN = 1.0  # residual beyond which a fit decides nothing: its seconds are wrong by more than they are long
LEAST_RATIO = 0.1  # of backward over forward
FAST = 1e15  # bytes/s of a link that takes no measurable time
# Where the fit stops. Copy engines may take nothing from compute, so that 0 is a figure for `copy_contention`, not a limit.
LIMITS = {
    "compute_efficiency": 1.0, "attention_efficiency": 1.0, "slot_overhead_s": 0.0, "slot_backward_s": 0.0,
    "layer_overhead_s": 0.0, "pair_overhead_s": 0.0, "backward_ratio": LEAST_RATIO, "attention_backward_ratio": LEAST_RATIO,
    "peer_bytes_per_s": FAST, "peer_latency_s": 0.0, "rdma_bytes_per_s": FAST, "rdma_latency_s": 0.0,
    "host_bytes_per_s": FAST, "host_latency_s": 0.0, "copy_contention": 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A fitted constant, or another figure that the fit relies on.

    Attributes:
        name: Name as in `Cluster`, in ``Fit.runtime``, or of a check.
        num_points: Points it was fitted on; 0: it was not measured.
        median: Median of the absolute relative residuals; None without points.
        worst: Largest absolute relative residual; None without points.
        spread: Median of `Point.spread` over its points; None without points.
    """

    name: str
    value: float
    unit: str
    num_points: int
    median: float | None
    worst: float | None
    spread: float | None


class Fault(NamedTuple):
    """A fault of constants; its text is a sentence with the number, its limit and the remedy."""

    names: str
    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.names}: {self.what}; {self.cure}."


def require_taken(cluster: Cluster, file: str, otherwise: str) -> None:
    """Refuses a cluster file whose residual is too large to be used for decisions.

    Args:
        cluster: Content of the file.
        file: Name of the file.
        otherwise: How to accept it anyway, in words.

    Raises:
        InputError: Its residual is above `MOST_TAKEN`.
    """
    if cluster.residual is not None and cluster.residual > MOST_TAKEN:
        fault = f"the fit in {file} has a residual of {cluster.residual:.0%}, above {MOST_TAKEN:.0%}"
        cure = "measure again with foremoe calibrate and nothing else running, or take a preset"
        raise InputError(f"{fault}, so its seconds say nothing; {cure}. {otherwise}")


def at_limit(constant: Constant) -> bool:
    """True if a constant was measured and the fit stopped at its limit, to rounding."""
    limit = LIMITS.get(constant.name)
    return constant.num_points > 0 and limit is not None and math.isclose(constant.value, limit, rel_tol=1e-9)


def faults(constants: Iterable[Constant]) -> tuple[Fault, ...]:
    """Returns every figure that is not good enough.

    A fit fails if a residual is above `MOST_RESIDUAL`, repeats spread by more than `MOST_SPREAD`, or a constant is at its limit.
    Figures that were not measured cannot fail.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for constant in constants:
        for why in _faults(constant):
            # Constants of one system of equations share their points, and the sentence.
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
    if c.spread > MOST_SPREAD and c.name != "host_layer_s":  # no two calls take a host equally long
        yield f"repeats spread by {c.spread:.1%}, above {MOST_SPREAD:.0%}", "stop what else runs, or give more seconds"
