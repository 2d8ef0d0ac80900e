"""Checks before a plan is run: that the engine can run it and that all ranks have the same plan."""

import hashlib

import numpy as np

from foremoe.base.errors import InputError, PlanError
from foremoe.distributed.group import Group
from foremoe.plan.plan import Plan


def refusal(plan: Plan, rank: int, num_ranks: int, num_buffers: int, *, debug: bool) -> str:
    """Returns the reason why a rank cannot run the plan, in one sentence, or an empty string if it can.

    Rank 0 checks the plan's laws for all ranks, unless the plan was checked before. This is enough because `require_agreement`
    ensures that all ranks have equal plans. With `debug`, every rank checks the laws.
    """
    if not plan.executable:
        return "the plan moves homes, so it can be scored but not run; plan with a solver that keeps homes."
    if num_ranks != plan.G:
        return f"the plan is for {plan.G} ranks and the group has {num_ranks}; plan for this group."
    if rank == 0 or debug:
        try:
            plan.check()
        except PlanError as error:
            return f"the plan breaks a law: {error}."
    needed = int(plan.transfers.buffer_C.max(initial=-1)) + 1
    if needed > num_buffers:
        lack = f"the plan uses {needed} slot buffers per rank and there are {num_buffers}"
        return f"{lack}; create more, or plan with fewer redundant slots or a smaller slot_depth."
    return ""


def require_agreement(group: Group, plan: Plan, refused: str, same_weights: bool) -> None:
    """Raises InputError on all ranks unless all ranks have the same plan and can run it. Collective.

    `refused` is the reason why this rank cannot run the plan, or an empty string.
    """
    answers = group.gather((refused, (fingerprint(plan), same_weights)))
    for g, (other, theirs) in enumerate(answers):
        if other:
            raise InputError(other if g == group.rank else f"rank {g}: {other}")
        if theirs != answers[0][1]:
            given = f"rank {g} was given another plan than rank 0, or another same_weights"
            raise InputError(f"{given} ({theirs[1]} and {answers[0][1][1]}); give all ranks the same.")


def fingerprint(plan: Plan) -> str:
    """Returns a short fingerprint of the parts of a plan that an engine reads. Plans with equal fingerprints run identically."""
    state, head = hashlib.blake2b(digest_size=16), plan.header
    passes = head.schedule
    state.update(repr((head.redundant, head.slot_depth, head.model, head.cluster.to_dict())).encode())
    state.update(repr((head.keeps_homes, passes.num_chunks, passes.reforward)).encode())
    arrays = [
        *(getattr(value, name) for value in (passes, plan.transfers) for name in value.array_fields()),
        plan.home_LE, plan.expert_MLGS, plan.quota_MLGS,
    ]  # fmt: skip
    for array in arrays:
        if array is None:
            state.update(b"none")
        else:
            state.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return state.hexdigest()
