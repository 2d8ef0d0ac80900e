"""A small case, names that try to break out of a page, and what a written page holds."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib

import numpy as np

import foremoe
from foremoe.transfer.timeline import Event, Timeline

HOSTILE = "</script><script>alert(1)</script>{{facts}}<!-- & ]]> '\""
M, L, G, E = 3, 4, 4, 16


def small_model(name: str = "tiny") -> foremoe.Model:
    preset = foremoe.Model.preset("mixtral-8x7b")
    return dataclasses.replace(preset, name=name, num_layers=L + 1, first_moe_layer=1, num_experts=E, num_topk=2)


def small_problem(name: str = "tiny", schedule: str = "accumulate") -> foremoe.Problem:
    rng = np.random.default_rng(0)
    load_MLGE = rng.poisson(4000 * rng.lognormal(0.0, 1.0, (M, L, 1, E)), (M, L, G, E)).astype(np.int32)
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=2, model=None, moe_layer_L=np.arange(1, L + 1))
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=G, ranks_per_node=2)
    return foremoe.Problem.of(
        work, cluster, model=small_model(name), redundant=1, schedule=foremoe.Schedule.parse(schedule, M)
    )  # fmt: skip


def measured(plan: foremoe.Plan) -> list[Timeline]:
    event = Event("weights", 0, 1, 2, 0, "Collective", 1000, 0.001, 0.004, 0.002, "done")
    events = (event, event._replace(kind="gradient", start_s=0.002, src_rank=1), event._replace(src_rank=-1, backend=HOSTILE))
    return [Timeline(rank=g, begin_s=0.0, wall_s=0.01, events=events) for g in range(plan.G)]


def facts_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="facts">(.*?)</script>', text, re.DOTALL)[1])


def unpack(contents: dict[str, dict], text: str) -> dict[str, np.ndarray]:
    """What the page's script does, in Python: the arrays by name."""
    data = zlib.decompress(base64.b64decode(text))
    arrays = {}
    for name, entry in contents.items():
        dtype = np.dtype(entry["dtype"])
        planes = np.frombuffer(data, np.uint8, entry["bytes"], entry["offset"]).reshape(dtype.itemsize, -1)
        values = np.ascontiguousarray(planes.T).view(dtype.newbyteorder("<")).ravel()
        if entry["differences"]:
            values = np.cumsum(values, dtype=np.int32)
        arrays[name] = values.astype(dtype).reshape(entry["shape"])
    return arrays


def packed_of(text: str) -> str:
    return re.search(r'id="packed">(.*?)</script>', text, re.DOTALL)[1]


def arrays_of(text: str) -> dict[str, np.ndarray]:
    return unpack(facts_of(text)["arrays"], packed_of(text))
