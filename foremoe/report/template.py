"""Builds an HTML file from the template. Style and scripts are inline, facts are JSON, and arrays are base64."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

# The order matters, because each script may use definitions of the ones before it.
SCRIPTS = (
    "data.js", "svg.js", "colours.js", "export.js", "heat.js", "bars.js", "arcs.js", "matrix.js", "charts.js", "experts.js",
    "tables.js", "job.js", "page.js",
)  # fmt: skip


class Block(NamedTuple):
    """Data of one part of the page. Facts are plain values, and arrays are encoded as text."""

    facts: dict[str, Any]
    packed: str


def page(blocks: Sequence[Block], job: Mapping[str, Any] | None = None) -> str:
    """Returns the whole page. The Content-Security-Policy allows only the page's own style and scripts, identified by hashes.

    Args:
        blocks: One block for the plan, or one for every part of a job.
        job: Table of the parts of a job, or None for a single plan.
    """
    facts = blocks[0].facts
    style = _template("page.css")
    scripts = [_template(name) for name in SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; img-src data: blob:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    title = f"foremoe report: {facts['model']}, {facts['stage']}"
    fill = {
        "policy": html.escape(policy, quote=True).replace("&#x27;", "'"),
        "title": html.escape(title),
        "style": f"<style>{style}</style>",
        "job": script_json(job),
        "blocks": "\n".join(_block(i, *block) for i, block in enumerate(blocks)),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # Filled in one pass, so that a name which looks like a placeholder is not replaced.
    before, *rest = _template("page.html").split("{{")
    return before + "".join(fill[part.partition("}}")[0]] + part.partition("}}")[2] for part in rest)


def _block(number: int, facts: Mapping[str, Any], packed: str) -> str:
    name = f"-{number}" if number else ""
    return (
        f'<script type="application/json" id="facts{name}">{script_json(facts)}</script>\n'
        f'<script type="text/plain" id="packed{name}">{packed}</script>'
    )


def script_json(value: Any) -> str:
    """Returns `value` as JSON that cannot open or close an element of the surrounding page."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _template(name: str) -> str:
    return (files("foremoe.report") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
