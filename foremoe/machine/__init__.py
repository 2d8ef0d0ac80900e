"""The model and the machine: sizes, rates and presets."""

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model

__all__ = ["Cluster", "Model"]
