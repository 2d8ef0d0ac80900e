"""veRL's engine in arms, on one rank: a recompute and an update per step, with and without foremoe."""

import contextlib
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
from logged import logged


@dataclass
class Run:
    """What one rank did, step by step.

    Attributes:
        log_probs: of the recompute stage.   losses, grad_norms: of the update.   weights: name -> tensor, at the end.
        metrics: Metrics of foremoe, by step and stage; veRL's dictionary has both stages' after the update.
        reports: `MegatronSummary` by step and stage.
        native: pairs of this rank that veRL lets the router choose, by step and stage.
        warned: what foremoe warned of in the log.
        engine: name of the engine's class.
        routes: that R2 recorded, by step.
    """

    log_probs: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    grad_norms: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)
    metrics: list = field(default_factory=list)
    reports: list = field(default_factory=list)
    native: list = field(default_factory=list)
    warned: list = field(default_factory=list)
    routes: list = field(default_factory=list)
    engine: str = ""


def run(group, layout, mode, settings, num_steps, update=True, mixed=False, hints=None, times=1):
    """Steps of the engine on this rank.

    Args:
        settings: of foremoe; None: without it.
        update: False: recompute alone.
        mixed: of `EngineProgram`.
        hints: routes by rank and step, in place of those that rollout recorded.
        times: of `EngineProgram`.
    """
    torch.set_num_threads(1)
    from engine_program import EngineProgram, policy_loss

    program = EngineProgram(layout, mode, settings, mixed=mixed, times=times)
    found = Run(engine=type(program.engine).__name__)
    with contextlib.ExitStack() as stack:
        watched = Watched(program, found, stack) if settings is not None else None
        said = stack.enter_context(logged())
        for step in range(num_steps):
            hint = hints and hints[group.rank][step]
            output = program.engine.infer_batch(program.batch(step, hint), loss_function=None)
            found.log_probs.append(log_probs_of(output["model_output"]["log_probs"]) if output else None)
            if watched:
                watched.note()
            if not update:
                continue
            routes = recorded_routes(program, output) if mode == "R2" else hint
            found.routes.append(routes if mode == "R2" else None)
            output = program.engine.train_batch(program.batch(step, routes), policy_loss)
            found.losses.append(output["loss"] if output else None)
            found.grad_norms.append(output["metrics"].get("grad_norm") if output else None)
            if watched:
                watched.note()
                found.metrics += [metrics_of(output, stage) for stage in ("recompute", "update")]
    found.warned = [record.getMessage() for record in said]
    found.weights = program.weights()
    if settings is not None:
        program.engine._foremoe.close()
    return found


def log_probs_of(nested):
    """Of all tokens but the last of each sequence, see `policy_loss`."""
    return torch.cat([sequence[:-1] for sequence in nested.unbind()]).clone()


def metrics_of(output, stage):
    """foremoe's of a stage, by name: one number each."""
    metrics = output.get("metrics", {}) if output else {}
    return {name: value.aggregate() for name, value in metrics.items() if name.startswith(f"foremoe/{stage}/")}


def recorded_routes(program, output):
    """R2's routes, as the trainer hands them to every pipeline rank."""
    pipeline = program.ps.get_pipeline_model_parallel_group()
    holder = [output["model_output"]["routed_experts"] if output else None]
    dist.broadcast_object_list(holder, src=dist.get_process_group_ranks(pipeline)[-1], group=pipeline)
    return holder[0]


class Watched:
    """Takes down what foremoe did in every stage, until `stack` is left: it holds the model, and with it process groups."""

    def __init__(self, program, found, stack):
        from foremoe.integrations.verl import session

        self._attached, self._found = program.engine._foremoe.attached, found
        self._routing = None
        read = session.routing_of

        def kept(*args):
            self._routing = read(*args)
            return self._routing

        stack.enter_context(patch.object(session, "routing_of", kept))

    def note(self):
        native = None if self._routing is None else [int((topk_TLK < 0).sum()) for topk_TLK in self._routing]
        self._found.native.append(native)
        self._found.reports.append(self._attached.report if native is not None else None)
        self._routing = None
