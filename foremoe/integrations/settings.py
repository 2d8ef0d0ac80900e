"""Settings of Megatron's `attach` and of the trainers' adapters. Each setting is declared and checked in one place."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from foremoe.base.errors import InputError
from foremoe.base.fields import MAX_WHOLE, check_fields, flag, shown, text, whole
from foremoe.calibrate.gate import require_taken
from foremoe.machine.cluster import Cluster
from foremoe.planner.parsing import parse
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import resolve
from foremoe.problem.cost import CostModel
from foremoe.transfer.settings import EngineSettings, seconds


@dataclass(frozen=True, kw_only=True)
class AttachSettings(EngineSettings):
    """Settings of `foremoe.integrations.megatron.attach`. Each value may be given as a string, as in YAML or on a command line.

    Attributes:
        redundant: Redundant slots per rank, R. If 0, stages run as without foremoe, and metrics show what 1 and 2 slots would
            gain.
        planner: Planner, given as a `Planner`, the name of a strategy, a solver expression, or ``module:name``.
        cost: Cost model, given as a `CostModel` or as an objective: "time", or "balance" for even loads at any cost.
        slot_depth: Number of buffers per slot. One ring holds the buffers for all layers. See `foremoe.Problem`.
        replicas: "any" to allow replicas anywhere, or "node" to keep them inside their home's node.
        cluster: Cluster of the EP group, or the path of its TOML file. Defaults to the figures of the 8xh100 preset, with the
            ranks' real hosts as nodes. The kind of dispatch follows the model's dispatcher. Figures count as uncalibrated unless
            the cluster says otherwise.
        group_timeout_s: Timeout in seconds for another rank, both for messages and for the creation of groups. It must be longer
            than the time that one rank spends on a checkpoint.
        spare: Maximum number of unknown tokens that a rank may have in a known row. Each unknown token takes a place at every
            expert. If a rank has more of them, the row exchanges counts.
        route_bytes: Limit in bytes of each rank's host memory for routes of known rows. Rows beyond the limit exchange counts.
        plan_limit_s: Limit in seconds of a rank's planning time. If a rank takes longer, planning fails on all ranks. None means
            no limit.
    """

    redundant: int = 1
    planner: Planner = field(default_factory=Planner)
    cost: CostModel = field(default_factory=CostModel)
    slot_depth: int = 3
    replicas: str = "any"
    cluster: Cluster | None = None
    spare: int = 64
    route_bytes: int = 2**31
    group_timeout_s: float = 300.0
    plan_limit_s: float | None = None

    ranks_own = EngineSettings.ranks_own | {"group_timeout_s", "plan_limit_s"}

    def __post_init__(self) -> None:
        super().__post_init__()
        checks: tuple[tuple[Callable[[Any, str], Any], tuple[str, ...]], ...] = (
            (partial(whole, low=0, high=2**15), ("redundant", "spare")), (partial(whole, low=1, high=1024), ("slot_depth",)),
            (partial(whole, low=0, high=MAX_WHOLE), ("route_bytes",)), (seconds, ("group_timeout_s", "plan_limit_s")),
            (_planner, ("planner",)), (_cost, ("cost",)), (_cluster, ("cluster",)),
        )  # fmt: skip
        check_fields(self, checks)
        if self.replicas not in ("any", "node"):
            raise InputError(f'replicas must be "any" or "node"; got {shown(self.replicas)}.')


@dataclass(frozen=True, kw_only=True)
class Settings(AttachSettings):
    """Settings of the trainers' adapters. In veRL, they are the keys under ``actor_rollout_ref.actor.megatron.foremoe``.

    Attributes:
        plan_limit_s: Limit in seconds of the planning time. If planning takes longer, it is cancelled, and the stage runs at
            home.
        compile_limit_s: Timeout in seconds for ranks that compile kernels before the first stage.
        recompute: Whether the recompute stage follows a plan.
        update: Whether the update stage follows a plan.
        packing: Whether to regroup samples into micro-batches whose experts are better balanced. See
            `foremoe.integrations.verl.packing`.
        dump: Folder for files with the workload (counts) of every stage, or None to write no files.
    """

    plan_limit_s: float | None = 20.0
    compile_limit_s: float = 1800.0
    recompute: bool = True
    update: bool = True
    packing: bool = False
    dump: str | None = None

    ranks_own = AttachSettings.ranks_own | {"compile_limit_s"}

    def __post_init__(self) -> None:
        super().__post_init__()
        checks: tuple[tuple[Callable[[Any, str], Any], tuple[str, ...]], ...] = (
            (seconds, ("compile_limit_s",)), (flag, ("recompute", "update", "packing")), (text, ("dump",)),
        )  # fmt: skip
        check_fields(self, checks)


def _planner(value: Any, name: str) -> Planner:
    planner = resolve(value)
    if not planner.keeps_homes:
        moves = ", ".join(type(solver).__name__ for solver in planner.rank if not solver.keeps_homes)
        raise InputError(
            f"{name}={shown(value)} moves experts from their homes ({moves}), and no engine runs such plans; choose another one, "
            "such as foremoe, and compare this one offline."
        )
    return planner


def _cost(value: Any, name: str) -> CostModel:
    if isinstance(value, str):
        value = parse(value) if "(" in value else CostModel(objective=value)
    if not isinstance(value, CostModel):
        raise InputError(f'{name} must be a CostModel, "time" or "balance"; got {shown(value)}.')
    return value


def _cluster(value: Any, name: str) -> Cluster:
    if isinstance(value, str | os.PathLike):
        file, value = str(value), Cluster.from_toml(Path(value))
        require_taken(value, file, f"{name}=Cluster.from_toml(...) accepts it anyway.")
    if not isinstance(value, Cluster):
        raise InputError(f"{name} must be a Cluster or the path of its TOML; got {shown(value)}.")
    return value
