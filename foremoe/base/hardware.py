"""Description of the processor and number of cores that this process may use."""

import os
import platform
from typing import Any


def hardware() -> dict[str, Any]:
    """Returns the name of the processor and the number of cores that this process may use."""
    return {"processor": _processor(), "cores": cores(), "system": f"{platform.system()} {platform.machine()}"}


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
