"""Checks that all ranks have the same values before the values are used."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from foremoe.base.errors import InputError
from foremoe.base.version import __version__
from foremoe.distributed.group import Group
from foremoe.plan.header import FORMAT_VERSION


def require_same(group: Group, values: Mapping[str, str]) -> None:
    """Raises InputError on all ranks unless all of them have the same `values`, foremoe version and plan format. Collective.

    The error names the first value that differs, and two ranks with the value that each has.
    """
    mine = {"foremoe.__version__": __version__, "plan format": str(FORMAT_VERSION), **values}
    fingerprint = hashlib.blake2b(json.dumps(mine, sort_keys=True).encode(), digest_size=16).hexdigest()
    if len(set(group.gather(fingerprint))) == 1:
        return
    values_G = group.gather(mine)  # sent only on a mismatch, because values may be long
    names = dict.fromkeys(name for theirs in values_G for name in theirs)
    for name in names:
        text_G = [theirs.get(name, "nothing") for theirs in values_G]
        g = next((g for g, text in enumerate(text_G) if text != text_G[0]), 0)
        if g:
            raise InputError(f"rank {g} has {name}={text_G[g]}, rank 0 has {name}={text_G[0]}; give all ranks the same.")


def texts(name: str, value: Any) -> dict[str, str]:
    """Returns strings that describe a value, by name. A frozen value such as a planner or a cluster gives one per field.

    Equal values give equal strings in all processes. The memory addresses in the reprs of other packages' objects are left out.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {name: _text(value)}
    fields = value.to_dict() if hasattr(value, "to_dict") else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {name: type(value).__name__} | {f"{name}.{key}": _text(item) for key, item in fields.items()}


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(value))
