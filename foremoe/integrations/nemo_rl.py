"""foremoe inside NeMo-RL; nothing is forked. One command runs NeMo-RL's own program, and one setting switches foremoe on::

    python -m foremoe.integrations.nemo_rl examples/run_grpo.py --config ... +policy.foremoe.redundant=1

Needs ``policy.router_replay.enabled=true``. Log-probabilities and updates run by plans.
"""

from __future__ import annotations

import itertools
import logging
import runpy
import sys
from typing import Any

from foremoe.base.arrays import Array
from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import Settings

_logger = logging.getLogger(__name__)

THEIRS = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
OURS = "foremoe.integrations.nemo_rl_worker.MegatronPolicyWorker"


def register() -> None:
    """Chooses foremoe's Megatron worker where the config has ``policy.foremoe``; in the driver, before the policy is made."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.models.policy import lm_policy

    choose = lm_policy.resolve_policy_worker_cls

    def choose_ours(default: str, config: Any) -> str:
        chosen: str = choose(default, config)
        return OURS if chosen == THEIRS and config.get("foremoe") is not None else chosen

    ACTOR_ENVIRONMENT_REGISTRY[OURS] = ACTOR_ENVIRONMENT_REGISTRY[THEIRS]
    lm_policy.resolve_policy_worker_cls = choose_ours


def install(config: Any) -> None:
    """Has the Megatron worker of this process run by plans; given NeMo-RL's ``policy``."""
    settings = Settings.of(config["foremoe"])
    if not (config.get("router_replay") or {}).get("enabled"):
        warn_once(
            _logger, "policy.foremoe does nothing, for no routing is known before a pass; set policy.router_replay.enabled=true."
        )
        return
    from nemo_rl.models.megatron import train

    from foremoe.integrations.megatron.forward_backward import plan_calls_of

    plan_calls_of(train, routing_of, settings)


def routing_of(call: dict[str, Any]) -> list[Array] | None:
    """What NeMo-RL will replay in a call, laid out by its own code. All micro-batches are formed for it, where NeMo-RL forms one
    at a time.

    Returns:
        int16 [T, L, K] per micro-batch, -1 where rollout has no route; None for passes without replay.
    """
    if not call["forward_step_func"].keywords["use_router_replay"]:
        return None
    from nemo_rl.models.megatron.router_replay import build_router_replay_assignments

    from foremoe.integrations.megatron.forward_backward import on_host

    batches = list(itertools.islice(call["data_iterator"], call["num_microbatches"]))
    routing = [
        on_host([topk_TK for _, topk_TK in build_router_replay_assignments(call["model"], batch.routed_experts_cp_sharded)])
        for batch in batches
    ]
    call["data_iterator"] = (batches.pop(0) for _ in range(len(batches)))  # each is freed when it has run
    return routing


if __name__ == "__main__":
    register()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
