"""foremoe inside slime, without a fork of it, through two of slime's own arguments::

    --custom-megatron-init-path foremoe.integrations.slime.install
    --custom-config-path settings.yaml                                # foremoe: {redundant: 1}

With ``--use-rollout-routing-replay``, the log-prob and update passes follow plans. With only ``--use-routing-replay``, only the
update passes follow plans.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from foremoe.base.arrays import Array
from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import Settings
from foremoe.integrations.supported import Parallel, refusal_of

_logger = logging.getLogger(__name__)


def install(args: Any) -> None:
    """Makes this process's Megatron actor follow plans. slime calls this function with its arguments before it builds the model.

    Raises:
        InputError: A setting is invalid, or foremoe cannot run with one of slime's arguments.
    """
    settings = Settings.of(getattr(args, "foremoe", None))
    if not args.use_routing_replay:
        warn_once(_logger, "foremoe has no effect: routing is not known before a pass; add --use-rollout-routing-replay.")
        return
    get = partial(getattr, args)
    refusal = refusal_of(get, Parallel.of(get))
    if refusal is not None:
        raise refusal.error(argument)
    from slime.backends.megatron_utils import model

    from foremoe.integrations.megatron.forward_backward import plan_calls_of

    attach_to, build = plan_calls_of(model, routing_of, settings, argument), model.setup_model_and_optimizer

    def build_and_attach(args: Any, role: str = "actor") -> Any:
        made = build(args, role)
        if role == "actor":
            attach_to(made[0])
        return made

    model.setup_model_and_optimizer = build_and_attach


# Options whose command-line argument has another name.
_ARGUMENTS = {"fp8": "--fp8-format", "fp4": "--fp4-format"}


def argument(name: str, value: Any) -> str:
    """Formats Megatron's option `name` and its value in the syntax of slime's command line."""
    shown = _ARGUMENTS.get(name, "--" + name.replace("_", "-"))
    if value is None or value is False:
        return f"no {shown}"
    return shown if isinstance(value, bool) else f"{shown} {value}"


def routing_of(call: dict[str, Any]) -> list[Array] | None:
    """Returns the routing that slime will replay in a call. slime prepares all micro-batches before the call.

    Returns:
        The experts, int16 [T, L, K] per micro-batch. None for passes that record routing and for reference and teacher models.
    """
    stage = os.environ["ROUTING_REPLAY_STAGE"] if os.environ.get("ENABLE_ROUTING_REPLAY") == "1" else ""
    if stage not in ("replay_forward", "replay_backward"):
        return None
    from slime.utils.routing_replay import RoutingReplay

    from foremoe.integrations.megatron.forward_backward import on_host
    from foremoe.integrations.megatron.layout import predicting_routers

    apart = predicting_routers(call["model"], "routing_replay")
    layers = [replay for replay in RoutingReplay.all_routing_replays if id(replay) not in apart]
    return [
        on_host([_read(layer.top_indices_list, layer.forward_index + m, stage) for layer in layers])
        for m in range(call["num_microbatches"])
    ]


class _Kept:
    """Replacement of a lazy entry that can be read only once, with its content on the host."""

    def __init__(self, topk_TK: Any) -> None:
        self._topk_TK, self._device, self._dtype = topk_TK.to("cpu"), topk_TK.device, topk_TK.dtype

    def materialize_for_routing_replay(self, _: str) -> Any:
        return self._topk_TK.to(device=self._device, dtype=self._dtype)


def _read(entries: list[Any], index: int, stage: str) -> Any:
    """Returns the routes of one layer and micro-batch. slime creates some of them on request and may then free them."""
    if not hasattr(entries[index], "materialize_for_routing_replay"):
        return entries[index]
    if not isinstance(entries[index], _Kept):
        entries[index] = _Kept(entries[index].materialize_for_routing_replay(stage.removeprefix("replay_")))
    return entries[index].materialize_for_routing_replay(stage)
