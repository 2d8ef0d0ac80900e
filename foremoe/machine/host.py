"""The host's part of a layer: launches, where it waits for counts from the device and so cannot run ahead.

Where a layer's counts are known before it, the whole layer can be captured in a graph, or launched ahead of the device, and the
host takes no time of its own. Where it reads counts from the device, every layer takes the longer of host and device.
"""

import numpy as np

from foremoe.base.arrays import Array

# Kernels of a layer, forward and backward, with the router in a graph (Megatron Bridge, skill moe-comm-overlap: Qwen3-30B-A3B).
LAUNCHES = 150.8
# Forward's part of the launches: backward has two GEMMs for each of forward's.
_FORWARD = 1.0 / 3.0


def counted_layer_s(launch_s: float) -> float:
    """`Cluster.host_layer_s` of layers whose counts come from the device, at `launch_s` of host a launch."""
    return LAUNCHES * _FORWARD * launch_s


def host_waits_s(host_layer_s: float, device_s: Array, passes: float) -> Array:
    """Seconds that a forward's window is longer for, so that all passes take as long as the host's launches.

    Args:
        host_layer_s: Of one layer and forward pass.
        device_s: Seconds of the device in all passes of a layer, any shape.
        passes: Passes in units of a forward: backward counts as its ratio of the window.
    """
    return np.maximum(0.0, host_layer_s - device_s / passes)
