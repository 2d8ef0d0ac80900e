"""`forward_backward`: Megatron's forward-backward function with plans for calls whose routing is known in advance."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.integrations.compiling import compile_in_turn
from foremoe.integrations.megatron.attach import Attached, attach_as
from foremoe.integrations.settings import Settings
from foremoe.integrations.supported import Write

RoutingOf = Callable[[dict[str, Any]], Sequence[Any] | None]

_logger = logging.getLogger(__name__)


def forward_backward(
    moe: Attached | Callable[[Any], Attached],
    routing_of: RoutingOf,
    function: Callable[..., Any] | None = None,
    *,
    replay: bool = True,
) -> Callable[..., Any]:
    """Wraps Megatron's forward-backward function with a plan for every call whose routing is known::

        forward_backward_func = forward_backward(moe, routing_of)  # was: get_forward_backward_func()
        losses = forward_backward_func(forward_step_func=forward_step, data_iterator=batches, ..., forward_only=False)

    A call with ``forward_only`` is a recompute stage, and any other call is an update. If an EP group raises an `InputError`
    because it cannot plan a stage, the stage runs at home on all ranks of the job, and the log contains the reason.

    Args:
        moe: Result of `attach`, or a function that attaches to the call's `model` when it is first needed.
        routing_of: Function that receives a call's arguments by name and returns the argument `work` of `Attached.plan`. This is
            usually the experts of this rank's own tokens, one integer array [T, L, K] per micro-batch. For a call without a plan,
            the function must return None on all ranks. If it reads from an iterator, it must put another iterator in its place.
        function: Function to wrap. Defaults to the result of Megatron's ``get_forward_backward_func()`` at the time of the call.
        replay: Whether routers follow the routing. If False, the routing is a hint.
    """

    def run(**call: Any) -> Any:
        nonlocal moe
        try:
            routing = routing_of(call)
        except BaseException as error:
            if isinstance(moe, Attached):  # otherwise the other ranks, which wait in planning, are not notified
                moe.job.report(f"{type(error).__name__}: {error}")
            raise
        own = function or get_forward_backward_func()
        if routing is None:
            return own(**call)
        if not isinstance(moe, Attached):
            moe = moe(call["model"])
        stage = "recompute" if call.get("forward_only") else "update"
        with planned_or_home(moe, routing, stage, replay=replay):
            found = own(**call)
        if torch.distributed.get_rank() == 0:
            _logger.info("%s: %s", stage, moe.metrics())
        return found

    return run


@contextlib.contextmanager
def planned_or_home(moe: Attached, routing: Sequence[Any], stage: str, *, replay: bool = True) -> Iterator[bool]:
    """Runs a stage with a plan if all EP groups can plan it. If not, the stage runs at home without metrics, and rank 0 logs why.

    Collective over all ranks of the job. On a rank without MoE layers, `routing` may be empty.

    Yields:
        True if this rank has a plan.
    """
    with contextlib.ExitStack() as stack:
        planned = False
        try:
            stack.enter_context(moe.stage(routing, stage, replay=replay))
            planned = moe.active
        except InputError as error:  # raised on all ranks of the job
            moe.report = None
            if moe.active and moe.group.rank == 0:
                _logger.warning("the %s stage runs at home, without a plan: %s", stage, error)
        yield planned


def plan_calls_of(
    module: Any, routing_of: RoutingOf, settings: Settings, write: Write | None = None
) -> Callable[[Any], Attached]:
    """Replaces `get_forward_backward_func` of a trainer's module.

    Args:
        write: Function that formats a Megatron option for error messages, in the syntax of the trainer's command line.

    Returns:
        A function that attaches to a model once. A trainer's adapter calls it when the model is built, so that an unsupported
        layout ends the job at its start. If it is not called, the first call with known routing attaches.
    """
    made: list[Attached] = []

    def attach_to(model: Any) -> Attached:
        if not made:
            model_copy = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            compile_in_turn(model_copy, group_timeout_s=settings.group_timeout_s, compile_limit_s=settings.compile_limit_s)
            made.append(attach_as(model, lambda: settings, write))
        return made[0]

    def wanted(call: dict[str, Any]) -> Sequence[Any] | None:
        return routing_of(call) if (settings.recompute if call.get("forward_only") else settings.update) else None

    run = forward_backward(attach_to, wanted)
    module.get_forward_backward_func = lambda: run
    return attach_to


def on_host(layers: Sequence[torch.Tensor]) -> Array:
    """Returns the experts of one micro-batch, int16 [T, L, K], from an integer tensor [T, K] per MoE layer of this rank."""
    if not layers:  # a pipeline rank without MoE layers
        return np.empty((0, 0, 0), np.int16)
    # Converted first, so that a single small copy is enough.
    return torch.stack([topk_TK.to(torch.int16) for topk_TK in layers], dim=1).cpu().numpy()
