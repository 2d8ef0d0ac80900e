"""docs/notebook.ipynb holds what its cells print."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from bench.notebook import NOTEBOOK, executed


def told(notebook: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """Outputs of all cells. The pixels of a picture depend on fonts and on the version of matplotlib."""
    found = [(cell["source"], one) for cell in notebook["cells"] for one in cell.get("outputs", ())]
    return [
        (text, one.get("text"), one.get("data", {}) | {"image/png": "image/png" in one.get("data", {})}) for text, one in found
    ]


def test_the_notebook_holds_the_outputs_of_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    saved = json.loads(NOTEBOOK.read_text())
    if importlib.util.find_spec("matplotlib") is None:
        saved["cells"] = [cell for cell in saved["cells"] if "plot()" not in cell["source"]]
    assert told(executed(saved)) == told(saved), "python -m bench.notebook runs it anew"


def test_the_notebook_stays_small_enough_to_review() -> None:
    assert NOTEBOOK.stat().st_size < 100_000


def test_a_cell_gives_what_it_prints_and_its_last_value() -> None:
    cells = [{"cell_type": "code", "source": text, "outputs": []} for text in ("x = 2", "print(x)\nx + 1")]
    first, second = executed({"cells": cells})["cells"]
    assert first["outputs"] == []
    assert [x.get("text") or x["data"]["text/plain"] for x in second["outputs"]] == ["2\n", "3"]
