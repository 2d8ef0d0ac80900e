"""Workloads, which hold the number of pairs for each micro-step, layer, source rank and expert."""

from foremoe.workload.dealing import Dealt
from foremoe.workload.packing import AsGiven, PackSolver
from foremoe.workload.recordings import open_recordings
from foremoe.workload.routed_experts import ReadSummary, count_workload, from_routed_experts
from foremoe.workload.routed_tokens import RoutedTokens
from foremoe.workload.skew import skew_statistics
from foremoe.workload.workload import Workload

__all__ = [
    "AsGiven", "Dealt", "PackSolver", "ReadSummary", "RoutedTokens", "Workload", "count_workload", "from_routed_experts",
    "open_recordings", "skew_statistics",
]  # fmt: skip
