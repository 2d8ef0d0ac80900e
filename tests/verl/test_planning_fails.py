"""A stage whose planning fails anywhere runs at home everywhere: the same result, one warning, a metric."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import dataclasses

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
    settings = Settings(planner=f"bad_solvers:{solver}", objective="balance", plan_limit_s=2.6)
    found = pool.run(run, LAYOUT, "R3", settings, 1, timeout_s=120, limit_s=900)
    for a, b in zip(plain, found, strict=True):
        assert b.losses == a.losses and b.grad_norms == a.grad_norms
        assert all(torch.equal(b.weights[name], weight) for name, weight in a.weights.items()), "it ran at home, bit by bit"
        assert len(b.warned) == 1 and "without a plan" in b.warned[0]
        for stage, metrics in zip(("recompute", "update"), b.metrics, strict=True):
            if metrics:
                assert metrics[f"foremoe/{stage}/unplanned"] == 1.0
    assert any(b.metrics[0] for b in found)


def test_one_pipeline_stage_that_fails_is_told_by_the_last(pool):
    settings = Settings(planner="bad_solvers:Raises", objective="balance")
    found = pool.run(run, Layout(ep=2, pp=2, num_layers=4), "R3", settings, 1, timeout_s=120, limit_s=900)
    metrics = next(member.metrics for member in found if member.metrics[1])
    for stage, values in zip(("recompute", "update"), metrics, strict=True):
        assert values[f"foremoe/{stage}/unplanned"] == 1.0, "rank 0 is in the first stage"
        assert values[f"foremoe/{stage}/replicas"] > 0, "the last stage has its plan"


def run_where_packing_fails(group, *args):
    """On rank 1 only."""
    from foremoe.integrations.verl.packing import Packer

    original = Packer._samples

    def samples(self, *args):
        if group.rank == 1:
            raise ValueError("made to fail")
        return original(self, *args)

    Packer._samples = samples
    try:
        return run(group, *args)
    finally:
        Packer._samples = original


def test_packing_that_fails_leaves_verls_micro_batches_on_all_ranks(pool):
    layout, settings = Layout(ep=2, pp=2, num_layers=4), Settings(objective="balance")
    arms = ((run, settings), (run_where_packing_fails, dataclasses.replace(settings, packing=True)))
    plain, found = (pool.run(fn, layout, "R3", of, 1, True, True, timeout_s=120, limit_s=900) for fn, of in arms)
    for a, b in zip(plain, found, strict=True):
        assert b.losses == a.losses and b.grad_norms == a.grad_norms
        assert len(b.warned) == 1 and "leaves veRL's micro-batches" in b.warned[0] and "made to fail" in b.warned[0]
        assert (b.reports[1].plan.load_MLE == a.reports[1].plan.load_MLE).all()


def test_dumped_counts_are_those_of_the_plan(pool, tmp_path):
    settings = Settings(objective="balance", dump=str(tmp_path))
    found = pool.run(run, LAYOUT, "R3", settings, 1, timeout_s=120, limit_s=900)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["recompute_00000_rank0.safetensors", "update_00000_rank0.safetensors"]
    for file, report in zip(files, found[0].reports, strict=True):
        work = Workload.load(file)
        assert work.stage in file.name and (work.load_MLE == report.plan.load_MLE).all()
