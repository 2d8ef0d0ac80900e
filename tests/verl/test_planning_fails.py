"""A stage whose planning fails anywhere runs at home everywhere: the same result, a warning for each, a metric."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import dataclasses
from unittest.mock import patch

import pytest
import torch
from program import Layout
from verl_arms import run

from foremoe.base.errors import InputError, TransferError
from foremoe.integrations.settings import Settings
from foremoe.workload.workload import Workload

LAYOUT = Layout(ep=4)


@pytest.fixture(scope="module")
def plain(pool):
    return pool.run(run, LAYOUT, "R3", None, 1, timeout_s=120, limit_s=900)


def require_told(warned, by_this_rank, cause=""):
    """Each stage once, with its cause, by rank 0 of the EP group."""
    told = [f"the {stage} stage runs at home, without a plan: " for stage in ("recompute", "update")] if by_this_rank else []
    assert len(warned) == len(told) and all(text.startswith(begin) for text, begin in zip(warned, told, strict=True)), warned
    assert all(cause in text for text in warned)


@pytest.mark.parametrize("solver", ["Raises", "Sleeps", "Invalid", "Quits"])
def test_the_stage_runs_at_home(pool, plain, solver):
    # A limit that only the sleeper exceeds, on a busy machine too.
    limit_s = 2.6 if solver == "Sleeps" else 60.0
    settings = Settings(planner=f"bad_solvers:{solver}", cost="balance", plan_limit_s=limit_s)
    found = pool.run(run, LAYOUT, "R3", settings, 1, timeout_s=120, limit_s=900)
    for a, b in zip(plain, found, strict=True):
        assert b.losses == a.losses and b.grad_norms == a.grad_norms
        assert all(torch.equal(b.weights[name], weight) for name, weight in a.weights.items()), "it ran at home, bit by bit"
        require_told(b.warned, b is found[0])
        for stage, metrics in zip(("recompute", "update"), b.metrics, strict=True):
            if metrics:
                assert metrics[f"foremoe/{stage}/unplanned"] == 1.0
    assert any(b.metrics[0] for b in found)


def test_one_pipeline_stage_that_fails_is_told_by_the_last(pool):
    settings = Settings(planner="bad_solvers:Raises", cost="balance")
    found = pool.run(run, Layout(ep=2, pp=2, num_layers=4), "R3", settings, 1, timeout_s=120, limit_s=900)
    metrics = next(member.metrics for member in found if member.metrics[1])
    for stage, values in zip(("recompute", "update"), metrics, strict=True):
        assert values[f"foremoe/{stage}/unplanned"] == 1.0, "rank 0 is in the first stage"
        assert f"foremoe/{stage}/replicas" not in values, "the last stage runs at home with it"


def run_with_patience(group, *args):
    """How long every group that foremoe makes waits for another rank."""
    from foremoe.integrations.verl.session import Session

    seen, original = [], Session.__init__

    def init(self, *args):
        original(self, *args)
        made = (self.copy, self.attached.group, self.packer._data, *self.packer._alike)
        seen.extend(each.timeout_s for each in made)

    with patch.object(Session, "__init__", init):
        run(group, *args)
    return seen


def test_the_groups_patience_is_a_setting(pool):
    settings = Settings(cost="balance", packing=True, group_timeout_s=77.0)
    for seen in pool.run(run_with_patience, Layout(ep=2, pp=2, num_layers=4), "R3", settings, 1, timeout_s=120, limit_s=900):
        assert len(seen) >= 4 and set(seen) == {77.0}


def run_where_plans_do_not_fit(group, *args):
    """On rank 1 only: the plan is made, and refused when the stage begins."""
    from foremoe.integrations.megatron.planning import Planning

    def fault_of(self, *args):
        return "made not to fit" if group.rank == 1 else ""

    with patch.object(Planning, "fault_of", fault_of):
        return run(group, *args)


def test_a_plan_that_does_not_fit_leaves_the_stage_at_home(pool, plain):
    settings = Settings(cost="balance")
    found = pool.run(run_where_plans_do_not_fit, LAYOUT, "R3", settings, 1, timeout_s=120, limit_s=900)
    for a, b in zip(plain, found, strict=True):
        assert b.losses == a.losses and b.grad_norms == a.grad_norms
        require_told(b.warned, b is found[0], "made not to fit")
        for stage, metrics in zip(("recompute", "update"), b.metrics, strict=True):
            if metrics:
                assert metrics[f"foremoe/{stage}/unplanned"] == 1.0


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
    layout, settings = Layout(ep=2, pp=2, num_layers=4), Settings(cost="balance")
    arms = ((run, settings), (run_where_packing_fails, dataclasses.replace(settings, packing=True)))
    plain, found = (pool.run(fn, layout, "R3", of, 1, True, True, timeout_s=120, limit_s=900) for fn, of in arms)
    # Rank 0 speaks for the data-parallel ranks 0 and 1; ranks 2 and 3 heard it each from the rank with the same samples.
    assert [len(b.warned) for b in found] == [2, 0, 2, 2]
    for a, b in zip(plain, found, strict=True):
        assert b.losses == a.losses and b.grad_norms == a.grad_norms
        assert all("micro-batches stay as they are: ValueError: made to fail" in text for text in b.warned)
        assert (b.reports[1].plan.load_MLE == a.reports[1].plan.load_MLE).all()


def test_dumped_counts_are_those_of_the_plan(pool, tmp_path):
    settings = Settings(cost="balance", dump=str(tmp_path))
    found = pool.run(run, LAYOUT, "R3", settings, 1, timeout_s=120, limit_s=900)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["recompute_00000_rank0.safetensors", "update_00000_rank0.safetensors"]
    for file, report in zip(files, found[0].reports, strict=True):
        work = Workload.load(file)
        assert work.stage in file.name and (work.load_MLE == report.plan.load_MLE).all()


def test_a_dump_that_cannot_be_written_leaves_the_stage_planned(pool, tmp_path):
    in_the_way = tmp_path / "dumps"
    in_the_way.write_text("a file")
    settings = Settings(cost="balance", dump=str(in_the_way))
    found = pool.run(run, LAYOUT, "R3", settings, 1, timeout_s=120, limit_s=300)
    assert [len(member.warned) for member in found] == [2, 0, 0, 0], "each stage, by the rank that writes"
    assert all("could not be dumped" in text for text in found[0].warned)
    for member in found:
        assert all(report.plan.num_replicas > 0 for report in member.reports)
    told = [values for member in found for values in member.metrics if values]
    assert told and all(value == 0.0 for values in told for name, value in values.items() if name.endswith("/unplanned"))


def run_where_routing_cannot_be_read(group, *args):
    """On rank 1 only."""
    from foremoe.integrations.verl import session

    original = session.routing_of

    def routing_of(*args):
        if group.rank == 1:
            raise ValueError("made to fail")
        return original(*args)

    with patch.object(session, "routing_of", routing_of):
        return run(group, *args)


def test_a_rank_that_fails_before_planning_is_named_to_those_that_wait(pool):
    """They would wait for 300 s, longer than the call may take."""
    settings = Settings(cost="balance")
    found = pool.run(run_where_routing_cannot_be_read, LAYOUT, "R3", settings, 1, timeout_s=120, limit_s=200, errors=True)
    assert isinstance(found[1], ValueError)
    for g in (0, 2, 3):
        assert isinstance(found[g], TransferError) and "ValueError: made to fail" in str(found[g])


def said_by(group, name):
    """What a rank says to a session whose rank 1 alone refuses in a function of the adapter; then all of them make one."""
    from engine_program import EngineProgram

    from foremoe.integrations.verl import packing, session

    program, said = EngineProgram(LAYOUT), ""
    owner = packing if hasattr(packing, name) else session

    def refuse(*_):
        raise InputError("made to refuse.")

    with patch.object(owner, name, refuse if group.rank == 1 else getattr(owner, name)):
        try:
            program.engine.attach_foremoe(Settings(packing=True))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    program.engine.attach_foremoe(Settings(packing=True))
    program.engine._foremoe.close()
    return said


@pytest.mark.parametrize("name", ["find_layers", "model_of"])
def test_what_one_rank_refuses_is_told_on_all_before_anything_else(pool, name):
    """The others would wait for 300 s, longer than the call may take."""
    said = pool.run(said_by, name, timeout_s=120, limit_s=200)
    assert said == ["InputError: " + ("" if g == 1 else "rank 1: ") + "made to refuse." for g in range(4)]


def refused(_group):
    from engine_program import EngineProgram

    program = EngineProgram(LAYOUT)
    program.engine.tf_config.fp8 = "hybrid"
    with pytest.raises(InputError) as caught:
        program.engine.attach_foremoe(Settings())
    return str(caught.value)


def test_a_refusal_says_what_the_command_would_be(pool):
    for said in pool.run(refused, timeout_s=120, limit_s=200):
        assert said.endswith("; write ++actor_rollout_ref.actor.megatron.override_transformer_config.fp8=null.")
