"""Weights and gradients that leave memory between stages and come back elsewhere: a plan sees what is there now, or says so."""

import contextlib
import functools

import cpu
import numpy as np
import program_arms as arms
import pytest
import torch
from layouts import Case
from program import Layout, Program
from test_megatron_faults import by_host

from foremoe.base.errors import InputError

NUM_STAGES = 8
CASES = (
    Case(2, Layout()),
    Case(2, Layout(bf16=True, grouped=True)),
    Case(4, Layout(pp=2, num_layers=4, recompute="full", overlap_param=True)),
    Case(2, Layout(distributed=False)),
    Case(2, Layout(bf16=True, engine="Fused")),
    Case(2, Layout(bf16=True, engine="Quantized")),
)


class Offload:
    """Frees a program's weights and gradients, as trainers do while rollout has the memory, and brings them back elsewhere."""

    def __init__(self, program):
        self._buffers = [b for chunk in program.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._params = [] if program.layout.distributed else [p for module in program.bare for p in module.parameters()]
        self._kept, self._in_the_way, self.away = [], [], False

    def away_with_all(self):
        """By the storage where weights are views of a buffer, else parameter by parameter."""
        for buffer in self._buffers:
            for name in ("param_data", "grad_data"):
                whole = getattr(buffer, name)
                if whole is not None and whole.untyped_storage().nbytes():
                    self._kept.append((buffer, name, whole.clone(), whole.untyped_storage().nbytes()))
                    whole.untyped_storage().resize_(0)
        for param in self._params:
            self._kept.append((param, "data", param.data, 0))
            param.data = torch.empty(0, dtype=param.dtype)
        self.away = True

    def back(self, grads):
        """Gradients stay away unless they are wanted, and come back as zeros."""
        for owner, name, content, num_bytes in self._kept:
            self._in_the_way.append(torch.full_like(content, float("nan")))  # takes the place that was freed
            if isinstance(owner, torch.nn.Parameter):
                owner.data = content.clone()
                content.fill_(float("nan"))  # who still reads it shall notice
            elif grads or name == "param_data":
                whole = getattr(owner, name)
                whole.untyped_storage().resize_(num_bytes)
                whole.copy_(content if name == "param_data" else torch.zeros_like(content))
        self._kept = [kept for kept in self._kept if kept[1] == "grad_data" and not grads]
        self.away = False


def drill(_group, case, options_of):
    """Losses, and main gradients of updates, of alternating stages; before each, weights were away and some loaded anew.

    Args:
        options_of: gives options of `attach`; None without foremoe.
    """
    losses, grads, moved = [], [], 0
    with cpu.steady_rows(), contextlib.ExitStack() as stack:
        program = Program(case.layout)
        offload = Offload(program)
        offload.away_with_all()
        moe = stack.enter_context(arms.attached(program, case, **options_of())) if options_of else None
        rng = np.random.default_rng(1)
        for n in range(NUM_STAGES):
            trains = n % 2 == 1
            offload.back(grads=trains)
            if n % 3 == 1:  # weights are loaded in place
                for module in program.bare:
                    for name, param in module.named_parameters():
                        param.data.mul_(1.25 if "experts" in name else 1.0)
            topk_MTLK, inside = program.routing(n), contextlib.nullcontext()
            if moe:
                home_LE = [rng.permutation(moe.num_experts) if n % 4 < 2 else np.arange(moe.num_experts) for _ in moe.moe_layers]
                home_LE = np.stack(home_LE).astype(np.int32)
                moved += int((home_LE != np.arange(moe.num_experts)).sum())
                work, kind = [topk_TLK.numpy() for topk_TLK in topk_MTLK], "update" if trains else "recompute"
                inside = moe.stage(work, kind, home_LE=home_LE)
            with inside, torch.set_grad_enabled(trains):
                losses.append(program.forward_backward(n, topk_MTLK, forward_only=not trains))
            assert moe is None or (moe.metrics()["replicas"] > 0 and moe.metrics()["drift"] == 0)
            if trains:
                grads.append(program.main_grads())
            offload.away_with_all()
    return losses, grads, moved


@pytest.fixture(scope="module")
def alone(pool):
    """What a case does without foremoe; once for all that is compared with it."""
    return functools.cache(lambda case: pool.run(drill, case, None, num_ranks=case.num_ranks))


@pytest.mark.parametrize("options_of", [dict, by_host])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_eight_stages_with_weights_away_in_between(pool, alone, case, options_of):
    plain = alone(case)
    planned = pool.run(drill, case, options_of, num_ranks=case.num_ranks)
    bound = 2e-2 if case.layout.bf16 else 1e-5  # the order of an expert's tokens, as in test_megatron_homes
    for (losses, grads, _), (losses_b, grads_b, moved) in zip(plain, planned, strict=True):
        assert moved > 0 and len(grads) == NUM_STAGES // 2
        for one, other in zip(losses, losses_b, strict=True):
            assert other == pytest.approx(one, rel=1e-6)
        for step, step_b in zip(grads, grads_b, strict=True):
            for name, grad in step.items():
                assert float((step_b[name] - grad).abs().max()) <= bound * float(grad.abs().max()), name


def still_away(_group, case, what):
    """What a stage says to weights or gradients that are away, and whether the next stage runs."""
    program = Program(case.layout)
    offload, topk_MTLK = Offload(program), program.routing(0)
    work = [topk_TLK.numpy() for topk_TLK in topk_MTLK]
    with arms.attached(program, case, debug=True) as moe:
        offload.away_with_all()
        if what == "gradients":
            offload.back(grads=False)
        with pytest.raises(InputError) as caught, moe.stage(work):
            pass
        offload.back(grads=True)
        with moe.stage(work):
            program.forward_backward(0, topk_MTLK)
        offload.away_with_all()  # debug mode has left nothing that would keep them
        return str(caught.value)


@pytest.mark.parametrize(("what", "said"), [("weights", "weights are offloaded; load"), ("gradients", "is offloaded; load it")])
def test_a_stage_without_them_is_refused(pool, what, said):
    for answer in pool.run(still_away, CASES[0], what, num_ranks=2):
        assert said in answer
