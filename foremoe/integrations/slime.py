"""foremoe inside slime, by two of slime's own arguments; nothing is forked::

    --custom-megatron-init-path foremoe.integrations.slime.install
    --custom-config-path settings.yaml                                # foremoe: {redundant: 1}

With ``--use-rollout-routing-replay`` log-probabilities and updates run by plans; with ``--use-routing-replay`` alone updates do.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from foremoe.base.arrays import Array
from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import Settings

_logger = logging.getLogger(__name__)


def install(args: Any) -> None:
    """Has the Megatron actor of this process run by plans; slime calls it with its arguments, before the model is built."""
    settings = Settings.of(getattr(args, "foremoe", None))
    if not args.use_routing_replay:
        warn_once(_logger, "foremoe does nothing, for no routing is known before a pass; add --use-rollout-routing-replay.")
        return
    from slime.backends.megatron_utils import model

    from foremoe.integrations.megatron.forward_backward import plan_calls_of

    plan_calls_of(model, routing_of, settings)


def routing_of(call: dict[str, Any]) -> list[Array] | None:
    """What slime will replay in a call: it has laid out the routing of all micro-batches, layer by layer, before the first.

    Returns:
        int16 [T, L, K] per micro-batch; None for passes that record, and for reference and teacher models.
    """
    stage = os.environ["ROUTING_REPLAY_STAGE"] if os.environ.get("ENABLE_ROUTING_REPLAY") == "1" else ""
    if stage not in ("replay_forward", "replay_backward"):
        return None
    from slime.utils.routing_replay import RoutingReplay

    from foremoe.integrations.megatron.forward_backward import on_host

    layers = RoutingReplay.all_routing_replays
    return [
        on_host([layer.top_indices_list[layer.forward_index + m] for layer in layers]) for m in range(call["num_microbatches"])
    ]
