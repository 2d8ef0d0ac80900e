"""`EngineSettings`: settings of an engine, declared and checked in one place for `Engine`, `Runtime` and the adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from foremoe.base.errors import InputError, did_you_mean
from foremoe.base.fields import MAX_WHOLE, check_fields, flag, real, shown, whole
from foremoe.distributed.agreement import texts
from foremoe.problem.memory import RETURN_BYTES
from foremoe.transfer.backends import backend_names, class_name
from foremoe.transfer.base import TransferBackend

seconds = partial(real, high=1e9)
"""Checks a limit in seconds."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of an `Engine` or a `Runtime`.

    Attributes:
        backends: Transfer backends in order of preference, given as instances or names. Defaults to `default_backends`.
        prefetch: How many uses ahead of its own use a copy may start at most. It starts later if its buffer is not yet free.
        return_bytes: Maximum size in bytes of the arriving replica gradients that a rank stages at once. A single gradient may be
            larger. A smaller value saves memory but makes ranks wait longer in backward.
        timeout_s: Timeout in seconds for a copy. Messages between ranks have the timeout of the group, which should be longer.
        debug: Whether to compare replicas with their homes and to fill released buffers and gradients with NaN. These checks are
            slow.

    Raises:
        InputError: A value is not valid.
    """

    backends: Sequence[str | TransferBackend] | None = None
    prefetch: int = 2
    return_bytes: int = RETURN_BYTES
    timeout_s: float = 30.0
    debug: bool = False

    ranks_own: ClassVar[frozenset[str]] = frozenset({"timeout_s"})
    """Settings that may differ between ranks, because a timeout does not change any result."""

    def __post_init__(self) -> None:
        checks = (
            (partial(whole, low=0, high=MAX_WHOLE), ("prefetch",)), (partial(whole, low=1, high=MAX_WHOLE), ("return_bytes",)),
            (seconds, ("timeout_s",)), (flag, ("debug",)), (_backends, ("backends",)),
        )  # fmt: skip
        check_fields(self, checks)

    @classmethod
    def of(cls, given: Any = None, /, **options: Any) -> Self:
        """Returns settings made from `given` (settings, a mapping such as a config node, or None), overridden by `options`.

        Raises:
            InputError: A name does not exist, or a value is not valid.
        """
        if given is not None and not isinstance(given, cls | Mapping):
            raise InputError(f"settings must be a mapping of settings such as {{prefetch: 2}}; got {shown(given)}.")
        table = {str(key): item for key, item in given.items() if key != "_target_"} if isinstance(given, Mapping) else {}
        table |= options
        known = sorted(field.name for field in dataclasses.fields(cls))
        unknown = next((name for name in table if name not in known), None)
        if unknown is not None:
            meant = did_you_mean(unknown, known)
            raise InputError(f"there is no setting {shown(unknown)}; {meant}choose from {', '.join(known)}.")
        return dataclasses.replace(given, **table) if isinstance(given, cls) else cls(**table)

    def agreed(self) -> dict[str, str]:
        """Returns, by name and as strings, the values of all settings that must be the same on all ranks of a group."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in self.ranks_own]
        found = {key: text for name in names for key, text in texts(name, getattr(self, name)).items()}
        if self.backends is not None:  # a name stands for an instance of its class
            found["backends"] = ", ".join(map(class_name, self.backends))
        return found


def _backends(value: Any, name: str) -> tuple[str | TransferBackend, ...]:
    """Returns names and instances as a tuple. A single name stands for one backend."""
    found = (value,) if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
    if not found:
        raise InputError("an Engine needs at least one transfer backend, such as 'collective'; omit backends for the default.")
    known = backend_names()
    for backend in found:
        if isinstance(backend, str) and backend not in known:
            meant = did_you_mean(backend, known)
            raise InputError(
                f"there is no transfer backend {shown(backend)}; {meant}choose from {', '.join(known)}, or give an instance."
            )
        if not isinstance(backend, str | TransferBackend):
            raise InputError(f"{name} must be names or instances of transfer backends; got {shown(backend)}.")
    return found
