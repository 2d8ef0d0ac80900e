"""One HTML file from the template's parts: style and scripts inlined, facts as JSON, arrays as base64."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

# In this order: each may use what the ones before it define.
SCRIPTS = (
    "data.js", "svg.js", "colours.js", "export.js", "heat.js", "bars.js", "arcs.js", "matrix.js", "lanes.js", "lanes_source.js",
    "timeline.js", "charts.js", "experts.js", "tables.js", "whatif.js", "page.js",
)  # fmt: skip


def page(facts: Mapping[str, Any], packed: str) -> str:
    """The whole page. Its Content-Security-Policy allows its own style and scripts, by their hashes, and no connection."""
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
