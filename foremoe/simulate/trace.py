"""Traces of simulated stages for Perfetto, with ranks, links, counters, and an arrow from every copy to the use that needs it."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.trace_events import TraceEvents, levels
from foremoe.plan.plan import Plan
from foremoe.plan.text import row_name
from foremoe.plan.transfers import Link
from foremoe.problem.schedule import Phase
from foremoe.simulate.result import Simulation

# Letters: U uses, G ranks, C weight copies, A gradient returns.

WAIT, WEIGHTS = "wait for other ranks", "wait for weights"
FORWARD = ("attention", WAIT, "tokens to experts", WEIGHTS, "expert compute", WAIT, "tokens back")
BACKWARD = ("tokens to experts", WEIGHTS, "expert compute", WAIT, "tokens back", "attention", WAIT)


class _Arrival(NamedTuple):
    """Copy or gradient that arrives at a rank."""

    start_s: float
    end_s: float
    name: str
    use: int  # use that needs the copy; -1 for a gradient
    args: dict[str, Any]


def trace(runs: Mapping[str, tuple[Plan, Simulation]]) -> TraceEvents:
    """Combines simulated stages into one timeline for Perfetto.

    Each entry of `runs` becomes a group with one track per rank. The tracks below a rank's own track show the weights and
    gradients that the rank receives. Counters of the group show the skew of the layer that runs, and the bytes of weights and
    gradients in flight.

    Args:
        runs: Plans and simulations, keyed by name, such as ``{"static": (plan, simulation), "planned": ...}``. Each rank of a
            pipeline has an entry of its own.

    Raises:
        InputError: A simulation does not belong to its plan, or there are too many events for a viewer.
    """
    out = TraceEvents()
    for pid, (name, (plan, simulation)) in enumerate(runs.items(), 1):
        if len(simulation.copy_start_C) != len(plan.transfers) or simulation.compute_UG.shape[1] != plan.G:
            raise InputError(f"the simulation of {name!r} belongs to another plan; give each plan with its own simulation.")
        out.process(pid, name)
        _Run(out, pid, plan, simulation).write()
    return out


class _Run:
    """Writer of one simulation to a trace."""

    def __init__(self, out: TraceEvents, pid: int, plan: Plan, simulation: Simulation) -> None:
        self.out, self.pid, self.plan, self.simulation = out, pid, plan, simulation
        self.again_L = _reforwarded_alone(plan)
        ratio = plan.header.cluster.window_backward_ratio
        self.backward_share = ratio / (1.0 + ratio)

    def write(self) -> None:
        """Writes each rank's own track, the tracks of each link class on which it receives copies, and the counters."""
        arrivals = self._arrivals()
        at_G, tid = [], 0
        for g in range(self.plan.G):
            at_G.append((self.pid, tid))
            self.out.track(*at_G[-1], f"rank {g}")
            tid += 1
            for link in sorted(name for rank, name in arrivals if rank == g):
                tid = self._link(arrivals[g, link], at_G[g], tid, f"rank {g}, {link}", g)
        for u in range(len(self.simulation.start_U)):
            self._use(u, at_G)
        self._skew()
        s, model = self.simulation, self.plan.header.model
        self._in_flight("weights in flight", s.copy_start_C, s.copy_end_C, model.expert_bytes)
        self._in_flight("gradients in flight", s.return_start_A, s.return_end_A, model.gradient_bytes)

    def _arrivals(self) -> dict[tuple[int, str], list[_Arrival]]:
        """Returns the arrivals at every rank, by rank and link."""
        s, plan, t = self.simulation, self.plan, self.plan.transfers
        node_G = plan.header.cluster.node_of_rank_G
        found: dict[tuple[int, str], list[_Arrival]] = {}
        for c in range(len(t)):
            link = Link(int(t.link_C[c]))
            source = "host" if link == Link.HOST else f"rank {t.src_C[c]}"
            m, layer, u = int(t.micro_step_C[c]), int(t.layer_C[c]), int(t.need_C[c])
            name = f"expert {t.expert_C[c]} from {source}, {row_name(plan, m, layer)}"
            args = self._args(m, layer) | {"phase": _phase(s, u), "expert": int(t.expert_C[c]), "source": source}
            args["bytes"] = plan.header.model.expert_bytes
            copy = _Arrival(float(s.copy_start_C[c]), float(s.copy_end_C[c]), name, u, args)
            found.setdefault((int(t.dst_C[c]), f"{link.name.lower()} in"), []).append(copy)
        near_A = node_G[s.return_src_A] == node_G[s.return_dst_A]
        for a in range(len(s.return_start_A)):
            m, layer, source = int(s.return_micro_step_A[a]), int(s.return_layer_A[a]), f"rank {s.return_src_A[a]}"
            name = f"gradient of expert {s.return_expert_A[a]} from {source}, {row_name(plan, m, layer)}"
            args = self._args(m, layer) | {"phase": "backward", "expert": int(s.return_expert_A[a]), "source": source}
            args["bytes"] = plan.header.model.gradient_bytes
            gradient = _Arrival(float(s.return_start_A[a]), float(s.return_end_A[a]), name, -1, args)
            key = (int(s.return_dst_A[a]), f"{'peer' if near_A[a] else 'rdma'} in, gradients")
            found.setdefault(key, []).append(gradient)
        return found

    def _link(self, arrivals: list[_Arrival], at: tuple[int, int], tid: int, title: str, rank: int) -> int:
        """Writes one link of one rank, on separate tracks if arrivals overlap. Returns the next free track."""
        s = self.simulation
        arrivals.sort()
        level_X = levels([(one.start_s, one.end_s) for one in arrivals])
        for level in range(max(level_X) + 1):
            self.out.track(self.pid, tid + level, title)
        for level, one in zip(level_X, arrivals, strict=True):
            here = (self.pid, tid + level)
            self.out.slice(here, one.name, one.start_s, one.end_s, one.args)
            u, half_s = one.use, (one.end_s - one.start_s) / 2.0
            # An arrow must begin and end inside slices, or viewers drop it.
            begin_s, done_s = (float(at_G[rank]) for at_G in _computing(s, u, s.compute_UG[u])) if u >= 0 else (0.0, 0.0)
            if done_s - begin_s > 1e-8 and half_s > 1e-8:
                self.out.flow("copy", (here, one.start_s + half_s), (at, (begin_s + done_s) / 2.0))
        return tid + max(level_X) + 1

    def _use(self, u: int, at_G: list[tuple[int, int]]) -> None:
        s = self.simulation
        m, layer, backward = int(s.micro_step_U[u]), int(s.layer_U[u]), s.phase_U[u] == Phase.BACKWARD
        name = f"{row_name(self.plan, m, layer)}, {_phase(s, u)}"
        args = self._args(m, layer) | {"phase": _phase(s, u)}
        parts: tuple[str, ...] = FORWARD
        if backward:
            again = bool(self.again_L[layer])
            parts = ("re-forward" if again else WEIGHTS, *BACKWARD)
            times_XG = _backward_times(s, u, self.backward_share if again else 1.0)
        else:
            times_XG = _forward_times(s, u)
        for at, times_X in zip(at_G, times_XG.T.tolist(), strict=True):
            self.out.slice(at, name, s.start_U[u], s.end_U[u], args)
            for part, (start_s, end_s) in zip(parts, pairwise(times_X), strict=True):
                self.out.slice(at, part, start_s, end_s)

    def _args(self, micro_step: int, layer: int) -> dict[str, Any]:
        return {"micro_step": micro_step, "layer": layer, "model_layer": int(self.plan.header.moe_layer_L[layer])}

    def _skew(self) -> None:
        """Writes the skew of the layer in each use. Between uses, the counter is 0."""
        s = self.simulation
        skew_U = np.round(self.plan.skew_ML[s.micro_step_U, s.layer_U], 4).tolist()
        next_U = [*s.start_U[1:].tolist(), np.inf]
        for start_s, end_s, next_s, skew in zip(s.start_U.tolist(), s.end_U.tolist(), next_U, skew_U, strict=True):
            self.out.counter(self.pid, "skew", start_s, "max / mean", skew)
            if next_s > end_s + 1e-9:
                self.out.counter(self.pid, "skew", end_s, "max / mean", 0)

    def _in_flight(self, name: str, start_X: Array, end_X: Array, num_bytes: int) -> None:
        """Writes the bytes that are in flight between the start and the end of each copy."""
        at_X, of_X = np.unique(np.round(np.concatenate([start_X, end_X]), 9), return_inverse=True)
        change_X = np.bincount(of_X[: len(start_X)], minlength=len(at_X)) - np.bincount(of_X[len(start_X) :], minlength=len(at_X))
        for at_s, copies in zip(at_X.tolist(), np.cumsum(change_X).tolist(), strict=True):
            self.out.counter(self.pid, name, at_s, "bytes", copies * num_bytes)


def _phase(s: Simulation, u: int) -> str:
    return Phase(int(s.phase_U[u])).name.lower()


def _forward_times(s: Simulation, u: int) -> Array:
    """Returns the boundaries between the parts of a forward use, for every rank, float64 [8, G]."""
    attended_G = np.minimum(s.start_U[u] + s.window_UG[u].astype(np.float64), s.window_U[u])
    before, after = (s.start_U[u], attended_G, s.window_U[u], s.dispatched_U[u]), (s.computed_U[u], s.end_U[u])
    return _each_rank(*before, *_computing(s, u, s.compute_UG[u]), *after)


def _backward_times(s: Simulation, u: int, share: float) -> Array:
    """Returns the boundaries between the parts of a backward use, for every rank, float64 [9, G].

    The part `share` of attention and compute is backward, and the rest is recomputation.
    """
    window_G, compute_G = (part_UG[u].astype(np.float64) * share for part_UG in (s.window_UG, s.compute_UG))
    back = max(float(s.end_U[u]) - float(window_G.max()), float(s.computed_U[u]))
    after = (s.computed_U[u], back, np.minimum(back + window_G, s.end_U[u]), s.end_U[u])
    return _each_rank(s.start_U[u], s.window_U[u], s.dispatched_U[u], *_computing(s, u, compute_G), *after)


def _computing(s: Simulation, u: int, compute_G: Array) -> tuple[Array, Array]:
    """Returns the times when every rank's experts begin and end in a use."""
    begin_G = np.minimum(s.dispatched_U[u] + s.wait_UG[u].astype(np.float64), s.ready_U[u])
    return begin_G, np.minimum(begin_G + compute_G, s.computed_U[u])


def _each_rank(*times: Array | float) -> Array:
    return np.stack(np.broadcast_arrays(*times))


def _reforwarded_alone(plan: Plan) -> Array:
    """Returns bool [L], True for layers recomputed in their backward use. In larger blocks, recomputation has separate uses."""
    schedule = plan.header.schedule
    if not schedule.reforward or schedule.block_L is None:
        return np.full(plan.L, schedule.reforward)
    return np.asarray(np.bincount(schedule.block_L)[schedule.block_L] == 1)
