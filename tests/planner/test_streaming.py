"""Streaming: the same bytes as planning all micro-steps at once, whatever arrives when; errors surface."""

import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe.base.errors import InputError
from foremoe.planner.planner import Planner
from foremoe.planner.streaming import PlanStream
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.solvers import Eplb, Greedy, Quota, RankSolver, Search
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts.

CLUSTER = foremoe.Cluster.preset("8xh100", num_ranks=8, ranks_per_node=4)
MODEL = dataclasses.replace(foremoe.Model.preset("gpt-oss-20b"), num_layers=3)
PLANNERS = (
    Planner(), Planner(rank=()), Planner(rank=(Quota(), Search(effort=100)), guard=False), Planner(rank=(Greedy(), Quota())),
    Planner(rank=(Eplb(),), guard=False),
)  # fmt: skip


def workload(seed: int = 0, micro_steps: int = 5, stage: str = "update") -> Workload:
    rng = np.random.default_rng(seed)
    rate = rng.lognormal(3.0, 1.0, (micro_steps, 3, 1, MODEL.num_experts))
    load_MLGE = rng.poisson(rate, (micro_steps, 3, 8, MODEL.num_experts))
    return Workload.from_counts(load_MLGE, num_topk=MODEL.num_topk, stage=stage, trace_id="seeded")


def pieces(work: Workload, cuts: list[int]) -> Iterator[Workload]:
    for low, high in zip([0, *cuts], [*cuts, work.M], strict=True):
        yield work[low:high]


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: repr(planner.rank))
@examples(5)
@given(data=st.data())
def test_a_streamed_plan_equals_the_plan_of_the_whole(planner: Planner, data: st.DataObject) -> None:
    stage, reforward = data.draw(st.sampled_from([("update", False), ("update", True), ("recompute", False)]))
    work = workload(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 5)), stage)
    cuts = sorted(data.draw(st.sets(st.integers(1, work.M - 1)))) if work.M > 1 else []
    options = {
        "model": MODEL, "redundant": data.draw(st.integers(0, 2)),
        "slot_depth": data.draw(st.integers(1, 3)),
        "cost": foremoe.CostModel(objective=data.draw(st.sampled_from(["time", "balance"]))),
        "home_LE": np.stack([np.random.default_rng(i).permutation(MODEL.num_experts) for i in range(3)]),
    }  # fmt: skip
    schedule = None
    if stage == "update":
        make = data.draw(st.sampled_from([Schedule.accumulate, lambda m, r: Schedule.one_f_one_b(m, 2, 0, r)]))
        schedule = make(work.M, reforward)
    key = foremoe.PlanKey(step=3, stage=stage)
    problem = Problem.of(work, CLUSTER, schedule=schedule, **options)
    whole, report = planner.plan(problem, key=key, num_threads=1)
    with PlanStream(planner, CLUSTER, reforward=reforward, key=key, num_threads=1, **options) as stream:
        for part in pieces(work, cuts):
            stream.add(part)
        plan, streamed = stream.finish(schedule)
    assert plan.same_as(whole)
    assert stream.problem.same_as(problem)
    plan.check(stream.problem)
    assert [level.solver for level in streamed.levels] == [level.solver for level in report.levels]
    assert (streamed.rows, streamed.stops, streamed.warnings) == (report.rows, report.stops, report.warnings)
    for mine, theirs in zip(streamed.levels, report.levels, strict=True):
        assert mine.rows_improved == theirs.rows_improved
        assert mine.objective_sum == pytest.approx(theirs.objective_sum)
        assert mine.skew_mean == pytest.approx(theirs.skew_mean)


def test_proofs_are_kept() -> None:
    work = workload()
    options = {"model": MODEL, "cost": foremoe.CostModel(objective="balance")}
    whole, _ = Planner().plan(Problem.of(work, CLUSTER, **options))
    assert (whole.stop_ML == foremoe.Stop.OPTIMAL).any()
    with PlanStream(Planner(), CLUSTER, **options) as stream:
        for part in pieces(work, [1, 2]):
            stream.add(part)
        plan, _ = stream.finish()
    assert plan.same_as(whole)


def test_how_a_trace_was_dealt_stays_in_the_header() -> None:
    trace = foremoe.synthetic_trace("gpt-oss-20b", num_sequences=60, mean_length=40.0, num_layers=2, seed=0, regime="mid")
    work = Workload.from_trace(trace, num_ranks=8, tokens_per_rank=100)
    assert work.M > 2 and work.dealt is not None
    model = dataclasses.replace(MODEL, num_layers=2)
    whole, _ = Planner().plan(Problem.of(work, CLUSTER, model=model))
    with PlanStream(Planner(), CLUSTER, model=model) as stream:
        for part in pieces(work, [1, 2]):
            stream.add(part)
        assert stream.finish()[0].same_as(whole)


def test_planning_runs_while_samples_arrive() -> None:
    # The second part is added only once the first has been planned: without a background thread this would never end.
    planned = threading.Event()
    with PlanStream(Planner(rank=(Signals(planned),)), CLUSTER, model=MODEL) as stream:
        work = workload()
        stream.add(work[:1])
        assert planned.wait(timeout=600)
        stream.add(work[1:])
        plan, _ = stream.finish()
    assert plan.M == work.M


_EVENTS: list[threading.Event] = []


class Signals(RankSolver):
    """Says that it ran."""

    def __init__(self, event: threading.Event) -> None:
        _EVENTS.append(event)

    def __repr__(self) -> str:
        return "Signals()"

    def solve(self, problem: Problem, start: Placement) -> Placement:
        _EVENTS[-1].set()
        return start


class Breaks(RankSolver):
    """Loses a token in rows that have a hot expert."""

    def __repr__(self) -> str:
        return "Breaks()"

    def solve(self, problem: Problem, start: Placement) -> Placement:
        if problem.load_MLE.max() < 10_000:
            return start
        raise RuntimeError("too hot")


def test_an_error_in_the_background_surfaces_in_finish_or_earlier() -> None:
    work = workload()
    hot = Workload.from_counts(np.full_like(work.load_MLGE[:1], 20_000), num_topk=MODEL.num_topk, trace_id="seeded")
    with PlanStream(Planner(rank=(Breaks(),)), CLUSTER, model=MODEL) as stream:
        stream.add(work[:1])
        stream.add(hot)
        with pytest.raises(RuntimeError, match="too hot"):
            stream.finish()
        with pytest.raises(InputError, match="is finished"):
            stream.add(work[:1])
    with PlanStream(Planner(rank=(Breaks(),)), CLUSTER, model=MODEL) as stream:
        stream.add(hot)
        stream._parts[0].exception()  # waits for it
        with pytest.raises(RuntimeError, match="too hot"):
            stream.add(work[:1])


def test_leaving_the_block_early_ends_planning() -> None:
    with pytest.raises(KeyError), PlanStream(Planner(), CLUSTER, model=MODEL) as stream:
        for part in pieces(workload(), [1, 2, 3]):
            stream.add(part)
        raise KeyError
    assert stream._pool._shutdown
    with pytest.raises(InputError, match="is finished"):
        stream.finish()


def test_wrong_use_is_refused_in_a_sentence() -> None:
    work = workload()
    for foresight in ("step", "previous", foremoe.Noisy()):
        with pytest.raises(InputError, match="foresight='exact'"):
            PlanStream(Planner(foresight=foresight), CLUSTER)
    with pytest.raises(InputError, match="no option schedule; the schedule goes to finish"):
        PlanStream(Planner(), CLUSTER, schedule=Schedule.accumulate(2))
    with PlanStream(Planner(), CLUSTER, model=MODEL) as stream:
        with pytest.raises(InputError, match="no micro-steps were added"):
            stream.finish()
        with pytest.raises(InputError, match="add takes a Workload"):
            stream.add(work.load_MLGE)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="call it first"):
            _ = stream.problem
        stream.add(work)
        with pytest.raises(InputError, match="have stage 'update'; got 'recompute'"):
            stream.add(workload(stage="recompute"))
        with pytest.raises(InputError, match="have L 3; got 2"):
            stream.add(work.layers([0, 1]))
        with pytest.raises(InputError, match="other layers"):
            stream.add(dataclasses.replace(work, moe_layer_L=np.array([0, 1, 7])))
        with pytest.raises(InputError, match="made with reforward=False"):
            stream.finish(Schedule.accumulate(work.M, True))
        with pytest.raises(InputError, match="the schedule runs 2 micro-steps but the load has 5"):
            stream.finish(Schedule.accumulate(2))
        stream.finish()
        with pytest.raises(InputError, match="is finished"):
            stream.finish()
