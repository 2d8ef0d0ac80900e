"""The host's time per layer: launches, if it waits for counts from the device and so cannot run ahead.

If a layer's counts are known in advance, the whole layer can be captured in a graph or launched ahead of the device, and the
host takes no time of its own. If the host reads counts from the device, every layer takes the longer of host and device.
"""

import numpy as np

from foremoe.base.arrays import Array

# Kernels of a layer, forward and backward, with the router in a graph (Megatron Bridge, skill moe-comm-overlap: Qwen3-30B-A3B).
LAUNCHES = 150.8
# Forward's part of the launches: backward has two GEMMs for each of forward's.
_FORWARD = 1.0 / 3.0


def counted_layer_s(launch_s: float) -> float:
    """`Cluster.host_layer_s` of layers whose counts come from the device, with `launch_s` of host time per launch."""
    return LAUNCHES * _FORWARD * launch_s


def host_waits_s(host_layer_s: float, device_s: Array, passes: float) -> Array:
    """Seconds by which a forward's window is longer, so that all passes take as long as the host's launches.

    Args:
        host_layer_s: Host seconds of one layer and forward pass.
        device_s: Device seconds in all passes of a layer, any shape.
        passes: Passes in units of a forward: backward counts as its ratio of the window.
    """
    return np.maximum(0.0, host_layer_s - device_s / passes)
