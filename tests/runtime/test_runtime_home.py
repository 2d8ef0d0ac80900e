"""Without a plan the runtime on any number of ranks computes what a dense model on one rank computes."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from runtime_util import dense_moe, draw_topk, relative
from torch.utils.checkpoint import checkpoint

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group, ThreadGroup
from foremoe.runtime import ExpertBank, Runtime, StageSummary
from foremoe.testing.ranks import get_pool, run_threads

# Letters: L layers, T tokens, K top-k, H hidden size, E experts, G ranks.

L, H, F = 2, 6, 4
TOLERANCE = 1e-12

Data = dict[str, Any]
# How a layer is run: kept activations, or checkpointed in either way.
MODES = {"kept": None, "reentrant": True, "non-reentrant": False}


def draw(num_ranks: int, num_experts: int, num_topk: int, tokens_MG: list[list[int]], seed: int) -> Data:
    """Tokens, routing and homes of a stage; the gating weights come from logits by softmax, so that they have a gradient too."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    double = {"generator": generator, "dtype": torch.float64}
    return {
        "home_LE": np.stack([rng.permutation(num_experts) for _ in range(L)]),
        "E": num_experts,
        "x_MG": [[torch.randn(T, H, **double) for T in tokens_G] for tokens_G in tokens_MG],
        "logit_MGL": [[[torch.randn(T, num_topk, **double) for _ in range(L)] for T in tokens_G] for tokens_G in tokens_MG],
        "topk_MGL": [
            [[draw_topk(T, num_topk, num_experts, generator) for _ in range(L)] for T in tokens_G] for tokens_G in tokens_MG
        ],
        "grad_MG": [[torch.randn(T, H, **double) for T in tokens_G] for tokens_G in tokens_MG],
    }


def make_bank(data: Data, rank: int, num_ranks: int, **options: Any) -> ExpertBank:
    sizes = {"num_layers": L, "num_experts": data["E"], "hidden_size": H, "ffn_size": F}
    options = {"dtype": torch.float64, "seed": 5, "home_LE": data["home_LE"]} | options
    return ExpertBank(**sizes, rank=rank, num_ranks=num_ranks, **options)


def block(runtime: Runtime, layer: int, topk_TK: torch.Tensor, y_TH: torch.Tensor, logit_TK: torch.Tensor) -> torch.Tensor:
    return y_TH + runtime.moe(layer, y_TH, topk_TK, logit_TK.softmax(1))


def run(group: Group, data: Data, mode: str, x_needs_grad: bool = True) -> dict[str, Any]:
    bank = make_bank(data, group.rank, group.size)
    result: dict[str, Any] = {"y": [], "x": [], "logit": []}
    with Runtime(bank, group=group) as runtime:
        runtime.begin_home()
        for x_G, logit_GL, topk_GL, grad_G in zip(*(data[k] for k in ("x_MG", "logit_MGL", "topk_MGL", "grad_MG")), strict=True):
            x_TH = x_G[group.rank].clone().requires_grad_(x_needs_grad)
            logits = [logit.clone().requires_grad_() for logit in logit_GL[group.rank]]
            y_TH = x_TH
            for layer in range(L):
                step, again = partial(block, runtime, layer, topk_GL[group.rank][layer]), MODES[mode]
                y_TH = step(y_TH, logits[layer]) if again is None else checkpoint(step, y_TH, logits[layer], use_reentrant=again)
            y_TH.backward(grad_G[group.rank])
            result["y"].append(y_TH.detach())
            result["x"].append(x_TH.grad)
            result["logit"].append([logit.grad for logit in logits])
        result["report"] = runtime.end()
    for name, param in bank.named_parameters():
        assert param.grad is not None and param.grad.data_ptr() == bank._main[name].data_ptr()
    result["grads"] = bank.gather(group, gradients=True)
    return result


def run_dense(data: Data) -> dict[str, Any]:
    """The same on one rank, rank by rank and expert by expert."""
    bank = make_bank(data, 0, 1)
    weights = {name: x.requires_grad_() for name, x in bank.gather(ThreadGroup.of(1)[0]).items()}
    result: dict[str, Any] = {"y": [], "x": [], "logit": []}
    for x_G, logit_GL, topk_GL, grad_G in zip(*(data[k] for k in ("x_MG", "logit_MGL", "topk_MGL", "grad_MG")), strict=True):
        for kind in ("y", "x", "logit"):
            result[kind].append([])
        for x, logits, topk_L, grad in zip(x_G, logit_GL, topk_GL, grad_G, strict=True):
            x_TH, logits = x.clone().requires_grad_(), [logit.clone().requires_grad_() for logit in logits]
            y_TH = x_TH
            for layer in range(L):
                experts = {name: w[layer] for name, w in weights.items()}
                y_TH = y_TH + dense_moe(y_TH, topk_L[layer], logits[layer].softmax(1), experts)
            y_TH.backward(grad)
            result["y"][-1].append(y_TH.detach())
            result["x"][-1].append(x_TH.grad)
            result["logit"][-1].append([logit.grad for logit in logits])
    result["grads"] = {name: w.grad if w.grad is not None else torch.zeros_like(w) for name, w in weights.items()}
    return result


def worst(results: list[dict[str, Any]], dense: dict[str, Any]) -> float:
    found = [0.0]
    for g, result in enumerate(results):
        for m in range(len(dense["y"])):
            found.append(relative(result["y"][m], dense["y"][m][g]))
            found.append(0.0 if result["x"][m] is None else relative(result["x"][m], dense["x"][m][g]))
            found += [relative(a, b) for a, b in zip(result["logit"][m], dense["logit"][m][g], strict=True)]
        found += [relative(result["grads"][name], dense["grads"][name]) for name in dense["grads"]]
    return max(found)


@pytest.mark.parametrize("mode", MODES)
@given(st.data())
@examples(12)
def test_equals_the_dense_model(mode: str, drawn: st.DataObject) -> None:
    G, K = drawn.draw(st.integers(1, 4)), drawn.draw(st.integers(1, 2))
    E = G * drawn.draw(st.integers(1 if G > 1 else 2, 3))
    M = drawn.draw(st.integers(1, 2))
    tokens_MG = [drawn.draw(st.lists(st.sampled_from([0, 1, 9]), min_size=G, max_size=G)) for _ in range(M)]
    data = draw(G, E, K, tokens_MG, drawn.draw(st.integers(0, 2**32 - 1)))
    assert worst(run_threads(run, G, data, mode), run_dense(data)) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_on_processes(mode: str) -> None:
    data = draw(2, 4, 2, [[5, 7], [0, 3]], 0)
    assert worst(get_pool(2).run(run, data, mode, num_ranks=2), run_dense(data)) < TOLERANCE


def test_tokens_that_need_no_gradient_still_train_the_experts() -> None:
    data = draw(2, 4, 2, [[5, 7]], 0)
    assert worst(run_threads(run, 2, data, "kept", False), run_dense(data)) < TOLERANCE


def test_every_pair_is_counted_where_it_was_served() -> None:
    data = draw(2, 4, 2, [[5, 7], [0, 3]], 0)
    reports: list[StageSummary] = [r["report"] for r in run_threads(run, 2, data, "reentrant")]
    for m, topk_GL in enumerate(data["topk_MGL"]):
        for layer in range(L):
            load_E = sum(torch.bincount(topk_L[layer].view(-1), minlength=4) for topk_L in topk_GL).numpy()
            for rank in range(2):
                mine_E = data["home_LE"][layer] // 2 == rank
                served_S = np.zeros(2, int)
                served_S[data["home_LE"][layer][mine_E] % 2] = load_E[mine_E]
                assert reports[rank].served_MLS[m, layer].tolist() == served_S.tolist()
    assert not any(r.drift_ML.any() or r.fell_back or r.timeline for r in reports)
    assert all(r.forward_cpu_s > 0 and r.backward_cpu_s > 0 for r in reports)
    assert reports[0].to_dict()["served"] + reports[1].to_dict()["served"] == 2 * 2 * 15


def test_forward_alone_sets_no_gradient() -> None:
    bank = make_bank(draw(1, 2, 1, [[1]], 0), 0, 1, home_LE=None)
    runtime = Runtime(bank, group=ThreadGroup.of(1)[0])
    runtime.begin_home()
    with torch.no_grad():
        y_TH = runtime.moe(0, torch.ones(3, H, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.uint8), torch.ones(3, 1))
    report = runtime.end()
    assert not y_TH.requires_grad and report.served_MLS[:, 0].tolist() == [[3, 0]] and report.backward_cpu_s == 0.0
    assert all(param.grad is None for param in bank.parameters())


def test_autocast_leaves_the_experts_alone() -> None:
    bank = make_bank(draw(1, 2, 1, [[1]], 0), 0, 1, home_LE=None, dtype=torch.float32)
    runtime = Runtime(bank, group=ThreadGroup.of(1)[0])
    runtime.begin_home()
    x_TH, topk_TK, weight_TK = torch.randn(3, H), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    plain = runtime.moe(0, x_TH, topk_TK, weight_TK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = runtime.moe(0, x_TH, topk_TK, weight_TK)
    assert torch.equal(plain, cast)
    cast.sum().backward()


def test_wrong_arguments_end_in_one_sentence() -> None:
    data = draw(1, 2, 1, [[1]], 0)
    bank, group = make_bank(data, 0, 1, home_LE=None), ThreadGroup.of(1)[0]
    runtime = Runtime(bank, group=group)
    x_TH, topk_TK, weight_TK = torch.ones(3, H, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(InputError, match="no stage is running"):
        runtime.moe(0, x_TH, topk_TK, weight_TK)
    with pytest.raises(InputError, match="no stage is running"):
        runtime.end()
    runtime.begin_home()
    with pytest.raises(InputError, match="call end"):
        runtime.begin_home()
    with pytest.raises(InputError, match="layer 2 does not exist"):
        runtime.moe(2, x_TH, topk_TK, weight_TK)
    with pytest.raises(InputError, match="cast x"):
        runtime.moe(0, x_TH.float(), topk_TK, weight_TK)
    with pytest.raises(InputError, match=r"\[T, H\]"):
        runtime.moe(0, x_TH, topk_TK[:2], weight_TK)
    for dtype in (torch.float32, torch.bool, torch.bfloat16):
        with pytest.raises(InputError, match="topk must hold the experts of each token as whole numbers"):
            runtime.moe(0, x_TH, topk_TK.to(dtype), weight_TK)
    with pytest.raises(InputError, match="experts 0 to 2"):
        runtime.moe(0, x_TH, topk_TK + torch.tensor([[0], [1], [2]]), weight_TK)
    runtime.close()
    runtime.close()
    with pytest.raises(InputError, match="was closed"):
        runtime.begin_home()
    with pytest.raises(InputError, match="rank 0 of 1"):
        Runtime(bank, group=ThreadGroup.of(2)[1])


def test_after_an_exception_in_a_stage_nothing_is_left_and_the_other_ranks_end() -> None:
    data = draw(2, 4, 1, [[3, 3]], 0)
    alive: list[weakref.ref[Any]] = []

    def broken(group: Group) -> None:
        bank = make_bank(data, group.rank, group.size)
        with Runtime(bank, group=group) as runtime:
            alive.extend([weakref.ref(runtime), weakref.ref(bank)])
            runtime.begin_home()
            x_TH = torch.ones(3, H, dtype=torch.float64, requires_grad=True)
            y_TH = runtime.moe(0, x_TH, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
            if group.rank == 0:
                raise ArithmeticError("the loss is not finite")
            y_TH.sum().backward()

    errors = run_threads(broken, 2, timeout_s=20.0, errors=True)
    assert isinstance(errors[0], ArithmeticError)
    assert isinstance(errors[1], TransferError) and "rank 0: ArithmeticError: the loss is not finite" in str(errors[1])
    del errors
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
    assert worst(run_threads(run, 2, data, "kept"), run_dense(data)) < TOLERANCE
