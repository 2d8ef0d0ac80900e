"""Shared parts of tables of simulated times: loads with both kinds of dispatch, and a note if memory does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from foremoe.machine.cluster import DISPATCHES as DISPATCHES
from foremoe.problem.problem import Problem

BOTH = "Dispatch pairs: every (token, expert) pair travels; node: a token once to every node that serves it."


def under(dispatch: str, problems: Sequence[Problem]) -> list[Problem]:
    """The same loads where exchanges are `dispatch`."""
    return [dataclasses.replace(p, cluster=dataclasses.replace(p.cluster, dispatch=dispatch)) for p in problems]


def peak(row: Mapping[str, Any]) -> str:
    """GB of the fullest rank; where they do not fit, also with re-forward."""
    size = f"{row['peak_bytes'] / 1e9:.0f}"
    if row["fits"]:
        return size
    again = row["peak_bytes_with_reforward"]
    return f"{size}: does not fit" + (f"; {again / 1e9:.0f} with re-forward" if again else "")
