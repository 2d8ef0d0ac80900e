"""Reads tables with one line for each layer of a token, or for each expert of a layer, whose columns have common names."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.budget import require_budget
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.routing.checks import MAX_EXPERTS
from foremoe.routing.readers.sequences import MAX_TOKENS

# Letters: S recorded steps, L layers, E experts, T tokens, K top-k.

COUNTS = "logical_count"
_COLUMNS = {
    "layer": ("layer", "layer_id", "layer_idx"), "token": ("token_idx", "token", "token_index", "position"),
    "sequence": ("problem_id", "sequence", "sequence_id", "sample_id", "request_id", "prompt_id"),
    "experts": ("experts", "selected_experts", "topk_ids", "expert_ids", "topk_idx"),
    "expert": ("expert", "expert_id", "expert_idx"), "count": ("count", "num_tokens", "token_count"),
    "step": ("step", "micro_step", "iteration", "forward_pass_id"),
}  # fmt: skip
_ROW_BYTES = 64  # least memory of a table's line, once parsed


def table_columns(names: Collection[str]) -> dict[str, str]:
    """Returns the name of the table's column for each role, such as "layer". Roles without a column are left out."""
    found = {role: next((name for name in known if name in names), None) for role, known in _COLUMNS.items()}
    return {role: name for role, name in found.items() if name is not None}


def routed_of(rows: list[Any], columns: Mapping[str, str], size: int) -> tuple[list[Array], Array]:
    """Returns the experts of each sequence (int32 [T, L, K]) and the layer numbers. Experts that the table lacks are -1.

    The sequences are in the order of their first lines in the table.
    """
    cells: dict[Any, list[tuple[int, int, Any]]] = {}
    for row in rows:
        token = whole(_cell(row, columns, "token"), columns["token"], 0, MAX_TOKENS)
        layer = whole(_cell(row, columns, "layer"), columns["layer"], 0, MAX_EXPERTS)
        cells.setdefault(str(row.get(columns.get("sequence", ""), "")), []).append((token, layer, _cell(row, columns, "experts")))
    layers = sorted({layer for some in cells.values() for _, layer, _ in some})
    widths = {len(ids) if isinstance(ids, list) else -1 for some in cells.values() for _, _, ids in some}
    if len(widths) != 1 or min(widths) < 1:
        raise InputError(f"{columns['experts']} must hold lists of one length; got lengths {sorted(widths)[:4]}, -1 for no list.")
    place, num_topk = {layer: at for at, layer in enumerate(layers)}, widths.pop()
    num_tokens = sum(max(token for token, _, _ in some) + 1 for some in cells.values())
    shape = [num_tokens, len(layers), num_topk]
    cure = f"correct {columns['token']}, which must count tokens from 0"
    require_budget(4 * num_tokens * len(layers) * num_topk, f"routing of shape {shape}", cure, size + _ROW_BYTES * len(rows))
    out = []
    for some in cells.values():
        ids_TLK = np.full((max(token for token, _, _ in some) + 1, len(layers), num_topk), -1, np.int32)
        for token, layer, ids in some:
            ids_TLK[token, place[layer]] = [whole(e, "an expert", -1, MAX_EXPERTS) for e in ids]
        out.append(ids_TLK)
    return out, np.array(layers)


def counts_of(rows: list[Any], columns: Mapping[str, str], size: int) -> tuple[Array, Array]:
    """Returns the counts (int64 [S, L, E]) and the layer numbers. Counts that the table lacks are zero."""
    keys = [name for name in ("step", "layer", "expert", "count") if name in columns]
    highs = {"step": MAX_TOKENS, "layer": MAX_EXPERTS, "expert": MAX_EXPERTS, "count": 2**31 - 1}
    cells = np.array([[whole(_cell(row, columns, key), columns[key], 0, highs[key]) for key in keys] for row in rows], np.int64)
    step_X = cells[:, 0] if "step" in columns else np.zeros(len(rows), np.int64)
    layer_X, expert_X, count_X = cells.T[-3:]
    steps, step_X = np.unique(step_X, return_inverse=True)
    layer_L, layer_X = np.unique(layer_X, return_inverse=True)
    shape = len(steps), len(layer_L), int(expert_X.max()) + 1
    what = f"counts of shape {list(shape)}"
    require_budget(8 * shape[0] * shape[1] * shape[2], what, "correct the numbers of experts", size + _ROW_BYTES * len(rows))
    load_SLE = np.zeros(shape, np.int64)
    np.add.at(load_SLE, (step_X, layer_X, expert_X), count_X)
    return load_SLE, layer_L


def _cell(row: Any, columns: Mapping[str, str], role: str) -> Any:
    value = row.get(columns[role]) if isinstance(row, Mapping) else None
    if value is None:
        raise InputError(f"a row lacks {columns[role]}; give it in every row.")
    return value
