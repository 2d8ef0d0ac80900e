"""Settings: what a veRL user may say about foremoe, as plain values that YAML and command lines can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster
from foremoe.planner.parsing import parse
from foremoe.problem.cost import CostModel
from foremoe.problem.slots import Slots, slots_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys under ``actor_rollout_ref.actor.megatron.foremoe``.

    Attributes:
        redundant: Slots per rank for replicas.
        planner: A strategy's name, a solver's text, or ``module:name``.
        objective: "time" or "balance".
        slots: Text of a slot policy, "shared:3" or "SharedSlots(depth=3)".
        replicas: "any" or "node".
        backends: Transfer backends in order of preference; none: copy engines where they can be, else collective.
        prefetch: Uses that the engine looks ahead.
        timeout_s: Patience of the engine, in seconds.
        group_timeout_s: Seconds that a rank waits for another one in messages and set-up; more than a checkpoint takes one rank.
        compile_limit_s: Seconds that ranks wait for those that compile before the first stage.
        debug: Checks of the engine.
        cluster: Path of a cluster TOML for the EP group; None: the 8xh100 preset's figures on the hosts where the ranks are.
        plan_limit_s: Planning that takes longer is given up, and the stage runs at home.
        recompute: Whether the recompute stage runs by a plan.
        update: Whether the update stage runs by a plan.
        packing: Form other micro-batches, so that their experts balance; see `packing`.
        dump: Folder for counts-only workloads of every stage, or None.
    """

    redundant: int = 1
    planner: str = "hierarchical"
    objective: str = "time"
    slots: str = "shared:3"
    replicas: str = "any"
    backends: tuple[str, ...] = ()
    prefetch: int = 2
    timeout_s: float = 30.0
    group_timeout_s: float = 300.0
    compile_limit_s: float = 1800.0
    debug: bool = False
    cluster: str | None = None
    plan_limit_s: float = 20.0
    recompute: bool = True
    update: bool = True
    packing: bool = False
    dump: str | None = None

    @staticmethod
    def of(value: Any) -> Settings | None:
        """Settings from a mapping (a config node), themselves, or None.

        Raises:
            InputError: A key that does not exist, or a value that does not fit.
        """
        if value is None or isinstance(value, Settings):
            return value
        if not isinstance(value, Mapping):
            raise InputError(f"megatron.foremoe must be a mapping of settings such as {{redundant: 1}}; got {value!r}.")
        known = {field.name for field in dataclasses.fields(Settings)}
        given = {str(key): item for key, item in value.items() if key != "_target_"}
        unknown = sorted(set(given) - known)
        if unknown:
            raise InputError(f"megatron.foremoe has no setting {unknown[0]!r}; there are {', '.join(sorted(known))}.")
        if "backends" in given:
            names = given["backends"]
            given["backends"] = (names,) if isinstance(names, str) else tuple(str(name) for name in names)
        settings = Settings(**given)
        settings.options()  # what cannot be understood is said when the job starts, not when it has rolled out
        return settings

    def options(self) -> dict[str, Any]:
        """The arguments for `foremoe.integrations.megatron.attach`, all but `cluster`."""
        from foremoe.planner.strategies import resolve

        slots = parse(self.slots) if "(" in self.slots else slots_of(self.slots)
        if not isinstance(slots, Slots):
            raise InputError(f"slots={self.slots!r} is not a valid slot policy; write shared:3 or resident:1.")
        for name in ("recompute", "update", "packing", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false; got {getattr(self, name)!r}.")
        for name in ("plan_limit_s", "timeout_s", "group_timeout_s", "compile_limit_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0; got {getattr(self, name)}.")
        return {
            "redundant": self.redundant,
            "planner": resolve(self.planner),
            "cost": CostModel(objective=self.objective),
            "slots": slots,
            "replicas": self.replicas,
            "backends": self.backends or None,
            "prefetch": self.prefetch,
            "timeout_s": self.timeout_s,
            "group_timeout_s": self.group_timeout_s,
            "debug": self.debug,
            "plan_limit_s": self.plan_limit_s,
        }

    def cluster_of(self) -> Cluster | None:
        """The cluster of the file, if one is named."""
        return None if self.cluster is None else Cluster.from_toml(Path(self.cluster))
