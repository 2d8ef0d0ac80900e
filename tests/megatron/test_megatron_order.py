"""The order of exchanges, replicas and copies in Megatron's layers."""

import re
from contextlib import ExitStack
from unittest.mock import patch

import cpu
import program_arms as arms
import pytest
import torch
from layouts import Case
from program import Layout, Program

from foremoe.integrations.megatron.experts import ExpertKind
from foremoe.transfer.collective import Collective
from foremoe.transfer.streams import Landing

# e: exchange, l: wait for weights, p: replicas' products, w, g: weights and gradients leave. Dispatch exchanges tokens and
# probabilities; base slots and ranks without pairs for replicas wait for no weights.
FORWARD, BACKWARD = "ee[lp]*e", "e[lp]+ee"


class Notes:
    """Notes what is called; of gradients and weights as they start."""

    def __init__(self):
        self.seen, self.num_copies = "", 0

    def noting(self, owner, name, say):
        function = getattr(owner, name)

        def noted(*args, **options):
            self.seen += say(*args)
            return function(*args, **options)

        return patch.object(owner, name, noted)

    def all(self):
        stack = ExitStack()
        stack.enter_context(self.noting(torch.distributed, "all_to_all_single", lambda _, x, *rest: "e" * x.is_floating_point()))
        stack.enter_context(self.noting(Landing, "wait", lambda _: "l"))
        stack.enter_context(self.noting(ExpertKind, "compute", lambda *_: "p"))
        stack.enter_context(self.noting(Collective, "start", self._starts))
        return stack

    def _starts(self, backend, copies):
        return "".join("w" if copy.key < self.num_copies else "g" for copy in copies)


def stages(group, case):
    """What was noted in two stages: the first one counts and compares, the second goes by known routes."""
    program, notes, found = Program(case.layout), Notes(), []
    topk_MTLK = program.routing(0)
    with cpu.steady_rows(), arms.attached(program, case, prefetch=0) as moe:
        work = moe.plan([topk_TLK.numpy() for topk_TLK in topk_MTLK])
        notes.num_copies = len(work.plan.transfers)
        for _ in range(2):
            program.zero()
            with notes.all(), moe.stage(work):
                program.forward_backward(0, topk_MTLK)
            found.append(notes.seen)
            notes.seen = ""
    return found


@pytest.mark.parametrize("recompute", [None, "full"])
def test_copies_leave_behind_the_last_exchange_and_weights_are_waited_for_behind_the_first(pool, recompute):
    found = [stage for seen in pool.run(stages, Case(2, Layout(recompute=recompute)), num_ranks=2) for stage in seen]
    for stage in found:
        assert re.fullmatch(f"w*(({FORWARD}|{BACKWARD})g*w*)*", stage), stage
    assert all(part in "".join(found) for part in ("lp", "ew", "eg")), found
