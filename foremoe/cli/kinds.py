"""Option types for the kind of dispatch, for numbers of redundant slots, and for a share of a step."""

import re
from typing import Any, ClassVar

import click

from foremoe.machine.cluster import DISPATCHES

MAX_EXPERTS = 2**15 - 1
AUTO = "auto"
MAX_SHARE = 0.999


class Dispatch(click.Choice):  # type: ignore[type-arg]
    """Option type for a kind of dispatch. If the value names a library, the error says which kind of dispatch the library has."""

    LIBRARIES: ClassVar = {"deepep": "node", "hybridep": "node", "alltoall": "pairs", "nccl": "pairs"}

    def __init__(self) -> None:
        super().__init__(DISPATCHES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the kind of dispatch, or fails with a one-sentence message."""
        way = self.LIBRARIES.get(re.sub(r"[^a-z]", "", str(value).lower()))
        if way is not None:
            self.fail(f"{value!r} is a library; did you mean {way!r}, which is how it sends tokens?", param, ctx)
        return super().convert(value, param, ctx)


class SlotCount(click.IntRange):
    """Option type for a number of redundant slots or ``auto``, which is converted to None."""

    name = "slots"

    def __init__(self) -> None:
        super().__init__(0, MAX_EXPERTS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number, or None for ``auto``. Fails with a one-sentence message if `value` is neither."""
        return None if value == AUTO else super().convert(value, param, ctx)


class Rollout(click.ParamType):  # type: ignore[type-arg]
    """Option type for a share of a step such as ``0.4`` or ``40%``, or for a time in seconds such as ``30s``."""

    name = "rollout"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, float]:
        """Returns the share or the time as an argument of `Trainer`, or fails with a one-sentence message."""
        text = str(value).strip()
        try:
            number = float(text[:-1] if text.endswith(("s", "%")) else text)
        except ValueError:
            number = -1.0
        if text.endswith("%"):
            number /= 100.0
        if text.endswith("s") and 0.0 <= number < float("inf"):
            return {"rollout_s": number}
        if not 0.0 <= number <= MAX_SHARE:
            self.fail(
                f"{value!r} is neither a share from 0 to {MAX_SHARE}, such as 0.7 or 70%, nor seconds such as 30s.", param, ctx
            )
        return {"rollout_share": number}
