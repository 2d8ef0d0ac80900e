"""`EngineConfig`: veRL's config of the Megatron engine with one more key. Select it in YAML with ``_target_``."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

from verl.workers.config.engine import McoreEngineConfig

from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import Settings
from foremoe.integrations.verl.engine import PLATFORM

_logger = logging.getLogger(__name__)

__all__ = ["EngineConfig", "Settings"]


@dataclass
class EngineConfig(McoreEngineConfig):  # type: ignore[misc]
    """``McoreEngineConfig`` with a key `foremoe` for `Settings` or a mapping of settings. None leaves the engine unchanged."""

    foremoe: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.foremoe is not None:
            object.__setattr__(self, "foremoe", Settings.of(self.foremoe))
            _warn_if_passed_by()


def _warn_if_passed_by() -> None:
    """Warns if veRL's registry will not choose foremoe's engine."""
    from verl.utils.device import get_device_name, get_vendor

    if "foremoe.integrations.verl.plugin" not in sys.modules:
        warn_once(
            _logger,
            "megatron.foremoe is set and has no effect: `import verl` has not loaded foremoe's plugin. Install foremoe in the "
            "environment of this process, and leave VERL_USE_EXTERNAL_PLUGINS at auto.",
        )
    platform = os.getenv("VERL_ENGINE_DEVICE") or get_device_name(), os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    if platform != PLATFORM:
        warn_once(
            _logger,
            f"megatron.foremoe is set and has no effect: veRL's platform is {'/'.join(platform)}, and foremoe's engine is "
            f"registered for {'/'.join(PLATFORM)}. VERL_ENGINE_VENDOR={PLATFORM[1]} chooses it on other {PLATFORM[0]} "
            "devices, where it is not tested.",
        )
