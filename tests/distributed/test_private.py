"""Exchanges of tokens on a GPU, pretended: the stream waits for each over NCCL, and the host over gloo."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from foremoe.distributed.group import TorchGroup


class OnGpu(torch.Tensor):
    """Claims to be on a GPU."""

    is_cuda = True


def rows(num: int) -> torch.Tensor:
    return torch.zeros(num, 2).as_subclass(OnGpu)


@pytest.mark.parametrize("on_gloo", [False, True])
def test_tokens_over_nccl_are_waited_for(on_gloo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own call, which makes the stream wait; over gloo by a limit of ours."""
    waited: list[bool] = []
    work = SimpleNamespace(wait=lambda *_: waited.append(True), is_completed=lambda: True)

    def exchange(*_: object, async_op: bool = False, **__: object) -> object:
        if not async_op:
            waited.append(True)
        return work

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    group = object.__new__(TorchGroup)
    group.rank, group.size, group.timeout_s, group.process_group, group._on_gloo = 0, 2, 5.0, None, on_gloo
    group.all_to_all(rows(3), rows(3), [1, 2], [2, 1])
    assert waited == [True]
