"""CostModel: seconds per row in closed form, part by part, and the objective that solvers minimise.

The model is row-separable by definition: a row's copies hide under that row's own time, and what couples rows (slot rings,
links shared by neighbouring layers) is left to simulation. A mixed-integer program can express every part. Its constants come
from `Cluster`; unless ``cluster.calibrated`` they are data-sheet figures and every time is *model, uncalibrated*.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, frozen_array
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.problem.bounds import load_bound, time_bound
from foremoe.problem.kernels.features import feature_rows
from foremoe.problem.laws import require_slots
from foremoe.problem.slots import SharedSlots

if TYPE_CHECKING:
    from foremoe.machine.model import Model
    from foremoe.problem.placement import Placement
    from foremoe.problem.problem import Problem

# How many uses of a layer an engine's copies are ahead unless told otherwise; see `transfer.Engine`.
PREFETCH = 2

# Letters: N rows, M micro-steps, L layers, G ranks, V nodes, E experts, S slots per rank, F features.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cost(ArrayValue):
    """Seconds by part; all parts have one shape ([], [N] or [M, L]) and add up to `total_s`.

    Attributes:
        window_s: compute of the late rank before the layer (attention), all passes.
        dispatch_s, combine_s: tokens to the experts and back, all passes; they last as long as the busiest rank's.
        compute_s: expert compute of the slowest rank, all passes.
        transfer_s: weight copies that do not hide, and what copying slows down.
        gradient_s: the same for replica gradients on their way home.
    """

    window_s: Array
    dispatch_s: Array
    compute_s: Array
    combine_s: Array
    transfer_s: Array
    gradient_s: Array

    def __post_init__(self) -> None:
        shape = np.shape(self.window_s)
        for part in dataclasses.fields(self):
            object.__setattr__(self, part.name, frozen_array(getattr(self, part.name), np.float64, part.name, shape))

    def parts(self) -> dict[str, Array]:
        """Part name to seconds."""
        return {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}

    @property
    def total_s(self) -> Array:
        """Seconds over all parts, same shape as a part."""
        return np.asarray(sum(self.parts().values()))

    def __add__(self, other: Cost) -> Cost:
        theirs = other.parts()
        return Cost(**{name: part + theirs[name] for name, part in self.parts().items()})

    def sum(self) -> Cost:
        """One Cost without axes: every part summed over all rows."""
        return Cost(**{name: part.sum() for name, part in self.parts().items()})

    def reshape(self, *shape: int) -> Cost:
        """The same parts in another shape."""
        return Cost(**{name: part.reshape(*shape) for name, part in self.parts().items()})


class Rates(NamedTuple):
    """The closed form's coefficients for one problem, in seconds; `CostModel.rows` and the exact solver's objective share them.

    A row costs ``base_N + fixed_s + max_g(pair_s * load_g + slot_s * busy_g)``, plus ``peer_pair_s`` / ``rdma_pair_s``
    for every pair dispatched inside / across nodes (a rank's own pairs are free; averaged over ranks), plus
    ``replica_*_s`` per replica, plus ``max(0, t - hide_forward_N)`` (and for sends in backward ``hide_backward_N``) where t is
    the largest ``copies * copy_*_s`` of any rank, direction and link class, plus the same for gradients.

    ``busy_g`` counts base slots whose expert has load and redundant slots with a quota. Of ``pair_s``, ``late_s`` is for
    exchange: it ends when the rank with the most pairs has its own, so what this rank has above the mean comes on top.
    """

    pair_s: float
    late_s: float
    slot_s: float
    fixed_s: float
    peer_pair_s: float
    rdma_pair_s: float
    copy_peer_s: float
    copy_rdma_s: float
    gradient_peer_s: float
    gradient_rdma_s: float
    replica_peer_s: float
    replica_rdma_s: float
    window_N: Array
    window_passes: float
    mean_N: Array
    hide_forward_N: Array
    hide_backward_N: Array
    sends_backward: bool
    returns_gradients: bool

    @property
    def base_N(self) -> Array:
        """float64 [N], seconds that no placement changes: windows, less the mean load's exchange, which is counted twice."""
        base_N: Array = self.window_passes * self.window_N - self.late_s * self.mean_N
        return base_N


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What to minimise, and how much of the window hides copies.

    Attributes:
        objective: ``"time"``: seconds of the row; ``"balance"``: the largest rank load only.
        overlap: share of the time before the experts are needed under which copies hide, 0 (nothing is hidden, as when planning
            on line) to 1. That time is the window and the balanced expert compute of as many layers as copies may be ahead
            (`PREFETCH`, if slots have buffers enough; with a single one, the window alone).
    """

    objective: str = "time"
    overlap: float = 1.0

    def __post_init__(self) -> None:
        if self.objective not in ("time", "balance"):
            raise InputError(f'objective must be "time" or "balance"; got {self.objective!r}.')
        if not isinstance(self.overlap, int | float) or not 0.0 <= self.overlap <= 1.0:
            raise InputError(f"overlap must lie in [0, 1]; got {self.overlap!r}.")

    def rates(self, problem: Problem) -> Rates:
        """The coefficients of the closed form for `problem`."""
        model, cluster, G = problem.model, problem.cluster, problem.G
        backward, reforward = float(problem.schedule.trains), float(problem.schedule.reforward)
        gemm_passes = 1.0 + cluster.backward_ratio * backward + reforward
        comm_passes = 1.0 + backward + reforward
        rdma_bytes_per_s = cluster.rdma_bytes_per_s_per_rank
        window_M = window_seconds(problem).max(axis=1)
        window_N = np.repeat(window_M, problem.L)
        pair_forward_s = model.flops_per_pair / cluster.expert_flops_per_s + cluster.pair_overhead_s
        mean_N = problem.load_NE.sum(axis=1, dtype=np.float64) / G
        # With room to prefetch, copies also run under the layers before; their balanced time stands for it.
        ahead = min(PREFETCH, problem.slots.depth - 1) if isinstance(problem.slots, SharedSlots) else PREFETCH
        hide_N = self.overlap * (ahead * (window_N + pair_forward_s * mean_N) if ahead else window_N)
        copy_peer_s = model.expert_bytes / cluster.peer_bytes_per_s + cluster.peer_latency_s
        # Across nodes a copy may also come from the node's host store, whichever is faster.
        host_s = model.expert_bytes / cluster.host_bytes_per_s + cluster.host_latency_s
        copy_rdma_s = min(model.expert_bytes / rdma_bytes_per_s + cluster.rdma_latency_s, host_s)
        gradient_peer_s = model.gradient_bytes / cluster.peer_bytes_per_s + cluster.peer_latency_s
        gradient_rdma_s = model.gradient_bytes / rdma_bytes_per_s + cluster.rdma_latency_s
        sends_backward = bool(backward) and isinstance(problem.slots, SharedSlots)
        sends = 1.0 + sends_backward
        price = cluster.copy_contention / G
        late_s = cluster.late_byte_s * (2.0 * comm_passes * model.token_bytes)
        return Rates(
            pair_s=pair_forward_s * gemm_passes + late_s,
            late_s=late_s,
            slot_s=cluster.slot_overhead_s * gemm_passes,
            fixed_s=2.0 * comm_passes * cluster.exchange_latency_s,
            peer_pair_s=2.0 * comm_passes * model.token_bytes / (G * cluster.peer_bytes_per_s),
            rdma_pair_s=2.0 * comm_passes * model.token_bytes / (G * rdma_bytes_per_s),
            copy_peer_s=copy_peer_s,
            copy_rdma_s=copy_rdma_s,
            gradient_peer_s=gradient_peer_s,
            gradient_rdma_s=gradient_rdma_s,
            replica_peer_s=price * (sends * copy_peer_s + backward * gradient_peer_s),
            replica_rdma_s=price * (sends * copy_rdma_s + backward * gradient_rdma_s),
            window_N=window_N,
            window_passes=1.0 + cluster.window_backward_ratio * backward + reforward,
            mean_N=mean_N,
            hide_forward_N=hide_N,
            hide_backward_N=(cluster.backward_ratio + reforward) * hide_N,
            sends_backward=sends_backward,
            returns_gradients=bool(backward),
        )

    def objective_N(self, problem: Problem, placement: Placement) -> Array:
        """float64 [N]: what solvers minimise; pairs on the busiest rank under balance, seconds of the row under time."""
        if self.objective == "balance":
            return placement.load_NG().max(axis=1).astype(np.float64)
        return self.rows(problem, placement).total_s

    def rows(self, problem: Problem, placement: Placement) -> Cost:
        """Cost of every row, [N]."""
        r = self.rates(problem)
        f = _features(problem, placement, r)
        peer_pairs_N, rdma_pairs_N = f["node_pairs"] - f["local_pairs"], f["pairs"] - f["node_pairs"]
        # The slowest rank by compute and exchange together; what is not its compute is exchange.
        slowest_N = f["slowest"] - r.late_s * r.mean_N
        late_N = np.maximum(0.0, slowest_N - f["compute"])
        exchange_N = (r.fixed_s + r.peer_pair_s * peer_pairs_N + r.rdma_pair_s * rdma_pairs_N + late_N) / 2.0
        copy_N = np.maximum(f["peer_fan"] * r.copy_peer_s, f["rdma_fan"] * r.copy_rdma_s)
        transfer_N = np.maximum(0.0, copy_N - r.hide_forward_N)
        if r.sends_backward:
            transfer_N = transfer_N + np.maximum(0.0, copy_N - r.hide_backward_N)
        transfer_N = transfer_N + r.replica_peer_s * f["peer_copies"] + r.replica_rdma_s * f["rdma_copies"]
        gradient_N = np.zeros(problem.N)
        if r.returns_gradients:
            back_N = np.maximum(f["peer_fan"] * r.gradient_peer_s, f["rdma_fan"] * r.gradient_rdma_s)
            gradient_N = np.maximum(0.0, back_N - r.hide_backward_N)
        return Cost(
            window_s=r.window_passes * r.window_N,
            dispatch_s=exchange_N,
            compute_s=slowest_N - late_N,
            combine_s=exchange_N,
            transfer_s=transfer_N,
            gradient_s=gradient_N,
        )

    def bound_N(self, problem: Problem, load_bound_N: Array | None = None) -> Array:
        """float64 [N]: no placement that keeps the homes has a smaller objective; `load_bound_N` if it is known already."""
        if load_bound_N is None:
            load_bound_N = self.load_bound_N(problem)
        if self.objective == "balance":
            return load_bound_N
        r = self.rates(problem)
        # Rounding: the bound adds up in another order than `rows`, so it gives way by some units in the last place.
        bound_N: Array = r.base_N + time_bound(problem, r, load_bound_N)
        return bound_N - 1e-12 * (np.abs(r.base_N) + np.abs(bound_N))

    def load_bound_N(self, problem: Problem) -> Array:
        """float64 [N], whole numbers: the largest rank load cannot be smaller in any placement that keeps the homes."""
        return load_bound(problem).astype(np.float64)

    def peak_bytes_G(self, problem: Problem, placement: Placement) -> Array:
        """int64 [G]: expert weights and gradients at home, slot buffers, and the activations of the rank's busiest row.

        Attention, optimizer state and activations kept for backward are the trainer's and not counted.
        """
        busiest_G = placement.load_NG().max(axis=0)
        return fixed_bytes(problem) + np.ceil(busiest_G * activation_bytes(problem.model)).astype(np.int64)


def window_seconds(problem: Problem) -> Array:
    """float64 [M, G]: seconds of one forward that precede a layer's experts: attention, and what every layer takes."""
    cluster = problem.cluster
    if problem.tokens_MG is None:
        return np.full((problem.M, problem.G), cluster.layer_overhead_s)
    squares_MG = 0.0 if problem.attention_MG is None else problem.attention_MG
    flops_MG = problem.model.attention_flops(problem.tokens_MG.astype(np.float64), squares_MG)
    return np.asarray(flops_MG / cluster.attention_flops_per_s + cluster.layer_overhead_s)


def fixed_bytes(problem: Problem) -> int:
    """Bytes of every rank that do not change over the stage: expert weights, gradients and slot buffers."""
    model = problem.model
    per_buffer = model.expert_bytes + (model.gradient_bytes if problem.stage == "update" else 0)
    return (problem.B * problem.L + problem.slots.num_buffers(problem.R, problem.L)) * per_buffer


def activation_bytes(model: Model) -> float:
    """Bytes of the activations of one (token, expert) pair."""
    return model.bytes_per_activation * (2 * model.hidden_size + model.num_matrices * model.ffn_size)


FEATURES = ("slowest", "compute", "pairs", "local_pairs", "node_pairs", "peer_fan", "rdma_fan", "peer_copies", "rdma_copies")


def _features(problem: Problem, placement: Placement, rates: Rates) -> dict[str, Array]:
    """What the closed form needs of a placement, [N] each; see `cost_kernels.feature_rows`."""
    out_NF = np.zeros((problem.N, len(FEATURES)))
    load_NGE, demand_NVE, located = problem.sources()
    node_G, home_LE = problem.cluster.node_of_rank_G, problem.home_LE
    expert_NGS, quota_NGS = placement.expert_NGS, placement.quotas_NGS
    require_slots(expert_NGS, (problem.N, problem.G, problem.S), problem.E, problem.L)

    def block(low: int, high: int) -> None:
        feature_rows(
            low, high, problem.load_NE, load_NGE, demand_NVE, located, home_LE, node_G, problem.B,
            expert_NGS, quota_NGS, rates.pair_s, rates.pair_s - rates.late_s, rates.slot_s, out_NF,
        )  # fmt: skip

    for_rows(block, problem.N, whole=True)
    return {name: out_NF[:, i] for i, name in enumerate(FEATURES)}
