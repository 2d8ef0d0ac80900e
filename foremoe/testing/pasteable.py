"""Formats a Problem as an expression that can be pasted. ``from foremoe import *`` provides the names in the expression."""

import dataclasses
from typing import Any

import numpy as np

from foremoe.problem.problem import Problem


def describe(problem: Problem) -> str:
    """Returns an expression that evaluates to the same problem, byte for byte.

    The expression uses foremoe's public names, and `Dealt` from ``foremoe.workload`` if sequences were packed whole. Default
    values are omitted. Arrays are written as lists, and the constructors restore the dtypes of the arrays.
    """
    return _text(problem)


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return repr(value.tolist())
    if not dataclasses.is_dataclass(value):
        return repr(value.item() if isinstance(value, np.generic) else value)
    parts = []
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.init and held is not None and (isinstance(held, np.ndarray) or held != default):
            parts.append(f"{field.name}={_text(held)}")
    return f"{type(value).__name__}({', '.join(parts)})"
