"""Host time per layer if the host waits for counts from the device before it launches kernels.

If a layer's counts are known in advance, the whole layer can be captured in a graph or launched ahead of the device. The host
then adds no time. If the host reads counts from the device, every layer takes as long as the slower of host and device.
"""

import numpy as np

from foremoe.base.arrays import Array


def host_waits_s(host_layer_s: float, device_s: Array, passes: float) -> Array:
    """Returns the seconds to add to the window of a forward pass, so that all passes take at least as long as the host needs.

    Args:
        host_layer_s: Host time in seconds of one layer and forward pass.
        device_s: Device times in seconds of all passes of a layer, an array of any shape.
        passes: Number of passes in units of a forward pass. A backward pass counts as the backward time of the window divided by
            its forward time.
    """
    return np.maximum(0.0, host_layer_s - device_s / passes)
