"""Every loader of foremoe, a valid input of each, and what a loaded value is used for."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import fuzz_changes as changes
import numpy as np
import tomli_w

import foremoe
from foremoe.base.errors import InputError
from foremoe.base.schema import parse_json
from foremoe.base.stored import open_stored
from foremoe.base.tensor_file import kind_of
from foremoe.cli.figures import plan_figures, trace_figures, trace_text, workload_figures, workload_text
from foremoe.plan.plan import Plan
from foremoe.routing.readers import sglang, vllm
from foremoe.routing.trace import RoutingTrace
from foremoe.workload import Workload, count_workload, from_routed_experts, open_recordings

LAYERS, EXPERTS, TOPK, RANKS = 3, 8, 2, 4
MODEL = dataclasses.replace(
    foremoe.Model.preset("mixtral-8x7b"), name="tiny", num_layers=LAYERS, num_experts=EXPERTS, num_topk=TOPK
)


class Loader(NamedTuple):
    """One loader."""

    suffix: str
    change: Callable[[Random], bytes]  # a valid input, changed
    use: Callable[[str], None]  # loads a path and uses what it holds
    valid: Callable[[], bytes]


def ids(num_tokens: int, seed: int = 0) -> np.ndarray:
    """uint8 [tokens, layers, top-k]."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((num_tokens, LAYERS, EXPERTS)), axis=2)[:, :, :TOPK].astype(np.uint8)


@functools.cache
def trace() -> RoutingTrace:
    known_T = np.arange(48) % 7 > 0
    return RoutingTrace(topk_TLK=ids(48), num_experts=EXPERTS, seq_len_Q=[8] * 6, known_T=known_T, model="tiny", source="here")


@functools.cache
def work() -> Workload:
    return Workload.from_trace(trace(), num_ranks=RANKS, tokens_per_rank=4)


@functools.cache
def plan() -> Plan:
    cluster, cost = foremoe.Cluster.preset("8xh100", RANKS, 2), foremoe.CostModel(objective="balance")
    problem = foremoe.Problem.of(work(), cluster, model=MODEL, redundant=1, cost=cost)
    return foremoe.Planner().plan(problem)[0]


@functools.cache
def parts(value: Any, suffix: str = ".safetensors") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of what `value` saves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"valid{suffix}")
        value.save(path)
        with open_stored(path, "valid") as stored:
            return parse_json(stored.header or ""), {name: np.array(stored.read(name)) for name in sorted(stored.names)}


def recording() -> dict[str, np.ndarray]:
    """A trace as others write it."""
    return {
        "topk_ids": trace().topk_TLK, "seq_len": np.array(trace().seq_len_Q), "num_experts": np.array(EXPERTS),
        "known_T": np.array(trace().known_T),
    }  # fmt: skip


def counted() -> list[Any]:
    """Counts of two steps, [steps, layers, experts]."""
    return [[np.bincount(one.ravel(), minlength=EXPERTS).tolist() for one in ids(20, s).swapaxes(0, 1)] for s in (0, 1)]


def statistics() -> dict[str, np.ndarray]:
    """As TensorRT-LLM writes them."""
    return {f"{s}_{at}": np.array(one) for s, step in enumerate(counted()) for at, one in enumerate(step)}


def use_recorded(path: str) -> None:
    for strict in (True, False):
        found = open_recordings([path], model=MODEL, num_ranks=RANKS, tokens_per_rank=8, strict=strict)
        if isinstance(found, Workload):
            workload_text(workload_figures(found))
        else:
            trace_text(trace_figures(found))


def use_plan(path: str) -> None:
    loaded = Plan.load(path)
    broken = loaded.violations()
    plan_figures(loaded), loaded.summary(), loaded.explain(0, loaded.L - 1)
    if not broken:
        loaded.save(path)
        assert Plan.load(path).same_as(loaded)


def use_workload(path: str) -> None:
    loaded = Workload.load(path)
    workload_text(workload_figures(loaded))
    loaded[:1].layers([0])
    loaded.save(path)
    assert Workload.load(path).same_as(loaded)


def use_trace(path: str) -> None:
    loaded = RoutingTrace.load(path)
    trace_text(trace_figures(loaded))
    Workload.from_trace(loaded, num_ranks=2, tokens_per_rank=64)
    loaded.save(path)
    assert RoutingTrace.load(path).same_as(loaded)


def use_model(path: str) -> None:
    loaded = foremoe.Model.from_toml(path)
    assert loaded.expert_bytes + loaded.gradient_bytes + loaded.token_bytes + loaded.flops_per_pair > 0
    loaded.to_toml(path)
    assert foremoe.Model.from_toml(path) == loaded


def use_cluster(path: str) -> None:
    loaded = foremoe.Cluster.from_toml(path)
    assert len(loaded.nic_of_rank_G) == loaded.num_ranks and loaded.standing and len(loaded.copy_seconds(1e6)) == 3
    loaded.to_toml(path)
    assert foremoe.Cluster.from_toml(path).same_as(loaded)


def use_payload(path: str) -> None:
    try:
        payload = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):
        return  # the trainer's, not ours
    options = {"num_experts": EXPERTS, "num_topk": TOPK, "num_layers": LAYERS}
    refused = []
    for read in (sglang.payloads, vllm.payloads, lambda given: given):
        try:
            given = read(payload)
            from_routed_experts(given, **options)
            count_workload(given, num_ranks=2, micro_step_Q=[0] * len(given), rank_Q=[0] * len(given), **options)
        except InputError as error:
            refused.append(error)
    if len(refused) == 3:
        raise refused[0]


def use_header(path: str) -> None:
    kind_of(path)


def encoded(array: np.ndarray, as_npy: bool) -> str:
    out = io.BytesIO()
    np.save(out, array)
    return base64.b64encode(out.getvalue() if as_npy else array.tobytes()).decode()


RAW, NPY = encoded(ids(4).astype("<i4"), False), encoded(ids(4), True)
PAYLOADS: list[Any] = [
    [{"meta_info": {"routed_experts": RAW, "prompt_tokens": 2, "completion_tokens": 3}}, {"meta_info": {"routed_experts": NPY}}],
    {"choices": [{"index": 0, "token_ids": [3, 4, 5]}], "sglext": {"routed_experts": RAW, "input_ids": [1, 2]}},
    [{"prompt_token_ids": [1, 2], "outputs": [{"token_ids": [3, 4], "routed_experts": NPY}], "prompt_routed_experts": None}],
    [{"data": RAW, "shape": [4, LAYERS, TOPK], "dtype": "int32", "encoding": "base64", "start": 0}],
    [{"routed_experts": ids(4).tolist(), "routed_experts_start_len": 1}, None, RAW],
    [[{"meta_info": {"routed_experts": RAW, "routed_experts_start_len": 4}}, {"routed_experts": NPY}]],
    ids(4).tolist(),
]
RECORDED: list[Any] = [
    {"logical_count": counted()},
    *PAYLOADS,
    [{"problem_id": 0, "layer": at, "token_idx": t, "experts": ids(4)[t, at].tolist()} for t in range(4) for at in range(LAYERS)],
    [{"step": 0, "layer": at, "expert": e, "count": 3} for at in range(LAYERS) for e in range(EXPERTS)],
    [{"tokens": [1] * 5, "selected_experts": ids(4).tolist()}],
]


def _valid_npz() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **recording())
    return out.getvalue()


def of_tensors(value: Callable[[], Any], use: Callable[[str], None]) -> Loader:
    """A loader of what `value` saves."""

    def valid() -> bytes:
        header, arrays = parts(value())
        return changes.pack({"foremoe": json.dumps(header)}, arrays)

    return Loader(".safetensors", lambda rng: changes.changed_tensors(*parts(value()), rng), use, valid)


def of_table(value: Any, use: Callable[[str], None]) -> Loader:
    """A loader of a TOML file."""
    table = value.to_dict()
    return Loader(".toml", lambda rng: changes.changed_toml(table, rng), use, lambda: tomli_w.dumps(table).encode())


CLUSTER = dataclasses.replace(foremoe.Cluster.preset("8xh100", RANKS, 2), node_of_rank_G=np.array([0, 1, 0, 1]))
LOADERS: dict[str, Loader] = {
    "plan": of_tensors(plan, use_plan),
    "workload": of_tensors(work, use_workload),
    "trace": of_tensors(trace, use_trace),
    "recording": Loader(
        ".safetensors",
        lambda rng: changes.changed_tensors(None, recording(), rng),
        use_trace,
        lambda: changes.pack({}, recording()),
    ),
    "archive": Loader(".npz", lambda rng: changes.changed_npz(recording(), rng), use_trace, _valid_npz),
    "model": of_table(MODEL, use_model),
    "cluster": of_table(CLUSTER, use_cluster),
    "payload": Loader(
        ".json",
        lambda rng: changes.changed_payload(rng.choice(PAYLOADS), rng),
        use_payload,
        lambda: json.dumps(PAYLOADS[0]).encode(),
    ),
    "header": of_tensors(work, use_header),
    # What engines and recorders write: a tree of values, and arrays by iteration and layer.
    "recorded": Loader(
        ".json",
        lambda rng: changes.changed_payload(rng.choice(RECORDED), rng),
        use_recorded,
        lambda: json.dumps(RECORDED[0]).encode(),
    ),
    "statistics": Loader(
        ".safetensors",
        lambda rng: changes.changed_tensors(None, statistics(), rng),
        use_recorded,
        lambda: changes.pack({}, statistics()),
    ),
}


def judge(name: str, path: Path, data: bytes) -> str:
    """``"loaded"`` or ``"refused"``; raises what else happens. An empty file is written as one byte: it is refused before."""
    path.write_bytes(data or b"\0")
    try:
        LOADERS[name].use(str(path))
    except InputError as error:
        text = str(error)
        assert text.isprintable() and 0 < len(text) < 2500, f"not a sentence: {text!r}"
        return "refused"
    return "loaded"
