"""Plan files: the plan's arrays and one JSON header."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.tensor_file import read_tensors, write_tensors
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.header import FORMAT_VERSION, PlanHeader, PlanKey
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TRANSFER_DTYPES, TransferList
from foremoe.problem.cost import Cost, CostModel
from foremoe.problem.schedule import Schedule
from foremoe.problem.slots import ResidentSlots, SharedSlots
from foremoe.workload.workload import Dealt

_ARRAYS = ("home_LE", "load_MLE", "expert_MLGS", "quota_MLGS", "order_M", "bound_ML", "load_bound_ML", "stop_ML")
_SCHEDULE = ("micro_step_X", "phase_X", "chunk_X")
_SCHEDULE_LAYERS = ("chunk_L", "block_L")  # where given
_SLOTS: dict[str, Any] = {"SharedSlots": SharedSlots, "ResidentSlots": ResidentSlots}


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes `plan`; the bytes are a function of the plan alone."""
    tensors: dict[str, Array] = {name: getattr(plan, name) for name in _ARRAYS}
    tensors |= {f"transfers.{name}": getattr(plan.transfers, name) for name in TRANSFER_DTYPES}
    tensors |= {f"cost.{name}": part for name, part in plan.cost_ML.parts().items()}
    tensors |= {f"schedule.{name}": getattr(plan.header.schedule, name) for name in _SCHEDULE}
    for name in _SCHEDULE_LAYERS:
        if getattr(plan.header.schedule, name) is not None:
            tensors[f"schedule.{name}"] = getattr(plan.header.schedule, name)
    tensors["moe_layer_L"] = plan.header.moe_layer_L
    if plan.resident_LGS is not None:
        tensors["resident_LGS"] = plan.resident_LGS
    head = plan.header
    header: dict[str, Any] = {
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
    write_tensors(path, "plan", FORMAT_VERSION, header, tensors)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads what `save_plan` wrote; every fault of the file is one InputError."""
    header, tensors = read_tensors(path, "plan", FORMAT_VERSION)
    try:
        return _plan_of(header, tensors)
    except InputError as error:
        raise InputError(f"{os.fspath(path)!r}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{os.fspath(path)!r} lacks or misnames a field of plan format {FORMAT_VERSION}: {error}.") from None


def _plan_of(header: dict[str, Any], tensors: dict[str, Array]) -> Plan:
    slots = dict(header["slots"])
    dealt = header["dealt"]
    if dealt is not None:
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in dealt.items()}
        dealt = Dealt(**fields)
    passes: dict[str, Any] = {name: tensors[f"schedule.{name}"] for name in _SCHEDULE}
    layers: dict[str, Any] = {name: tensors.get(f"schedule.{name}") for name in _SCHEDULE_LAYERS}
    schedule = Schedule(**passes, **layers, **header["schedule"])
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
        transfers=TransferList(**{name: tensors[f"transfers.{name}"] for name in TRANSFER_DTYPES}),
        cost_ML=Cost(**{f.name: tensors[f"cost.{f.name}"] for f in dataclasses.fields(Cost)}),
        resident_LGS=tensors.get("resident_LGS"),
    )
