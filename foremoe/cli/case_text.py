"""Describes a case in a few lines, with notes that help to read its figures."""

from typing import Any

import numpy as np

from foremoe.cli.files import is_file
from foremoe.cli.options import CaseOptions
from foremoe.cli.tables import plural
from foremoe.machine.cluster import Cluster

# Letters: N nodes.


def case_notes(options: CaseOptions, record: dict[str, Any], cluster: Cluster) -> list[str]:
    """Returns notes that help to read the figures of the case."""
    notes, per_rank = [], record["tokens_per_rank"]
    room = record["ranks"] * (per_rank or 0)
    if record["micro_steps"] == 1 and record["tokens"] < 0.8 * room:
        filled = f"the routing fills {record['tokens'] / room:.0%} of one micro-step of {record['ranks']} x {per_rank:,} tokens"
        notes.append(f"note: {filled}; record more, or lower --tokens-per-rank")
    if record["nodes"] > 1 and options.dispatch is None and not is_file(options.cluster):
        notes.append(
            "note: a plain all-to-all is assumed; for DeepEP or HybridEP (Megatron's flex dispatcher) give --dispatch node"
        )
    ranks_N = np.bincount(cluster.node_of_rank_G)
    if ranks_N.min() < ranks_N.max():
        few = f"node {ranks_N.argmin()} has only {plural(int(ranks_N.min()), 'rank')} of {ranks_N.max()}"
        notes.append(f"note: {few}; a --ranks-per-node that divides {record['ranks']} makes nodes equal")
    return notes


def case_lines(record: dict[str, Any], model_layers: int) -> list[str]:
    """Returns the line that describes the case, and a note if the routing has only some layers of the model."""
    source = " + ".join(record["traces"]) or f"synthetic {record['synthetic']} ({record['regime']}, seed {record['seed']})"
    layers = plural(record["layers"], "layer")
    if record["layers"] < model_layers:
        layers = f"{record['layers']} of {model_layers} layers"
    size = f"{record['tokens']:,} tokens, {plural(record['micro_steps'], 'micro-step')} x {layers}"
    where = f"{plural(record['ranks'], 'rank')} on {plural(record['nodes'], 'node')}, {record['dispatch']} dispatch"
    routing = f"top-{record['topk']} of {record['experts']} experts, {where}, R = {record['redundant']}"
    lines = [f"case: {source}: {size}, {routing}, {record['stage']}, objective {record['objective']}"]
    if record["layers"] < model_layers and record["layer_range"] is None:
        held = f"the routing has {record['layers']} of the {model_layers} MoE layers of {record['model']}"
        lines.append(f"note: {held}; if another model was recorded, name it with --model")
    return lines
