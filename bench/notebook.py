"""Runs docs/notebook.ipynb from top to bottom and writes the outputs into it, without Jupyter. Needs matplotlib."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The same notebook with the outputs of its cells, run in an empty folder: what is printed, and the value at the end."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                cell = cell | {"execution_count": count, "outputs": _outputs(cell["source"], names, count)}
            cells.append(cell)
    return notebook | {"cells": cells}


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        tree.body.pop()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if isinstance(last, ast.Expr) else None
    found: list[dict[str, Any]] = []
    if text := printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": repr(value)} | ({"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else {})
        if hasattr(value, "savefig"):
            picture = io.BytesIO()
            value.savefig(picture, format="png", dpi=80, metadata={"Software": None})
            data = {"text/plain": repr(value), "image/png": base64.b64encode(picture.getvalue()).decode()}
        found.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return found


def main() -> None:
    os.environ.setdefault("NO_COLOR", "1")
    os.environ.setdefault("MPLBACKEND", "agg")
    NOTEBOOK.write_text(json.dumps(executed(json.loads(NOTEBOOK.read_text())), indent=1) + "\n")
    print(f"{NOTEBOOK.name} holds the outputs of this run")


if __name__ == "__main__":
    main()
