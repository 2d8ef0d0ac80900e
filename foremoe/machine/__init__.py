"""Sizes and rates of model, machine and trainer, with presets."""

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.machine.trainer import Trainer

__all__ = ["Cluster", "Model", "Trainer"]
