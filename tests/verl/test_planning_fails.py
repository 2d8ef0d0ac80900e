"""A stage whose planning fails anywhere runs at home everywhere: the same result, one warning, a metric."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import pytest
import torch
from program import Layout
from verl_arms import run

from foremoe.integrations.verl.settings import Settings
from foremoe.workload import Workload

LAYOUT = Layout(ep=4)


@pytest.fixture(scope="module")
def plain(pool):
    return pool.run(run, LAYOUT, "R3", None, 1, timeout_s=120, limit_s=900)


@pytest.mark.parametrize("solver", ["Raises", "Sleeps", "Invalid"])
def test_the_stage_runs_at_home(pool, plain, solver):
    settings = Settings(planner=f"bad_solvers:{solver}", objective="balance", plan_limit_s=3.0)
    found = pool.run(run, LAYOUT, "R3", settings, 1, timeout_s=120, limit_s=900)
    for a, b in zip(plain, found, strict=True):
        assert b.losses == a.losses and b.grad_norms == a.grad_norms
        assert all(torch.equal(b.weights[name], weight) for name, weight in a.weights.items()), "it ran at home, bit by bit"
        assert len(b.warned) == 1 and "without a plan" in b.warned[0]
        for stage, metrics in zip(("recompute", "update"), b.metrics, strict=True):
            if metrics:
                assert metrics[f"foremoe/{stage}/unplanned"] == 1.0
    assert any(b.metrics[0] for b in found)


def test_dumped_counts_are_those_of_the_plan(pool, tmp_path):
    settings = Settings(objective="balance", dump=str(tmp_path))
    found = pool.run(run, LAYOUT, "R3", settings, 1, timeout_s=120, limit_s=900)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["recompute_00000_rank0.safetensors", "update_00000_rank0.safetensors"]
    for file, report in zip(files, found[0].reports, strict=True):
        work = Workload.load(file)
        assert work.stage in file.name and (work.load_MLE == report.plan.load_MLE).all()
