"""Prints a Problem as an expression to paste: ``from foremoe import *`` knows every name in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.problem.slots import ResidentSlots, SharedSlots
from foremoe.workload.dealing import Dealt


def describe(problem: Problem) -> str:
    """An expression that evaluates to the same problem, byte for byte.

    The names it uses are foremoe's public ones, and `Dealt` from ``foremoe.workload`` where sequences were dealt whole. Fields
    at their default are left out; arrays are written as lists, whose dtype the constructors restore.
    """
    return _text(problem)


def evaluate(text: str) -> Problem:
    """The problem that `describe` printed."""
    names = {cls.__name__: cls for cls in (Cluster, CostModel, Dealt, Model, Problem, ResidentSlots, Schedule, SharedSlots)}
    problem = eval(text, {"__builtins__": {}, **names})
    assert isinstance(problem, Problem)
    return problem


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return repr(value.tolist())
    if not dataclasses.is_dataclass(value):
        return repr(value.item() if isinstance(value, np.generic) else value)
    parts = []
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if not field.init or held is None or (not isinstance(held, np.ndarray) and held == _default(field)):
            continue
        parts.append(f"{field.name}={_text(held)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
