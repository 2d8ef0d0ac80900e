"""What the page concludes: the verdict, why rows copy nothing, and which ranks are late."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_case import G, facts_of, measured, small_model

import foremoe
from foremoe.machine.trainer import Trainer
from foremoe.problem.pricing import price
from foremoe.report import write_report
from foremoe.report.contents import late_seconds
from foremoe.report.reasons import best_copies
from foremoe.simulate import Judge, run_stage


def verdict_of(path: Path, case: Any, **options: Any) -> dict[str, Any]:
    write_report(path / "r.html", case.problem, case.plan, **options)
    return facts_of((path / "r.html").read_text())["verdict"]


def slightly_skewed(tokens: int) -> foremoe.Problem:
    """Two rows that are nearly even, and one that is even."""
    load_MLGE = np.full((1, 3, G, 16), tokens, np.int32)
    load_MLGE[0, :2, :, 0] += tokens // 8
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=2, model=None)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=G, ranks_per_node=2)
    model = dataclasses.replace(small_model(), num_layers=3, first_moe_layer=0)
    return foremoe.Problem.of(work, cluster, model=model, redundant=1)


def test_the_verdict_has_the_figures_of_the_table(case, tmp_path):
    told = verdict_of(tmp_path, case, runs=case.runs)
    gains = case.runs.gains()
    row = Judge.of(case.problem, Trainer())(case.problem, case.plan)
    for ours, theirs in (("planned_s", "simulated_stage_s"), ("speedup_vs_static", "speedup_vs_static")):
        assert gains[ours] == pytest.approx(row[theirs])
    for key in ("step_speedup", "step_speedup_at", "share_of_balanced"):
        assert gains[key] == pytest.approx(row[key])
    assert told["gain"].startswith(f"Update stage {gains['speedup_vs_static']:.2f}x") and "step" not in told["gain"]
    words = " ".join(told["details"])
    assert all(f"{gain:.2f}x with {percent} %" in words for percent, gain in gains["step_speedup_at"].items())
    said = dataclasses.replace(case.runs, trainer=Trainer(rollout_share=0.25))
    with_share = verdict_of(tmp_path, case, runs=said)
    assert with_share["gain"].endswith(f"; whole training step {said.gains()['step_speedup']:.2f}x.")
    assert "counts 25% outside its stages" in " ".join(with_share["details"])
    assert f"{gains['share_of_balanced']:.0%} of" in words and "(simulated); the rest overlaps with compute" in words
    assert told["details"][0].startswith("Memory does not fit: ")
    assert "uncalibrated" in told["sure"] and not told["gains"]
    for parts, total in zip(case.runs.parts().values(), ("static_s", "planned_s", "balanced_s"), strict=True):
        assert sum(parts.values()) == pytest.approx(gains[total])


def test_the_verdict_says_what_is_measured_and_what_is_not(case, tmp_path):
    told = verdict_of(tmp_path, case, timelines=measured(case.plan))
    assert "predicted" in told["gain"] and "6.00 ms for copies, measured" in " ".join(told["details"])
    cluster = dataclasses.replace(case.problem.cluster, calibrated=True, residual=0.07)
    problem = dataclasses.replace(case.problem, cluster=cluster)
    plan, _ = foremoe.Planner().plan(problem)
    write_report(tmp_path / "c.html", problem, plan)
    assert "by at most 7%" in facts_of((tmp_path / "c.html").read_text())["verdict"]["sure"]


def test_no_gain_is_said_plainly(tmp_path):
    problem = slightly_skewed(8)
    plan, _ = foremoe.Planner(rank=()).plan(problem)
    write_report(tmp_path / "r.html", problem, plan, runs=run_stage(problem, plan))
    told = facts_of((tmp_path / "r.html").read_text())["verdict"]
    assert told["gain"].startswith("Nothing to gain here") and not told["gains"]
    assert "Nothing is copied." in told["details"]


def test_the_best_copy_that_does_not_pay_has_its_price():
    problem = slightly_skewed(8)
    plan, _ = foremoe.Planner().plan(problem)
    assert plan.num_replicas == 0
    found = best_copies(problem, plan)
    assert found.row_W.tolist() == [0, 1] and set(found.expert_W) == {0} and (found.from_W == 0).all()
    assert (found.saved_s_W < found.cost_s_W).all() and (found.quota_W > 0).all()
    # The same copy as a placement of its own.
    static, copied = problem.static(), problem.static()
    expert_NGS, quota_NGS = copied.expert_NGS.copy(), copied.quotas_NGS.copy()
    to, quota = int(found.to_W[0]), int(found.quota_W[0])
    expert_NGS[0, to, plan.B], quota_NGS[0, to, plan.B] = 0, quota
    quota_NGS[0, 0, 0] -= quota
    copied = dataclasses.replace(copied, expert_NGS=expert_NGS, quota_NGS=quota_NGS)
    change_s = price(problem, copied).total_s[0] - price(problem, static).total_s[0]
    assert found.cost_s_W[0] - found.saved_s_W[0] == pytest.approx(change_s)


def test_rows_with_replicas_and_plans_without_slots_have_no_reason(case):
    rows = best_copies(case.problem, case.plan).row_W
    assert not (case.plan.quota_NGS[rows][:, :, case.plan.B :] > 0).any()
    none = dataclasses.replace(case.problem, redundant=0)
    assert len(best_copies(none, foremoe.Planner().plan(none)[0]).row_W) == 0


def test_late_ranks_are_those_that_others_wait_for(case):
    late_G = late_seconds(case.runs.static, G)
    compute_UG = case.runs.static.compute_UG.astype(float)
    assert late_G.sum() == pytest.approx((compute_UG.max(axis=1) - compute_UG.mean(axis=1)).sum())
    assert late_seconds(case.runs.planned, G).sum() < late_G.sum()


def test_a_plan_that_replaces_experts_bears_its_moves_on_the_page_as_in_the_table(case):
    plan = foremoe.STRATEGIES["eplb-exact"].plan(case.problem)[0]
    assert not plan.executable
    row, gains = Judge.of(case.problem)(case.problem, plan), run_stage(case.problem, plan).gains()
    assert gains["planned_s"] == row["simulated_stage_s"] == foremoe.gain(case.problem, plan).planned_s
