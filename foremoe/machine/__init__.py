"""The model, the machine and the trainer: sizes, rates and presets."""

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.machine.trainer import Trainer

__all__ = ["Cluster", "Model", "Trainer"]
