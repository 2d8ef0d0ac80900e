"""The example does what it says: the same losses with and without foremoe."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from foremoe.testing.ranks import RankPool

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "megatron_gpt.py"


def losses(_group, arguments):
    import warnings

    import cpu
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cpu.run_on_cpu()
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplay

    parallel_state.destroy_model_parallel()
    RouterReplay.clear_global_router_replay_instances()
    return runpy.run_path(str(EXAMPLE))["main"](arguments)


@pytest.mark.parametrize("arguments", [["--ep", "2"], ["--ep", "2", "--pp", "2"]], ids=" ".join)
def test_example(arguments):
    arguments = [*arguments, "--steps", "2", "--sequence", "16"]
    with RankPool(4 if "--pp" in arguments else 2) as pool:
        with_foremoe = pool.run(losses, arguments, limit_s=300.0)
        without = pool.run(losses, [*arguments, "--without-foremoe"], limit_s=300.0)
    assert any(with_foremoe), "no rank had a loss"
    for mine, plain in zip(with_foremoe, without, strict=True):
        assert mine == pytest.approx(plain, abs=1e-5)


def test_the_line_of_the_tutorial():
    (line,) = re.findall(r"^torchrun (.*)$", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *line.split(), "--sequence", "16"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "loss" in run.stdout
