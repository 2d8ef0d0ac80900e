"""Runs all measurements of a calibration on one rank of a group. All ranks call `measure` together."""

import os
import platform
import socket
from collections.abc import Callable, Sequence

import torch

from foremoe.base.errors import TransferError
from foremoe.base.hardware import hardware
from foremoe.base.version import __version__
from foremoe.calibrate.case import Case, require_time
from foremoe.calibrate.computing import ExpertCompute, Layers, draw_routing
from foremoe.calibrate.copies import Copies, beside_point, copy_points, find_ways
from foremoe.calibrate.links import exchange_points
from foremoe.calibrate.points import Measured, Point
from foremoe.calibrate.stopwatch import Stopwatch, one_lap
from foremoe.distributed.group import Group

# Letters: G ranks.

Progress = Callable[[str, int, int], None]  # (next measurement, share of the budget that is used, whole budget)
_SHARES = {"peak": 0.02, "experts": 0.33, "layers": 0.33, "exchanges": 0.12, "copies": 0.1, "copies beside compute": 0.1}


def measure(
    group: Group, case: Case, device: torch.device, progress: Progress, node_of_rank: Sequence[int] | None = None
) -> Measured:
    """Measures and returns all points. Collective, with the same result on all ranks. By default, nodes are found by host name.

    Raises:
        InputError: Even the smallest possible number of runs would take much longer than ``case.seconds``. All ranks raise this
            error.
    """
    names = group.gather(socket.gethostname())
    nodes = tuple(names.index(name) for name in names) if node_of_rank is None else tuple(node_of_rank)
    nodes = tuple(sorted(set(nodes)).index(node) for node in nodes)
    dtype = torch.float32 if case.model.bytes_per_weight == 4.0 else torch.bfloat16
    watch = Stopwatch(group, device)
    points: list[Point] = []
    done = 0.0

    def next_s(what: str) -> float:
        nonlocal done
        progress(what, round(100 * done), 100)
        done += _SHARES[what]
        return case.seconds * _SHARES[what]

    peak = _peak(watch, dtype, next_s("peak"))
    experts = ExpertCompute(group, case, dtype, device)
    require_time(case, experts.flops_per_s(watch))
    points += experts.points(watch, next_s("experts"))
    layers = Layers(group, case, dtype, device, nodes)
    try:
        points += layers.points(watch, next_s("layers"))
    finally:
        layers.runtime.close()

    # Kinds of links: inside nodes, and between nodes.
    links = [across for across, there in ((False, len(set(nodes)) < len(nodes)), (True, len(set(nodes)) > 1)) if there]
    budget_s = next_s("exchanges") / max(1, len(links))
    pairs = case.tokens * case.model.num_topk
    for across in links:
        rows = sorted({group.size, *(max(group.size, pairs // part) for part in (16, 4, 1))})
        points += exchange_points(group, watch, nodes, across, rows, case.model, dtype, budget_s)

    ways, unavailable = find_ways(group, case.model, device, nodes)
    num_ways = max(1, len(ways))
    copy_s, beside_s = next_s("copies") / num_ways, case.seconds * _SHARES["copies beside compute"] / num_ways
    # With few tokens on a GPU, the host would take longer than the device, and its work for copies would count as lost compute.
    tokens = case.tokens if device.type == "cuda" else max(8, case.tokens // 32)
    num_S = draw_routing(case, tokens, False).busy(group.rank)
    x_YH, row = experts.inputs(num_S), experts.row(num_S)

    def compute() -> None:
        with torch.no_grad():
            experts.forward(x_YH, row)

    compute_s = watch.laps(one_lap(compute), beside_s / 10)[0][0]
    for way in ways:
        copies = Copies(group, case.model, device, way)
        try:
            found = copy_points(copies, watch, copy_s)
            progress("copies beside compute", round(100 * done), 100)
            points += [*found, beside_point(copies, watch, compute, found[-1].seconds, compute_s, beside_s)]
        finally:
            copies.backend.close()
    progress("copies beside compute", 100, 100)
    return Measured(
        points=tuple(points), flops_per_s=peak, memory_bytes=_memory_bytes(device, nodes, group.rank), node_of_rank=nodes,
        hardware=_hardware(device), unavailable=unavailable,
        versions={"foremoe": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    )  # fmt: skip


def _peak(watch: Stopwatch, dtype: torch.dtype, budget_s: float) -> float:
    n = 8192 if watch.device.type == "cuda" else 768
    left, right = (torch.randn(n, n, dtype=dtype, device=watch.device) for _ in range(2))
    ((seconds, _),) = watch.laps(one_lap(lambda: torch.mm(left, right)), budget_s)
    return 2.0 * n**3 / seconds


def _memory_bytes(device: torch.device, nodes: Sequence[int], rank: int) -> int:
    """Returns the memory of one rank in bytes: that of its GPU or, without a GPU, its part of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // list(nodes).count(nodes[rank])
    except (OSError, ValueError):
        raise TransferError("the operating system does not report the size of the memory.") from None


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {platform.system()} {platform.machine()}"
    found = hardware()
    return f"{found['processor']}, {found['cores']} cores, {found['system']}"
