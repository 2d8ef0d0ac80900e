"""docs/notebook.ipynb holds what its cells print."""

from __future__ import annotations

import json

from bench.notebook import NOTEBOOK, executed


def test_the_notebook_holds_the_outputs_of_its_cells() -> None:
    saved = json.loads(NOTEBOOK.read_text())
    assert executed(saved) == saved, "python -m bench.notebook runs it anew"


def test_a_cell_gives_what_it_prints_and_its_last_value() -> None:
    cells = [{"cell_type": "code", "source": text, "outputs": []} for text in ("x = 2", "print(x)\nx + 1")]
    first, second = executed({"cells": cells})["cells"]
    assert first["outputs"] == []
    assert [x.get("text") or x["data"]["text/plain"] for x in second["outputs"]] == ["2\n", "3"]
