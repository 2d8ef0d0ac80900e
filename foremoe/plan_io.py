"""Plan files: safetensors with one JSON header and a checksum over everything."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from foremoe.arrays import Array
from foremoe.cluster import Cluster
from foremoe.cost import Cost, CostModel
from foremoe.errors import InputError
from foremoe.model import Model
from foremoe.plan import Plan
from foremoe.plan_header import FORMAT_VERSION, PlanHeader, PlanKey
from foremoe.schedule import Schedule
from foremoe.slots import ResidentSlots, SharedSlots
from foremoe.transfers import TRANSFER_DTYPES, Transfers
from foremoe.workload import Dealt

_ARRAYS = ("home_LE", "load_MLE", "expert_MLGS", "quota_MLGS", "order_M", "bound_ML", "load_bound_ML", "stop_ML")
_SCHEDULE = ("micro_step_X", "phase_X", "chunk_X")
_SLOTS = {"SharedSlots": SharedSlots, "ResidentSlots": ResidentSlots}


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes `plan`; the bytes are a function of the plan alone."""
    tensors: dict[str, Array] = {name: getattr(plan, name) for name in _ARRAYS}
    tensors |= {f"transfers.{name}": getattr(plan.transfers, name) for name in TRANSFER_DTYPES}
    tensors |= {f"cost.{name}": part for name, part in plan.cost_ML.parts().items()}
    tensors |= {f"schedule.{name}": getattr(plan.header.schedule, name) for name in _SCHEDULE}
    tensors["moe_layer_L"] = plan.header.moe_layer_L
    if plan.resident_LGS is not None:
        tensors["resident_LGS"] = plan.resident_LGS
    head = plan.header
    header: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "key": dataclasses.asdict(head.key),
        "planner": head.planner,
        "model": head.model.to_dict(),
        "cluster": head.cluster.to_dict(),
        "cost": dataclasses.asdict(head.cost),
        "slots": {"kind": type(head.slots).__name__, **dataclasses.asdict(head.slots)},
        "schedule": {"num_chunks": head.schedule.num_chunks, "reforward": head.schedule.reforward},
        "redundant": head.redundant,
        "replicas": head.replicas,
        "keeps_homes": head.keeps_homes,
        "trace_id": head.trace_id,
        "dealt": None if head.dealt is None else dataclasses.asdict(head.dealt),
    }
    header["checksum"] = _checksum(header, tensors)
    # One metadata key: safetensors keeps no order among several, and the bytes must not vary.
    payload = save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, {"foremoe_plan": json.dumps(header, sort_keys=True)})
    target = Path(path)
    try:
        partial = target.with_name(target.name + ".part")
        partial.write_bytes(payload)
        partial.replace(target)
    except OSError as error:
        raise InputError(f"cannot write the plan to {target}: {error.strerror}.") from None


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads what `save_plan` wrote; every fault of the file is one InputError."""
    source = Path(path)
    try:
        payload = source.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}.") from None
    header = _read_header(source, payload)
    if not isinstance(header.get("format"), int) or header["format"] > FORMAT_VERSION:
        raise InputError(
            f"{source} has plan format {header.get('format')}, this foremoe reads up to {FORMAT_VERSION}; install a newer one."
        )
    try:
        tensors = load(payload)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{source} is truncated or damaged ({error}); write it again.") from None
    if _checksum({k: v for k, v in header.items() if k != "checksum"}, tensors) != header.get("checksum"):
        raise InputError(f"{source} was changed after it was written (its checksum does not match); write it again.")
    try:
        return _plan_of(header, tensors)
    except (KeyError, TypeError) as error:
        raise InputError(f"{source} lacks or misnames a field of plan format {FORMAT_VERSION}: {error}.") from None


def _read_header(source: Path, payload: bytes) -> dict[str, Any]:
    if len(payload) < 8:
        raise InputError(f"{source} is empty or truncated ({len(payload)} bytes); write it again.")
    length = int.from_bytes(payload[:8], "little")
    if length > len(payload) - 8:
        raise InputError(f"{source} is no plan, or truncated ({len(payload)} bytes); give a file that Plan.save wrote.")
    try:
        header = json.loads(json.loads(payload[8 : 8 + length])["__metadata__"]["foremoe_plan"])
    except (ValueError, KeyError, TypeError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise InputError(f"{source} is no plan; give a file that Plan.save wrote.")
    return header


def _plan_of(header: dict[str, Any], tensors: dict[str, Array]) -> Plan:
    slots = dict(header["slots"])
    dealt = header["dealt"]
    if dealt is not None:
        dealt = Dealt(**{name: tuple(value) if isinstance(value, list) else value for name, value in dealt.items()})
    schedule = Schedule(**{name: tensors[f"schedule.{name}"] for name in _SCHEDULE}, **header["schedule"])
    return Plan(
        header=PlanHeader(
            key=PlanKey(**header["key"]),
            planner=header["planner"],
            model=Model.from_dict(header["model"], "the plan's model"),
            cluster=Cluster.from_dict(header["cluster"], "the plan's cluster"),
            cost=CostModel(**header["cost"]),
            slots=_SLOTS[slots.pop("kind")](**slots),
            schedule=schedule,
            redundant=header["redundant"],
            replicas=header["replicas"],
            keeps_homes=header["keeps_homes"],
            moe_layer_L=tensors["moe_layer_L"],
            trace_id=header["trace_id"],
            dealt=dealt,
        ),
        **{name: tensors[name] for name in _ARRAYS},
        transfers=Transfers(**{name: tensors[f"transfers.{name}"] for name in TRANSFER_DTYPES}),
        cost_ML=Cost(**{f.name: tensors[f"cost.{f.name}"] for f in dataclasses.fields(Cost)}),
        resident_LGS=tensors.get("resident_LGS"),
    )


def _checksum(header: dict[str, Any], tensors: dict[str, Array]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
