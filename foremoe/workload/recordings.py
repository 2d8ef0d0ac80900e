"""Reads files of routing that foremoe, a rollout engine or a recorder wrote, as a `RoutingTrace` or a `Workload`."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.budget import require_budget
from foremoe.base.errors import InputError, naming
from foremoe.base.fields import whole
from foremoe.base.tensor_file import kind_of
from foremoe.machine.model import Model
from foremoe.routing.files import holds_trace
from foremoe.routing.readers.recorded import Recorded, read_recorded
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.dealing import Dealt
from foremoe.workload.routed_experts import from_routed_experts
from foremoe.workload.workload import Workload

# Letters: S recorded steps, M micro-steps, L layers, G ranks, E experts.

SPREAD = "recorded counts, spread evenly over ranks"
BY_RANK = "recorded counts of each rank"
SCALED = "; long steps in proportion"
_LONG = 2  # number of budgets above which a recorded step counts as a statistic of many micro-steps


def open_recordings(
    paths: Sequence[str | os.PathLike[str]], *, model: Model | None = None, num_ranks: int = 1, tokens_per_rank: int = 1024,
    stage: str = "update", strict: bool = True,
) -> RoutingTrace | Workload:  # fmt: skip
    """Reads the files of one recording: answers of rollout engines, chosen experts, counts, or files that foremoe saved.

    Routing of sequences is read in the same way as in `from_routed_experts`. A token is unknown if the file does not contain its
    experts or lists an expert twice.

    Counts become a workload. Recorded steps without pairs are left out. The remaining steps are joined in order until they have
    `tokens_per_rank` tokens for each rank, and then form a micro-step. A step with more than twice as many tokens is a statistic
    of many micro-steps. Such a step is scaled down to one micro-step with the same shares of pairs. Counts without source ranks
    are spread over the ranks. For this, the pairs of a layer are given to the ranks in turn, in the order of the experts. Every
    rank then has the same share of every expert, up to one pair. `Workload.dealt` records how the workload was made. See
    docs/recording.md for the kinds of files.

    Args:
        paths: Files of one recording.
        model: Model whose routing was recorded. Required for counts, to get top-k, and for routing if the file does not name the
            model.
        num_ranks: Number of source ranks. Used only for counts.
        tokens_per_rank: Number of tokens per rank in a micro-step. Used only for counts.
        stage: Stage of the workload, ``"recompute"`` or ``"update"``. Used only for counts.
        strict: Whether to refuse ``.npz`` and ``.safetensors`` files with a -1 or a repeated expert, as `RoutingTrace.load` does.
            If False, tokens with such entries are unknown, as in files of other formats.

    Raises:
        InputError: The file has no routing, is damaged, or belongs to another model.

    Example:
        >>> foremoe.workload.open_recordings(["answers.jsonl"], model=foremoe.Model.preset("qwen3-30b-a3b"))  # doctest: +SKIP
    """
    names = [os.fspath(path) for path in paths]
    kinds = [kind_of(name) for name in names]
    if len(names) == 1 and kinds[0] == "workload":
        return Workload.load(names[0])
    for name, kind in zip(names, kinds, strict=True):
        if kind in ("plan", "workload"):
            cure = "give it alone, because it cannot be joined with other files" if kind == "workload" else "give a trace here"
            raise InputError(f"{name!r} is a {kind} file; {cure}.")
    found = [
        _one(name, model, kind == "trace" or (strict and holds_trace(name))) for name, kind in zip(names, kinds, strict=True)
    ]
    counts = [part for part in found if isinstance(part, Recorded)]
    if not counts:
        traces = [part for part in found if isinstance(part, RoutingTrace)]
        return traces[0] if len(traces) == 1 else RoutingTrace.concat(traces)
    if len(counts) < len(found):
        raise InputError("some files hold counts and others the experts of single tokens; give files of one kind.")
    with naming(repr(names[0]) if len(names) == 1 else "the counts"):
        return _workload(counts, model, num_ranks, tokens_per_rank, stage)


def _one(name: str, model: Model | None, as_saved: bool) -> RoutingTrace | Recorded:
    """Returns the trace or the counts of a file."""
    if as_saved:
        return RoutingTrace.load(name, model=model)
    recorded = read_recorded(name, model)
    if recorded.load_SLE is not None:
        return recorded
    layer_L = recorded.layer_L
    if layer_L is not None and model is not None and len(layer_L) == model.num_layers:
        layer_L = None  # layers are numbered as in the model
    lengths = None if recorded.lengths is None else recorded.lengths.tolist()
    with naming(repr(name)):
        trace, _ = from_routed_experts(
            recorded.payloads, model=model or recorded.model, num_experts=recorded.num_experts, lengths=lengths,
            moe_layer_L=layer_L, source=os.path.basename(name),
        )  # fmt: skip
    return trace


def _workload(parts: list[Recorded], model: Model | None, num_ranks: int, tokens_per_rank: int, stage: str) -> Workload:
    G, budget = whole(num_ranks, "num_ranks"), num_ranks * whole(tokens_per_rank, "tokens_per_rank")
    topk = {k for k in (*(part.num_topk for part in parts), None if model is None else model.num_topk) if k is not None}
    if len(topk) != 1:
        lack = f"say both top-{' and top-'.join(map(str, sorted(topk)))}" if topk else "do not tell top-k"
        raise InputError(f"counts {lack}; give model, the one that was recorded.")
    K = topk.pop()
    loads = [part.load_SLE for part in parts if part.load_SLE is not None]
    numbers = [np.arange(load.shape[1]) if p.layer_L is None else p.layer_L for p, load in zip(parts, loads, strict=True)]
    if any(not np.array_equal(n, numbers[0]) for n in numbers):
        raise InputError("the files count different layers; give files of one recording.")
    wide = max(load.shape[2] for load in loads)
    if model is not None and wide > model.num_experts:
        raise InputError(f"they count {wide} experts but {model.name} has {model.num_experts}; name the model that was recorded.")
    loads = [np.pad(load, ((0, 0), (0, 0), (0, wide - load.shape[2]))) for load in loads]
    by_rank = len(parts) > 1 and {part.rank for part in parts} == set(range(len(parts)))
    if by_rank and (len(parts) != G or len({len(load) for load in loads}) > 1):
        steps = " and ".join(sorted({str(len(load)) for load in loads}))
        counted = f"the files were counted by {len(parts)} ranks, in {steps} steps"
        raise InputError(f"{counted}; give num_ranks={len(parts)} and files of the same steps, or one file alone.")
    ranked = sorted(range(len(parts)), key=lambda i: parts[i].rank or 0)
    load_SLGE = np.stack([loads[i] for i in ranked], axis=2) if by_rank else np.concatenate(loads)[:, :, None]
    load_SLGE, layer_L = _moe_layers(load_SLGE, numbers[0], model)
    # Joins steps until they fill a micro-step. Steps without pairs are left out.
    tokens_S = -(-load_SLGE.sum(axis=3).max(axis=1).sum(axis=1) // K)
    load_SLGE, tokens_S = load_SLGE[tokens_S > 0], tokens_S[tokens_S > 0]
    long_S = np.flatnonzero(tokens_S > _LONG * budget)
    for s in long_S:
        load_SLGE[s] = _in_proportion(load_SLGE[s], budget / tokens_S[s])
    tokens_S[long_S] = budget
    group_S = (np.cumsum(tokens_S) - tokens_S) // budget
    load_MLGE = np.add.reduceat(load_SLGE, np.flatnonzero(np.diff(group_S, prepend=-1)), axis=0)
    load_MLGE = load_MLGE if by_rank else _spread(load_MLGE[:, :, 0], G)
    unused = 0 if model is None else model.num_experts - wide
    work = Workload.from_counts(
        np.pad(load_MLGE, ((0, 0), (0, 0), (0, 0), (0, unused))), num_topk=K, stage=stage,
        model=None if model is None else model.name, moe_layer_L=layer_L,
    )  # fmt: skip
    packer = (BY_RANK if by_rank else SPREAD) + (SCALED if len(long_S) else "")
    return dataclasses.replace(work, dealt=Dealt(tokens_per_rank=tokens_per_rank, packer=packer, seed=0))


def is_of_counts(dealt: Dealt) -> bool:
    """Returns True if `open_recordings` made the workload from counts."""
    return dealt.packer.removesuffix(SCALED) in (SPREAD, BY_RANK)


def _in_proportion(load_LGE: Array, share: float) -> Array:
    """Returns int64 [L, G, E]: `share` of the pairs of each layer and rank, rounded by largest remainders."""
    exact_LGE = load_LGE * share
    out_LGE: Array = np.floor(exact_LGE).astype(np.int64)
    lack_LG = np.rint(exact_LGE.sum(axis=2)).astype(np.int64) - out_LGE.sum(axis=2)
    place_LGE = np.argsort(np.argsort(out_LGE - exact_LGE, axis=2, kind="stable"), axis=2, kind="stable")
    return out_LGE + (place_LGE < lack_LG[:, :, None])


def _moe_layers(load_SLGE: Array, layer_L: Array, model: Model | None) -> tuple[Array, Array]:
    """Returns the layers that have pairs, and their numbers in the model. Recorders also count dense layers, without pairs."""
    kept_L = load_SLGE.any(axis=(0, 2, 3))
    if not kept_L.any():
        raise InputError("the counts contain no pair; record while the engine serves requests.")
    if model is None:
        return load_SLGE[:, kept_L], layer_L[kept_L]
    if len(layer_L) == model.num_layers:
        return load_SLGE, model.moe_layer_L
    strange = sorted(set(layer_L[kept_L].tolist()) - set(model.moe_layer_L.tolist()))
    if strange:
        raise InputError(
            f"layer {strange[0]} has pairs, but is not an MoE layer of {model.name}; name the model that was recorded."
        )
    return load_SLGE[:, kept_L], layer_L[kept_L]


def _spread(load_MLE: Array, num_ranks: int) -> Array:
    """Returns int64 [M, L, G, E]: the pairs of each layer, in the order of the experts, given to the ranks in turn."""
    M, L, E = load_MLE.shape
    cure = "give fewer ranks, or more tokens per rank"
    require_budget(8 * M * L * num_ranks * E, f"counts of {M} micro-steps x {L} layers x {num_ranks} ranks x {E} experts", cure)
    ends_MLE = np.cumsum(load_MLE, axis=2)
    out = np.empty((M, L, num_ranks, E), np.int64)
    for g in range(num_ranks):
        # Rank g gets pairs g, g + G, g + 2G and so on.
        dealt_MLE = (ends_MLE + num_ranks - 1 - g) // num_ranks
        out[:, :, g] = np.diff(dealt_MLE, axis=2, prepend=0)
    return out
