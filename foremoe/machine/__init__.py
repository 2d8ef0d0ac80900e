"""The sizes of models, the speeds of machines and the settings of trainers, with presets."""

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.machine.trainer import Trainer

__all__ = ["Cluster", "Model", "Trainer"]
