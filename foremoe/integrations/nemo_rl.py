"""foremoe inside NeMo-RL, without a fork of it. One command runs NeMo-RL's own program, and one setting enables foremoe::

    python -m foremoe.integrations.nemo_rl examples/run_grpo.py --config ... +policy.foremoe.redundant=1

This requires ``policy.router_replay.enabled=true``. The log-prob and update passes then follow plans.
"""

from __future__ import annotations

import itertools
import logging
import runpy
import sys
from collections.abc import Callable
from typing import Any

from foremoe.base.arrays import Array
from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import Settings
from foremoe.integrations.supported import Get, Parallel, Refusal, hydra, refusal_of

_logger = logging.getLogger(__name__)

THEIRS = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
OURS = "foremoe.integrations.nemo_rl_worker.MegatronPolicyWorker"


def register() -> None:
    """Makes NeMo-RL use foremoe's worker if the config has ``policy.foremoe``. Call it in the driver before the policy exists."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.models.policy import lm_policy

    choose = lm_policy.resolve_policy_worker_cls

    def choose_ours(default: str, config: Any) -> str:
        chosen: str = choose(default, config)
        if chosen != THEIRS or config.get("foremoe") is None:
            return chosen
        settings_of(config)
        return OURS

    ACTOR_ENVIRONMENT_REGISTRY[OURS] = ACTOR_ENVIRONMENT_REGISTRY[THEIRS]
    lm_policy.resolve_policy_worker_cls = choose_ours


def settings_of(config: Any) -> Settings:
    """Reads foremoe's settings from NeMo-RL's ``policy`` before there is a worker or a model.

    Raises:
        InputError: A setting is invalid, or foremoe cannot run with one of NeMo-RL's settings.
    """
    settings = Settings.of(config["foremoe"])
    # A dispatcher that is not set is the model's own, which is checked when attaching.
    options = {"moe_token_dispatcher_type": "alltoall"} | options_of(config)
    refusal = refusal_in(config, options.get)
    if refusal is not None:
        raise refusal.error(override)
    return settings


def options_of(config: Any) -> dict[str, Any]:
    """Returns the options of Megatron-Core in NeMo-RL's ``policy``."""
    megatron = config.get("megatron_cfg") or {}
    options, fp8 = {**megatron, **(megatron.get("model_overrides") or {})}, megatron.get("fp8_cfg") or {}
    return options | ({"fp8": fp8.get("fp8")} if fp8.get("enabled") else {})


def refusal_in(config: Any, get: Get) -> Refusal | None:
    """Returns a refusal for the first setting in NeMo-RL's ``policy`` that is not supported, or None.

    Args:
        get: Function that looks up the value of an option of `options_of`.
    """
    refusal = refusal_of(get, Parallel.of(get))
    if refusal is None and ((config.get("megatron_cfg") or {}).get("peft") or {}).get("enabled"):
        reason = "replicas of experts with adapters are not supported; train whole experts"
        refusal = Refusal(reason, {"peft.enabled": False})
    return refusal


def override(name: str, value: Any) -> str:
    """Formats Megatron's option `name` and its value in the syntax of NeMo-RL's command line."""
    return hydra("++policy.megatron_cfg.")(*(("fp8_cfg.enabled", False) if name == "fp8" else (name, value)))


def install(config: Any) -> Callable[[Any], Any]:
    """Makes the Megatron worker of this process follow plans. `config` is NeMo-RL's ``policy``.

    Returns:
        A function that the worker must call with its model as soon as the model is built.
    """
    settings = settings_of(config)
    if not (config.get("router_replay") or {}).get("enabled"):
        warn_once(
            _logger, "policy.foremoe has no effect: routing is not known before a pass; set policy.router_replay.enabled=true."
        )
        return lambda model: None
    from nemo_rl.models.megatron import train

    from foremoe.integrations.megatron.forward_backward import plan_calls_of

    return plan_calls_of(train, routing_of, settings, override)


def routing_of(call: dict[str, Any]) -> list[Array] | None:
    """Returns the routing that NeMo-RL will replay in a call, arranged as by NeMo-RL's own code.

    This function forms all micro-batches at once, whereas NeMo-RL forms one at a time.

    Returns:
        The experts, int16 [T, L, K] per micro-batch, with -1 for tokens whose routing is unknown. None for passes without replay.
    """
    if not call["forward_step_func"].keywords["use_router_replay"]:
        return None
    from nemo_rl.models.megatron.router_replay import build_router_replay_assignments

    from foremoe.integrations.megatron.forward_backward import on_host
    from foremoe.integrations.megatron.layout import predicting_routers

    model, batches = call["model"], list(itertools.islice(call["data_iterator"], call["num_microbatches"]))
    apart = predicting_routers(model, "router_replay")
    routing = []
    for batch in batches:
        pairs = build_router_replay_assignments(model, batch.routed_experts_cp_sharded)
        routing.append(on_host([topk_TK for replay, topk_TK in pairs if id(replay) not in apart]))
    call["data_iterator"] = (batches.pop(0) for _ in range(len(batches)))  # each is freed after it has run
    return routing


if __name__ == "__main__":
    register()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
