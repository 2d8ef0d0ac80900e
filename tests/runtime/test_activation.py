"""SwiGLU's activation by Triton's kernels, run by its interpreter, against float64; where triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foremoe.runtime import activation

# Letters: Y pairs, F ffn size, D = 2F columns of gate and up.

NEEDS = "triton is not installed; pip install triton (no GPU is needed)"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def reference(pre_YD: torch.Tensor, grad_YF: torch.Tensor) -> list[torch.Tensor]:
    """The activation and the gradient of what it is of, in float64."""
    wide_YD = pre_YD.double().requires_grad_()
    gate_YF, up_YF = wide_YD.chunk(2, dim=1)
    act_YF = torch.nn.functional.silu(gate_YF) * up_YF
    return [act_YF.detach(), *torch.autograd.grad(act_YF, wide_YD, grad_YF.double())]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NEEDS)
def test_kernels_in_triton_s_interpreter() -> None:
    """In a process of its own: whether kernels are interpreted is settled when triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", f"{Path(__file__).resolve()}::test_kernels"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif(not INTERPRETED, reason="the test above runs it with TRITON_INTERPRET=1")
@pytest.mark.parametrize(("dtype", "ulp"), [(torch.float16, 0.51), (torch.bfloat16, 1.01)])
@pytest.mark.parametrize(("Y", "F"), [(5, 16), (3, 1024), (2, 1500), (0, 16), (4, 0)])
def test_kernels(monkeypatch: pytest.MonkeyPatch, Y: int, F: int, dtype: torch.dtype, ulp: float) -> None:
    """Rounded once: half a unit in the last place, but for float32's own rounding; the interpreter cuts bfloat16 off."""
    monkeypatch.setattr(activation, "fuses", lambda pre_YD: True)
    generator = torch.Generator().manual_seed(Y + F)
    pre_YD, grad_YF = (3 * torch.randn(Y, n * F, generator=generator).to(dtype) for n in (2, 1))
    found = [activation.swiglu(pre_YD), *activation.swiglu_backward(pre_YD, grad_YF)]
    act_YF, grad_pre_YD = reference(pre_YD, grad_YF)
    for ours, exact in zip(found, (act_YF, act_YF, grad_pre_YD), strict=True):
        assert ours.dtype == dtype and ours.shape == exact.shape
        assert ((ours.double() - exact).abs() <= ulp * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


def test_torch_s_own_is_nearest_where_nothing_is_fused() -> None:
    pre_YD, grad_YF = torch.randn(7, 24), torch.randn(7, 12)
    found = [activation.swiglu(pre_YD), *activation.swiglu_backward(pre_YD, grad_YF)]
    act_YF, grad_pre_YD = reference(pre_YD, grad_YF)
    for ours, exact in zip(found, (act_YF, act_YF, grad_pre_YD), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
