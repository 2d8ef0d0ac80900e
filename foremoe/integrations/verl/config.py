"""EngineConfig: veRL's Megatron engine config with one more key; named in YAML by ``_target_``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.workers.config.engine import McoreEngineConfig

from foremoe.integrations.verl.settings import Settings

__all__ = ["EngineConfig", "Settings"]


@dataclass
class EngineConfig(McoreEngineConfig):  # type: ignore[misc]
    """`McoreEngineConfig` and `foremoe`: `Settings`, or a mapping of them; None leaves the engine as it is."""

    foremoe: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "foremoe", Settings.of(self.foremoe))
