"""The planner: composition, guard, foresight, warm starts, progress, cancellation."""

from __future__ import annotations

import dataclasses
import re
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from planner_problems import problem_of

import foremoe
import foremoe.plan.split
import foremoe.simulate
from foremoe.base.errors import InputError, PlanError
from foremoe.planner.planner import Planner
from foremoe.problem.foresight import Noisy, Rerouted, predicted_load
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers import (
    Anneal,
    Eplb,
    Even,
    ExactSplit,
    Greedy,
    Quota,
    RankSolver,
    Search,
)
from foremoe.solvers.split import kernels as split_kernels


@dataclass(frozen=True)
class Worse(RankSolver):
    """Serves half of every rank's hottest expert on the most loaded rank."""

    def solve(self, problem: Problem, start: Placement) -> Placement:
        expert_NGS, quota_NGS = start.expert_NGS.copy(), start.quotas_NGS.copy()
        for n in range(problem.N):
            load_G = quota_NGS[n].sum(axis=1)
            giver, taker = int(load_G.argmin()), int(load_G.argmax())
            half = quota_NGS[n, giver, 0] // 2
            if half and giver != taker:
                expert_NGS[n, taker, problem.B], quota_NGS[n, taker, problem.B] = expert_NGS[n, giver, 0], half
                quota_NGS[n, giver, 0] -= half
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)


def test_the_default_plan_is_valid_and_balanced():
    problem = problem_of()
    plan, report = Planner().plan(problem)
    plan.check(problem)
    static, _ = Planner(rank=()).plan(problem)
    assert plan.skew_ML.mean() < 1.05 < static.skew_ML.mean()
    assert report.levels[0].solver == "start"
    assert report.rows == problem.N and sum(report.stops.values()) == problem.N


def test_the_guard_keeps_the_better_rows_and_says_so():
    problem = problem_of()
    guarded, report = Planner(rank=(Worse(),)).plan(problem)
    assert (guarded.load_NG == problem.static().load_NG()).all()
    assert report.rows_kept_at_start == problem.N
    assert (guarded.stop_ML == Stop.FELL_BACK).any()
    unguarded, _ = Planner(rank=(Worse(),), guard=False).plan(problem)
    assert unguarded.skew_ML.mean() > guarded.skew_ML.mean()


@dataclass(frozen=True)
class Returns(RankSolver):
    """Puts one number in one slot, or leaves rows, ranks or slots out."""

    expert: int = -1
    cut: tuple[int, int, int] = (0, 0, 0)
    quotas: bool = False

    def solve(self, problem: Problem, start: Placement) -> Placement:
        expert_NGS = start.expert_NGS.copy()
        expert_NGS[1, 2, problem.B] = self.expert
        rows, ranks, slots = (n - cut for n, cut in zip(expert_NGS.shape, self.cut, strict=True))
        quota_NGS = start.quotas_NGS[:rows, :ranks, :slots] if self.quotas else None
        return Placement(expert_NGS=expert_NGS[:rows, :ranks, :slots], quota_NGS=quota_NGS)


UNREADABLE = [
    (Returns(expert=32), r"micro-step 0, layer 1, rank 2, slot 4: .*expert 32 does not exist; there are 32"),
    (Returns(expert=32, quotas=True), "expert 32 does not exist; there are 32"),
    (Returns(expert=-2), "expert -2 does not exist"),
    (Returns(expert=32767), "expert 32767 does not exist"),
    (Returns(cut=(1, 0, 0)), r"of shape \[11, 8, 5\]; this problem has integers of shape \[N, G, S\] = \[12, 8, 5\]"),
    (Returns(cut=(0, 1, 0)), r"of shape \[12, 7, 5\]; this problem"),
    (Returns(cut=(0, 0, 1), quotas=True), r"of shape \[12, 8, 4\]; this problem"),
]


@pytest.mark.parametrize(("solver", "message"), UNREADABLE)
@pytest.mark.parametrize("planner", [Planner(), Planner(split=Even()), Planner(guard=False)])
def test_what_compiled_code_could_not_read_never_gets_there(monkeypatch, planner, solver, message):
    """It would read, and write, whatever lies behind its arrays."""
    problem = problem_of(objective="time")
    monkeypatch.setattr(split_kernels, "for_rows", lambda *_: pytest.fail("compiled code was given the placement"))
    with pytest.raises(PlanError, match=r"Returns\(.*\) returned an invalid placement: ") as caught:
        planner.using(solver).plan(problem)
    assert re.search(message, str(caught.value))
    with pytest.raises(InputError, match=f"the start is not valid for this problem: .*{message.rsplit('.*', maxsplit=1)[-1]}"):
        planner.plan(problem, start=solver.solve(problem, problem.static()))
    for split in (ExactSplit(), Even()):
        with pytest.raises(PlanError, match=message.rsplit(".*", maxsplit=1)[-1]):
            split.solve(problem, solver.solve(problem, problem.static()).expert_NGS)
    if solver.quotas:
        with pytest.raises(PlanError, match=message):
            row_objective(problem, solver.solve(problem, problem.static()))


def test_a_plan_is_neither_simulated_nor_split_with_experts_that_do_not_exist(monkeypatch):
    problem = problem_of()
    work = foremoe.Workload.from_counts(problem.load_MLGE, num_topk=problem.model.num_topk)
    plan, _ = Planner(rank=()).plan(problem)
    expert_MLGS = plan.expert_MLGS.copy()
    expert_MLGS[0, 1, 2, 0] = 32
    plan = dataclasses.replace(plan, expert_MLGS=expert_MLGS)
    for module in (foremoe.plan.split, foremoe.simulate.traffic):
        monkeypatch.setattr(module, "for_rows", lambda *_, **__: pytest.fail("compiled code was given the plan"))
    for attempt in (lambda: plan.rows_for(work, 0), lambda: foremoe.simulate.simulate(problem, plan)):
        with pytest.raises(PlanError, match="micro-step 0, layer 1, rank 2, slot 0: expert 32 does not exist; there are 32"):
            attempt()


def test_one_rank_no_slots_and_no_tokens_plan_as_static():
    problem = problem_of(redundant=0)
    assert Planner().plan(problem)[0].num_replicas == 0
    empty = dataclasses.replace(problem_of(), load_MLE=np.zeros_like(problem.load_MLE), load_MLGE=None)
    plan, _ = Planner().plan(empty)
    plan.check(empty)
    assert plan.num_replicas == 0 and (plan.skew_ML == 1.0).all()


def test_a_start_for_another_load_is_split_anew():
    first, second = problem_of(0), problem_of(1)
    start, _ = Planner(rank=(Greedy(),)).plan(first)
    plan, _ = Planner(rank=()).plan(second, start)
    plan.check(second)
    assert plan.num_replicas > 0
    with pytest.raises(InputError, match=r"the start is not valid for this problem: .* of shape"):
        Planner().plan(problem_of(redundant=2), start)


@pytest.mark.parametrize("foresight", ["previous", "step", Noisy(0.3), Rerouted(0.3)])
def test_less_foresight_is_valid_and_no_better_on_average(foresight):
    problem = problem_of(micro_steps=6)
    seen, _ = Planner(foresight=foresight).plan(problem)
    seen.check(problem)
    exact, _ = Planner().plan(problem)
    assert seen.skew_ML.mean() > exact.skew_ML.mean()


def test_history_is_what_the_micro_step_before_was():
    load_MLE = problem_of().load_MLE
    previous_MLE = predicted_load(load_MLE, "previous", None)
    assert (previous_MLE[1:] == load_MLE[:-1]).all() and (previous_MLE[0] == 0).all()
    assert (predicted_load(load_MLE, "previous", load_MLE[2])[0] == load_MLE[2]).all()
    assert (predicted_load(load_MLE, "step", None) == load_MLE.sum(axis=0)).all()
    assert predicted_load(load_MLE, Noisy(0.0), None).sum() == load_MLE.sum()
    plan, _ = Planner(rank=(Greedy(),), foresight="previous").plan(problem_of())
    assert (plan.quota_MLGS[0, ..., plan.B :] == 0).all(), "nothing is known before the first micro-step"


def test_plans_that_move_homes_are_scored_never_executed():
    problem = problem_of()
    plan, _ = Planner(rank=(Eplb(),), split=Even(), guard=False).plan(problem)
    plan.check(problem)
    assert not plan.executable and len(plan.transfers) == 0


def test_progress_counts_every_row_of_every_level():
    seen: list[tuple[int, int]] = []
    problem = problem_of()
    Planner(rank=(Greedy(), Quota())).plan(problem, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2 * problem.N, 2 * problem.N)


def test_cancelling_leaves_a_valid_plan_that_says_so():
    cancel = threading.Event()
    cancel.set()
    problem = problem_of()
    plan, report = Planner().plan(problem, cancel=cancel)
    plan.check(problem)
    assert (plan.stop_ML == Stop.CANCELLED).all()
    assert "cancelled" in report.warnings[0]


def test_using_puts_every_solver_at_its_level():
    planner = Planner().using(Anneal(), Greedy(), Quota(min_pairs=3), Even())
    assert planner.home == Anneal() and planner.rank == (Greedy(), Quota(min_pairs=3)) and planner.split == Even()
    with pytest.raises(InputError, match="has no level"):
        Planner().using(3)
    with pytest.raises(InputError, match="must be a tuple of Solvers"):
        Planner(rank=Search())


@pytest.mark.parametrize("call", [Planner().plan, foremoe.choose_slots])
def test_a_workload_is_not_a_problem(call):
    work = foremoe.Workload.from_counts(np.ones((1, 1, 2, 4), int), num_topk=2)
    with pytest.raises(InputError, match=r"a Problem, not a Workload; give Problem\.of\(workload, cluster\)\."):
        call(work)


def test_homes_are_decided_over_all_stages_and_lower_the_static_skew():
    update = problem_of(0)
    recompute = dataclasses.replace(problem_of(1), stage="recompute", schedule=foremoe.Schedule.forward_only(3))
    home = Anneal()
    home_LE = Planner(home=home).homes(update, recompute)
    for num_threads in (1, 2):
        assert (Planner(home=home).homes(update, recompute, num_threads=num_threads) == home_LE).all()
    moved = dataclasses.replace(update, home_LE=home_LE)
    before, after = (Planner(rank=()).plan(p)[0].skew_ML.mean() for p in (update, moved))
    assert after < before
    plan, _ = Planner().plan(moved)
    plan.check(moved)
    assert (Planner().homes(update) == update.home_LE).all()
    with pytest.raises(InputError, match="num_threads must be"):
        Planner().homes(update, num_threads=0)


def test_meeting_the_bound_is_a_proof():
    problem = problem_of(redundant=4)
    plan, _ = Planner().plan(problem)
    load_ML = plan.load_NG.max(axis=1).reshape(problem.M, problem.L)
    assert ((plan.stop_ML == Stop.OPTIMAL) == (load_ML <= plan.load_bound_ML)).all()
    assert (plan.stop_ML == Stop.OPTIMAL).any()


@pytest.mark.parametrize(
    "attempt",
    [
        lambda plan, problem: plan.explain("a", 0),
        lambda plan, problem: plan.explain(0, problem.L),
        lambda plan, problem: foremoe.Schedule.accumulate(1.5),
        lambda plan, problem: foremoe.CostModel(overlap="a"),
        lambda plan, problem: Planner().plan(problem, num_threads=1.5),
        lambda plan, problem: Planner(foresight="tomorrow"),
        lambda plan, problem: dataclasses.replace(problem, redundant=-1),
    ],
)
def test_wrong_arguments_are_one_sentence(attempt):
    problem = problem_of()
    plan, _ = Planner(rank=()).plan(problem)
    with pytest.raises(InputError) as caught:
        attempt(plan, problem)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
