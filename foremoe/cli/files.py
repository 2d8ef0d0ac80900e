"""Resolves file names and preset names from the command line."""

import dataclasses
import os
from collections.abc import Iterator, Sequence

import click
import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.budget import require_budget
from foremoe.base.errors import InputError, printable
from foremoe.calibrate.gate import require_taken
from foremoe.cli.options import DEFAULT_RANKS, DEFAULT_TOKENS_PER_RANK
from foremoe.cli.texts import require_known
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.recordings import open_recordings
from foremoe.workload.workload import Workload

# Letters: L layers, E experts.


def is_file(text: str) -> bool:
    """Returns True if a --model, --cluster or --synthetic value names a file rather than a preset."""
    return text.lower().endswith((".toml", ".json")) or os.sep in text


def model_of(text: str) -> Model:
    """Returns the model of a preset, a TOML file, or a Hugging Face config.json or its folder."""
    name = text.lower()
    if is_file(text):
        # A hub name such as Qwen/Qwen3-30B-A3B is a preset, unless there is a folder of that name.
        name = name.rsplit("/", 1)[-1]
        if os.path.exists(text) or name.endswith((".toml", ".json")):
            is_config = name.endswith(".json") or os.path.isdir(text)
            return Model.from_hf(text) if is_config else Model.from_toml(text)
    found = Model.preset_of(name)
    if found is None:
        require_known(name, Model.preset_names(), "model preset")
    return Model.preset(found or name)


def cluster_of(
    text: str, ranks: int | None, ranks_per_node: int | None, dispatch: str | None = None, host_store: bool = False,
    accept_fit: bool = False,
) -> Cluster:  # fmt: skip
    """Returns the cluster of a preset or TOML file with `ranks` ranks. With None, the file or preset gives the number of ranks.

    A file says whether there are host stores, so `host_store` affects only presets. If the residual of a file is too large, the
    file is refused unless `accept_fit` is set.
    """
    if not is_file(text):
        require_known(text.lower(), Cluster.preset_names(), "cluster preset")
        ranks = DEFAULT_RANKS if ranks is None else ranks
        return Cluster.preset(text, ranks, ranks_per_node, dispatch=dispatch or "pairs", host_store=host_store)
    cluster = Cluster.from_toml(text)
    if not accept_fit:
        require_taken(cluster, text, "With --accept-fit, it is used anyway.")
    cluster = dataclasses.replace(cluster, dispatch=dispatch or cluster.dispatch)
    # Changing the number of ranks would lose the file's own mapping of ranks to nodes.
    if ranks in (None, cluster.num_ranks) and ranks_per_node is None:
        return cluster
    return cluster.with_ranks(ranks or cluster.num_ranks, ranks_per_node or cluster.ranks_per_node)


def model_told(name: str | None, num_layers: int, num_experts: int, num_topk: int) -> Model:
    """Returns the preset that a recording names. If it names none, returns the only preset of its shape."""
    preset = None if name is None else Model.preset_of(name)
    if preset is not None:
        return Model.preset(preset)
    found = Model.matching(num_layers, num_experts, num_topk)
    if len(found) == 1:
        return found[0]
    shape = f"{num_layers} layers with top-{num_topk} of {num_experts} experts"
    if found:
        raise InputError(f"{shape} fit several models; give --model one of {', '.join(m.name for m in found)}.")
    presets = [Model.preset(name) for name in Model.preset_names()]
    alike = [m.name for m in presets if (m.num_experts, m.num_topk) == (num_experts, num_topk) and num_layers < m.num_layers]
    cure = f"--model NAME (one of {', '.join(m.name for m in presets)}) or --model config.json"
    if alike:
        cure = f"--model {' or '.join(alike)} if these are some of its layers, or --model config.json"
    raise InputError(f"no known model has {shape}; give {cure}.")


# Parts of messages that advise Python callers, and the counterparts for users of the command line.
_CURES = (
    ("pass num_experts=", "give --model NAME or FILE.toml"),
    ("give model, or num_experts: the largest expert in a payload would be a guess", "give --model NAME or config.json"),
    ("give model, the one that was recorded", "give --model NAME or config.json, the one that was recorded"),
    ("give num_ranks=", "give --ranks "),
    ("ask for token ids, or give lengths, or start (0 if none was requested)", 'request "return_token_ids": true'),
    (", or pass max_bytes= to trust it", ""),
    ("mark such tokens unknown in known_T", "`foremoe import` marks such tokens unknown"),
    ("or mark it unknown in known_T", "or write -1 and `foremoe import` it"),
)


def read_routing(
    paths: Sequence[str], model: Model | None = None, ranks: int = DEFAULT_RANKS, tokens_per_rank: int = DEFAULT_TOKENS_PER_RANK,
    stage: str = "update", strict: bool = True,
) -> RoutingTrace | Workload:  # fmt: skip
    """Reads files of any kind as a trace or as counts. `model` is the model that was recorded."""
    try:
        return open_recordings(
            paths, model=model, num_ranks=ranks, tokens_per_rank=tokens_per_rank, stage=stage, strict=strict
        )  # fmt: skip
    except InputError as error:
        told = str(error)
        for argument, option in _CURES:
            told = told.replace(argument, option)
        error.args = (told,)
        raise


def read_trace(paths: Sequence[str], model: Model | None = None) -> RoutingTrace:
    """Reads a trace as `read_routing` does. Files of counts are refused."""
    found = read_routing(paths, model)
    if isinstance(found, Workload):
        raise InputError(f"{file_name(paths[0])!r} is a workload file, or one of counts; give a trace here.")
    return found


def layer_loads(trace: RoutingTrace) -> Iterator[Array]:
    """Yields one int64 [E] for each layer: the number of pairs of every expert, summed over all known tokens."""
    topk_TLK = trace.topk_TLK if trace.known_T is None else trace.topk_TLK[trace.known_T]
    return (np.bincount(topk_TLK[:, at].ravel(), minlength=trace.num_experts) for at in range(trace.L))


def trace_load(trace: RoutingTrace) -> Array:
    """Returns the loads of all experts in all layers, int64 [L, E]."""
    what = f"loads of {trace.L} layers x {trace.num_experts} experts"
    require_budget(8 * trace.L * trace.num_experts, what, "give a history of the model's own sizes", trace.num_bytes)
    return np.stack(list(layer_loads(trace)))


def history_load(path: str, work: Workload, model: Model | None) -> Array:
    """Returns the load of an earlier step, int64 [L, E], from a trace or a workload file.

    The load is summed over all tokens of the trace, or over all micro-steps of the workload.
    """
    earlier = read_routing([path], model)
    if isinstance(earlier, Workload):
        history_LE, layer_L = earlier.load_MLE.sum(axis=0, dtype=np.int64), earlier.moe_layer_L
    else:
        history_LE, layer_L = trace_load(earlier), earlier.moe_layer_L
    positions, lacking = layer_positions(layer_L, work.moe_layer_L)
    if history_LE.shape[1] != work.E or lacking:
        what = f"has no layer {lacking[0]}" if lacking else f"has {history_LE.shape[1]} experts, not {work.E}"
        raise InputError(f"--history {file_name(path)!r} {what}; give a trace of the same model and layers.")
    return np.ascontiguousarray(history_LE[positions])


def layer_positions(there_L: Array, wanted_L: Array) -> tuple[list[int], list[int]]:
    """Returns the positions of the wanted layers in `there_L`, and the numbers of wanted layers that `there_L` lacks."""
    position = {number: at for at, number in enumerate(there_L.tolist())}
    wanted = wanted_L.tolist()
    return [position[number] for number in wanted if number in position], [n for n in wanted if n not in position]


def file_name(path: str) -> str:
    """Returns the last part of a path, as printable text."""
    return printable(click.format_filename(path, shorten=True))
