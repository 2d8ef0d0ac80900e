"""Megatron-LM's own programs and the layers of its unit tests with foremoe attached, where FOREMOE_MEGATRON_LM names a checkout.

What compares the layers is tried on a checkout of one file, made here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stand_ins
import unit_test_layers

from foremoe.testing.ranks import run_processes

ROOT = Path(__file__).parents[2]
_, CHECKOUT = stand_ins.checkouts("FOREMOE_MEGATRON_LM", "NVIDIA/Megatron-LM")
TESTS = """
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


def layer(ep, **options):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=8, add_bias_linear=False, use_cpu_initialization=True,
        expert_model_parallel_size=ep, **options,
    )
    torch.manual_seed(1)
    mlp = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False).submodules.mlp
    return MoELayer(config, mlp.submodules) if hasattr(mlp, "submodules") else mlp(config=config)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA not available")
@pytest.mark.parametrize("ep", (1, 2))
def test_layer(ep):
    moe = layer(ep, moe_token_dispatcher_type="alltoall").cuda()
    x = torch.randn(4, 2, 8, requires_grad=True)
    moe(x)[0].sum().backward()
    assert x.device.type == "cuda"


def test_dispatcher():
    layer(2)


def test_fp8():
    pytest.skip("no Transformer Engine")


def test_nothing():
    pass
"""


def found_on_two_ranks(tmp_path, breakage):
    folder = tmp_path / unit_test_layers.FOLDER
    folder.mkdir(parents=True)
    (folder / "test_layers.py").write_text(TESTS)
    answers = run_processes(unit_test_layers.run_tests, 2, str(tmp_path), ["test_layers.py"], breakage)
    tests = [[(v.kind, found.ended) for v in found.verdicts] or found.ended for found in answers[0][0].values()]
    return tests, answers


def test_layers_are_equal_or_refused_and_tests_without_a_layer_say_why(tmp_path):
    tests, answers = found_on_two_ranks(tmp_path, "")
    on_cpu = "AssertionError: assert 'cpu' == 'cuda'"
    assert tests == [[("alone", on_cpu)], [("equal", on_cpu)], [("refused", "")], "no Transformer Engine", ""]
    for found, spread in answers:
        (refused,) = found["test_layers.py::test_dispatcher"].verdicts
        assert "set moe_token_dispatcher_type='alltoall'" in refused.why
        (name,) = spread  # the refused layer, with its cure
        assert name == "hidden_size=8 num_moe_experts=8 add_bias_linear=False moe_token_dispatcher_type=alltoall float32"
        assert spread[name].kind == "equal" and spread[name].replicas
        assert spread[name].skew_served == 1.0 < spread[name].skew_before


def test_a_lost_gradient_shows(tmp_path):
    _, answers = found_on_two_ranks(tmp_path, "lost_return")
    verdicts = [found["test_layers.py::test_layer[2]"].verdicts[0] for found, _ in answers]
    assert "differs" in [verdict.kind for verdict in verdicts]  # on ranks that are home to a replica
    assert all("experts" in verdict.why for verdict in verdicts if verdict.kind == "differs")
    assert "differs" in [verdict.kind for _, spread in answers for verdict in spread.values()]


@pytest.mark.parametrize("checkout", [CHECKOUT])
@pytest.mark.parametrize("bench", ["megatron_layers", "megatron_lm"])
def test_the_checkout(checkout, bench, tmp_path):
    out = tmp_path / "results.md"
    command = [sys.executable, "-W", "ignore", "-m", f"bench.{bench}", "--checkout", checkout, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
