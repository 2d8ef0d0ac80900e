"""ExpertBank: weights that do not depend on the ranks, memory that does not move, gradients that an optimizer can use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foremoe.base.errors import InputError
from foremoe.distributed.group import Group, ThreadGroup
from foremoe.runtime import ExpertBank, Runtime
from foremoe.testing.ranks import run_threads

# Letters: L layers, T tokens, H hidden size, F ffn size, E experts.

L, H, F = 2, 6, 4
HOME = np.tile(np.arange(2), (L, 1))
PERMUTED = np.stack([np.random.default_rng(layer).permutation(4) for layer in range(L)])


def make_bank(home_LE: Any, rank: int, num_ranks: int, dtype: torch.dtype = torch.float64, **options: Any) -> ExpertBank:
    sizes = {"num_layers": L, "num_experts": home_LE.shape[1], "hidden_size": H, "ffn_size": F}
    return ExpertBank(**sizes, rank=rank, num_ranks=num_ranks, home_LE=home_LE, dtype=dtype, **options)


def train(bank: ExpertBank, runtime: Runtime, scale: float) -> None:
    runtime.begin_home()
    x_TH = torch.ones(3, H, dtype=bank.dtype)
    (scale * runtime.moe(0, x_TH, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)).double().sum()).backward()
    runtime.end()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_add_up_over_stages_until_they_are_dropped(dtype: torch.dtype) -> None:
    bank = make_bank(HOME, 0, 1, dtype=dtype)
    runtime, down = Runtime(bank, group=ThreadGroup.of(1)[0]), bank.get_parameter("down_0")
    train(bank, runtime, 1.0)
    once = down.grad.clone()
    assert once.dtype == dtype and once[0].any() and not once[1].any()
    train(bank, runtime, 1.0)
    assert torch.allclose(down.grad, 2 * once, rtol=0.02)
    torch.optim.SGD(bank.parameters(), lr=0.1).zero_grad()
    train(bank, runtime, 1.0)
    assert torch.equal(down.grad, once)
    bank.zero_grad(set_to_none=False)
    assert not down.grad.any()
    train(bank, runtime, 1.0)
    assert torch.equal(down.grad, once)


def test_weights_do_not_depend_on_the_ranks_and_go_out_and_in() -> None:
    def gathered(group: Group, seed: int) -> dict[str, torch.Tensor]:
        bank = make_bank(PERMUTED, group.rank, group.size, seed=seed)
        everything = bank.gather(group)
        other = make_bank(PERMUTED, group.rank, group.size, seed=seed + 1)
        other.load(everything)
        for layer in range(L):
            for e in bank.expert_LB[layer].tolist():
                assert all(torch.equal(a, b) for a, b in zip(bank.home(layer, e), other.home(layer, e), strict=True))
        return everything

    one = run_threads(gathered, 1, 5)[0]
    for everything in [*run_threads(gathered, 2, 5), *run_threads(gathered, 4, 5)]:
        assert all(torch.equal(everything[name], one[name]) for name in one)
    assert not torch.equal(run_threads(gathered, 1, 6)[0]["down"], one["down"])
    assert len({tuple(x.flatten().tolist()) for x in one["down"].flatten(0, 1)}) == L * 4


def test_buffers_are_flat_views_that_do_not_move() -> None:
    bank = make_bank(PERMUTED, 1, 2, num_buffers=3, dtype=torch.bfloat16)
    for layer in range(L):
        for e in bank.expert_LB[layer].tolist():
            for i, name in enumerate(bank.shapes):
                weight = bank.get_parameter(f"{name}_{layer}")[bank.home_LE[layer, e] % 2]
                assert bank.home(layer, e)[i].data_ptr() == weight.data_ptr() and bank.home(layer, e)[i].is_contiguous()
                assert bank.main_grad(layer, e)[i].dtype == torch.float32
        with pytest.raises(InputError, match="at home on rank 0"):
            bank.home(layer, int((bank.home_LE[layer] // 2 == 0).argmax()))
    assert [[x.shape for x in bank.slot(b)] for b in range(3)] == [[(2 * H * F,), (H * F,)]] * 3
    assert [x.dtype for x in bank.slot_grad(2)] == [torch.float32] * 2
    assert bank.to(torch.bfloat16) is bank
    with pytest.raises(InputError, match="cannot move"):
        bank.to(torch.float32)


def test_a_write_to_the_weights_shows_in_the_version_of_their_views() -> None:
    bank = make_bank(HOME, 0, 1)
    before = bank.home(0, 1)[0]._version
    train(bank, Runtime(bank, group=ThreadGroup.of(1)[0]), 1.0)
    assert bank.home(0, 1)[0]._version == before
    torch.optim.SGD(bank.parameters(), lr=0.1).step()
    assert bank.home(0, 1)[0]._version > before


def test_wrong_arguments_end_in_one_sentence() -> None:
    for wrong in ({"num_experts": 3, "num_ranks": 2}, {"num_layers": 0}, {"home_LE": [[0, 0]] * L}, {"rank": 1}):
        with pytest.raises(InputError):
            ExpertBank(**({"num_layers": L, "num_experts": 2, "hidden_size": H, "ffn_size": F} | wrong))
    with pytest.raises(InputError, match="must have shape"):
        make_bank(HOME, 0, 1).load({"gate_up": torch.zeros(1)})
