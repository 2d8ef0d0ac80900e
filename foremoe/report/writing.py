"""One HTML file from the template's parts: style and scripts inlined, facts as JSON, arrays as base64."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.problem.problem import Problem
from foremoe.report.contents import contents

if TYPE_CHECKING:
    from foremoe.planner.summary import PlanSummary
    from foremoe.transfer.timeline import Timeline

# In this order: each may use what the ones before it define.
SCRIPTS = (
    "data.js", "svg.js", "colours.js", "export.js", "heat.js", "bars.js", "arcs.js", "lanes.js", "lanes_source.js",
    "timeline.js", "charts.js", "tables.js", "page.js",
)  # fmt: skip


def write_report(
    path: str | os.PathLike[str],
    problem: Problem,
    plan: Plan,
    *,
    planner_report: PlanSummary | None = None,
    simulation: Any = None,
    timelines: Sequence[Timeline] | None = None,
    strategies: Sequence[Mapping[str, Any]] | None = None,
    what_if: Sequence[Mapping[str, Any]] | None = None,
    source: str = "",
    date: str = "",
    posed: Problem | None = None,
    moves_s: float = 0.0,
) -> None:
    """Writes a plan's report as one HTML page that opens from disk and asks nothing of any network.

    The same arguments give the same bytes.

    Args:
        path: The file to write.
        problem: The problem.
        plan: A plan of it.
        planner_report: Summary that `Planner.plan` returned with the plan.
        simulation: A `Simulation` of the plan, or None.
        timelines: What engines measured, one `Timeline` per rank, or None.
        strategies: Rows of `foremoe.compare`.
        what_if: Rows of `foremoe.report.what_if`.
        source: Where the load comes from, in a few words.
        date: As it shall stand on the page; default: none.
        posed: `problem` with the homes from before a home level moved some; what is static speaks of it. Default: `problem`.
        moves_s: Seconds that moving those homes takes before the stage.

    Raises:
        InputError: The plan is not of this problem, both timelines are given, or the file cannot be written.
    """
    facts, packed = contents(
        problem, plan, planner_report=planner_report, simulation=simulation, timelines=timelines, strategies=strategies,
        what_if=what_if, source=source, date=date, posed=posed, moves_s=moves_s,
    )  # fmt: skip
    try:
        Path(path).write_text(page(facts, packed), encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(f"cannot write the report {os.fspath(path)!r}: {error.strerror}; choose another place.") from None


def page(facts: Mapping[str, Any], packed: str) -> str:
    """The whole page. Its Content-Security-Policy allows its own style and scripts, by their hashes, and no connection."""
    style = _template("page.css")
    scripts = [_template(name) for name in SCRIPTS]
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(_hash(script) for script in scripts)}",
            f"style-src {_hash(style)}",
            "img-src data: blob:",
            "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    title = f"foremoe report: {facts['model']}, {facts['stage']}"
    fill = {
        "policy": html.escape(policy, quote=True).replace("&#x27;", "'"),
        "title": html.escape(title),
        "style": f"<style>{style}</style>",
        "facts": script_json(facts),
        "packed": packed,
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # In one pass, so that a name which looks like a place holder stays a name.
    before, *rest = _template("page.html").split("{{")
    return before + "".join(fill[part.partition("}}")[0]] + part.partition("}}")[2] for part in rest)


def script_json(value: Any) -> str:
    """JSON that cannot end or open an element of the page it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _template(name: str) -> str:
    return (files("foremoe.report") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
