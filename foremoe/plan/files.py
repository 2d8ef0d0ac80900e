"""Plan files, which contain a plan's arrays and a JSON header. docs/plan-format.md specifies the format."""

import dataclasses
import functools
import importlib.resources
import json
import os
from collections.abc import Mapping
from typing import Any

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.schema import faults
from foremoe.base.tensor_file import naming_fields, read_tensors, write_tensors
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.header import FORMAT_VERSION, PlanHeader, PlanKey
from foremoe.plan.numbering import require_dtypes, require_numbered
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.problem.cost import Cost, CostModel
from foremoe.problem.schedule import Schedule
from foremoe.workload.dealing import Dealt


def _names(words: str) -> dict[str, str]:
    """Returns names in the file, each with the attribute that it holds. A word is ``name``, or ``name=attribute``."""
    return {name: attribute or name for name, _, attribute in (word.partition("=") for word in words.split())}


# Names in a file never change. If an attribute is renamed, write `name_in_file=new_attribute` here.
PLAN = _names("home_LE load_MLE expert_MLGS quota_MLGS bound_ML load_bound_ML stop_ML")
TRANSFERS = _names("micro_step_C layer_C phase_C expert_C src_C dst_C slot_C link_C buffer_C need_C after_C")
COST = _names("window_s dispatch_s compute_s combine_s transfer_s gradient_s")
SCHEDULE_ARRAYS = _names("micro_step_X phase_X chunk_X chunk_L block_L")
HEADER_ARRAYS = _names("moe_layer_L")
HEADER = _names("planner redundant slot_depth replicas keeps_homes trace_id foremoe")
KEY = _names("step stage mini_batch ep_group")
SCHEDULE = _names("num_chunks reforward")
COST_MODEL = _names("objective overlap")
DEALT = _names("tokens_per_rank packer seed over_budget dropped_micro_steps")
# The keys of the TOML tables of a model and a cluster.
MODEL = _names(
    "name num_layers first_moe_layer num_experts num_topk hidden_size ffn_size num_matrices bytes_per_weight"
    " bytes_per_gradient bytes_per_activation attention_params num_heads qk_head_dim v_head_dim num_expert_groups"
    " vocab_size shared_ffn_size dense_ffn_size source"
)
CLUSTER = _names(
    "name num_ranks ranks_per_node node_of_rank flops_per_s compute_efficiency slot_overhead_s peer_bytes_per_s"
    " rdma_bytes_per_s host_bytes_per_s peer_latency_s rdma_latency_s host_latency_s nic_sharing dispatch exchange_bytes_per_s"
    " copy_contention memory_bytes memory_bytes_per_s"
    " attention_efficiency backward_ratio attention_backward_ratio layer_overhead_s pair_overhead_s calibrated residual source"
    " plain_bytes_per_s return_bytes_per_s score_flops_per_s element_overhead_s tile_pairs host_layer_s precision slot_backward_s"
    " planned_layer_s planned_token_s"
)


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes `plan` to a file, whose bytes depend only on the plan. Raises InputError if the file cannot be written."""
    head = plan.header
    arrays = (
        _stored(plan, PLAN)
        | _stored(plan.transfers, TRANSFERS, "transfers.")
        | _stored(plan.cost_ML, COST, "cost.")
        | _stored(head.schedule, SCHEDULE_ARRAYS, "schedule.")
        | _stored(head, HEADER_ARRAYS)
    )
    header = {
        **_stored(head, HEADER),
        "key": _stored(head.key, KEY),
        "model": _stored(head.model.to_dict(), MODEL),
        "cluster": _stored(head.cluster.to_dict(), CLUSTER),
        "cost": _stored(head.cost, COST_MODEL),
        "schedule": _stored(head.schedule, SCHEDULE),
        "dealt": None if head.dealt is None else _stored(head.dealt, DEALT),
    }
    write_tensors(path, "plan", FORMAT_VERSION, header, {name: array for name, array in arrays.items() if array is not None})


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a file written by `save_plan`. Tensors and header keys that are not known are ignored.

    Raises:
        InputError: The file does not exist, is truncated or changed, or has another format. The error is also raised if a field
            is missing, has the wrong type or shape, or is out of range.
    """
    header, tensors = read_tensors(path, "plan", FORMAT_VERSION)
    with naming_fields(path, header):
        fault = next(faults(header, header_schema()), None)
        if fault is not None:
            raise InputError(f"{fault}; see docs/plan-format.md for the format of plan files.")
        plan = _plan_of(header, tensors)
        require_numbered(plan)
    return plan


@functools.cache
def header_schema() -> dict[str, Any]:
    """Returns the JSON schema of a plan's header."""
    text = importlib.resources.files("foremoe.plan").joinpath("header.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _plan_of(header: dict[str, Any], tensors: dict[str, Array]) -> Plan:
    for kind, names, prefix in (
        (Plan, PLAN, ""),
        (TransferList, TRANSFERS, "transfers."),
        (Schedule, SCHEDULE_ARRAYS, "schedule."),
    ):
        require_dtypes(kind.array_fields(), _loaded(tensors, names, prefix), prefix)
    dealt = header["dealt"]
    if dealt is not None:
        dealt = Dealt(**_loaded({**dealt, "over_budget": tuple(dealt["over_budget"])}, DEALT))
    return Plan(
        header=PlanHeader(
            **_loaded(header, HEADER),
            **_loaded(tensors, HEADER_ARRAYS),
            key=PlanKey(**_loaded(header["key"], KEY)),
            model=Model.from_dict(_loaded(header["model"], MODEL), "the plan's model"),
            cluster=Cluster.from_dict(_loaded(header["cluster"], CLUSTER), "the plan's cluster"),
            cost=CostModel(**_loaded(header["cost"], COST_MODEL)),
            schedule=Schedule(**_loaded(tensors, SCHEDULE_ARRAYS, "schedule."), **_loaded(header["schedule"], SCHEDULE)),
            dealt=dealt,
        ),
        **_loaded(tensors, PLAN),
        transfers=TransferList(**_loaded(tensors, TRANSFERS, "transfers.")),
        cost_ML=Cost(**_loaded(tensors, COST, "cost.")),
    )


def _stored(value: Any, names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Returns the file's entries for the attributes of a value or the keys of a table. Missing keys remain missing."""
    if not isinstance(value, dict):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {prefix + name: value[attribute] for name, attribute in names.items() if attribute in value}


def _loaded(stored: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Returns attributes by name. Attributes that the file lacks keep their defaults."""
    return {attribute: stored[prefix + name] for name, attribute in names.items() if prefix + name in stored}
