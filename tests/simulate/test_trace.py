"""Traces for Perfetto: they keep the format's rules and say what the simulation says."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from click.testing import CliRunner
from trace_rules import check_trace

import foremoe
from foremoe.base.errors import InputError
from foremoe.base.trace_events import TraceEvents, levels
from foremoe.cli.main import main
from foremoe.simulate import simulate, trace

G, L = 4, 3
COPY_ARGS = {"micro_step", "layer", "model_layer", "phase", "expert", "source", "bytes"}


def problem_of(schedule: str = "accumulate") -> foremoe.Problem:
    work = foremoe.synthetic_workload("gpt-oss-20b", num_ranks=G, tokens_per_rank=8192, micro_steps=2, regime="mid").layers(
        range(L)
    )
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=G, ranks_per_node=2)
    return foremoe.Problem.of(work, cluster, redundant=1, schedule=foremoe.Schedule.parse(schedule, 2))


@pytest.mark.parametrize("schedule", ["accumulate", "accumulate+reforward", "1f1b:2,0"])
def test_a_trace_keeps_the_format_s_rules(schedule):
    problem = problem_of(schedule)
    static, plan = foremoe.Planner(rank=()).plan(problem)[0], foremoe.Planner().plan(problem)[0]
    runs = {"static": (static, simulate(problem, static)), "planned": (plan, simulate(problem, plan))}
    made = trace(runs).to_dict()
    slices = check_trace(json.loads(json.dumps(made)))
    assert {e["pid"] for e in slices} == {1, 2}
    copies = [e for e in slices if e["name"].startswith("expert ") and "layer" in e["name"]]
    assert len(copies) == len(plan.transfers) > 0
    ends_us = np.sort([e["ts"] + e["dur"] for e in copies])
    assert np.allclose(ends_us, np.sort(runs["planned"][1].copy_end_C) * 1e6, atol=2e-3)
    assert sum(e["ph"] == "s" for e in made["traceEvents"]) == len(copies)
    assert {key for e in copies for key in e["args"]} == COPY_ARGS
    ranks = [e for e in made["traceEvents"] if e["name"] == "thread_name" and e["args"]["name"] == "rank 3"]
    computed_us = sum(e["dur"] for e in slices if e["name"] == "expert compute" and (e["pid"], e["tid"]) == (2, ranks[1]["tid"]))
    if schedule != "accumulate+reforward":
        assert computed_us == pytest.approx(runs["planned"][1].compute_UG[:, 3].sum() * 1e6, rel=1e-3)


def test_counters_say_skew_and_bytes_in_flight():
    problem = problem_of()
    plan, _ = foremoe.Planner().plan(problem)
    run = simulate(problem, plan)
    events = [e for e in trace({"planned": (plan, run)}).to_dict()["traceEvents"] if e["ph"] == "C"]
    skews = [e["args"]["max / mean"] for e in events if e["name"] == "skew" and e["args"]["max / mean"]]
    assert np.allclose(skews, plan.skew_ML[run.micro_step_U, run.layer_U], atol=1e-4)
    for name, start_X, end_X, size in (
        ("weights in flight", run.copy_start_C, run.copy_end_C, problem.model.expert_bytes),
        ("gradients in flight", run.return_start_A, run.return_end_A, problem.model.gradient_bytes),
    ):
        mine = [e for e in events if e["name"] == name]
        at_s, held = (np.array([e["ts"] for e in mine]) / 1e6, np.array([e["args"]["bytes"] for e in mine]))
        assert held[-1] == 0 and (held >= 0).all() and held.max() > 0
        # The area under the counter is bytes times seconds of all copies.
        assert (held[:-1] * np.diff(at_s)).sum() == pytest.approx(size * (end_X - start_X).sum(), rel=1e-3)


def test_a_simulation_of_another_plan_is_refused():
    problem = problem_of()
    static, plan = foremoe.Planner(rank=()).plan(problem)[0], foremoe.Planner().plan(problem)[0]
    with pytest.raises(InputError, match="belongs to another plan"):
        trace({"planned": (plan, simulate(problem, static))})


def test_levels_keep_spans_apart():
    assert levels([(0, 3), (1, 2), (2, 4), (3, 5), (3, 6)]) == [0, 1, 1, 0, 2]


def test_rules_find_what_breaks_them():
    out = TraceEvents()
    out.process(1, "p")
    out.track(1, 0, "t")
    out.slice((1, 0), "a", 0.0, 2.0)
    out.slice((1, 0), "b", 1.0, 3.0)
    with pytest.raises(AssertionError):
        check_trace(out.to_dict())


def test_the_command_writes_both_runs(tmp_path):
    path = tmp_path / "out.json.gz"
    case = ["--synthetic", "gpt-oss-20b", "--ranks", "4", "--tokens-per-rank", "256", "--micro-steps", "2", "--layers", "0:3"]
    done = CliRunner().invoke(main, ["simulate", *case, "--planners", "static,foremoe", "--trace", str(path)])
    assert done.exit_code == 0, done.stderr
    assert "static and foremoe" in done.stdout
    check_trace(json.loads(gzip.decompress(path.read_bytes())))
    for more, names in (
        (["--pp", "2"], [f"{name}, pipeline rank {rank}" for name in ("static", "foremoe") for rank in (0, 1)]),
        (["--vpp", "3", "--micro-steps", "3"], ["static", "foremoe"]),
    ):
        done = CliRunner().invoke(main, ["simulate", *case, *more, "--planners", "static,foremoe", "--trace", str(path)])
        assert done.exit_code == 0, done.stderr
        made = json.loads(gzip.decompress(path.read_bytes()))
        slices = check_trace(made)
        assert [e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"] == names
        # All layers are there, each on one pipeline rank, and a later rank begins later.
        first = {pid: min(e["ts"] for e in slices if e["pid"] == pid) for pid in {e["pid"] for e in slices}}
        layers = [(e["pid"], e["args"]["model_layer"]) for e in slices if e["pid"] <= len(names) // 2 and "args" in e]
        assert sorted(layer for _, layer in set(layers)) == [0, 1, 2]
        assert len(names) == 2 or (first[1] < first[2] and first[3] < first[4])
    done = CliRunner().invoke(main, ["simulate", *case, "--planners", "static", "--trace", str(path)])
    assert done.exit_code != 0 and "other than static" in done.stderr


def test_a_measured_timeline_becomes_a_trace():
    pytest.importorskip("torch")
    from foremoe.transfer.timeline import Event, Timeline

    event = Event("weights", 0, 1, 2, 0, "Collective", 1000, 0.001, 0.004, 0.002, "done")
    late = event._replace(kind="gradient", src_rank=-1, start_s=0.002, ready_s=0.006)
    lost = event._replace(outcome="missing", exposed_s=0.0)
    made = Timeline(rank=3, begin_s=0.0, wall_s=0.01, events=(event, late, lost)).to_trace(begin_s=1.0).to_dict()
    slices = check_trace(made)
    assert {e["pid"] for e in slices} == {3}
    # Two copies, and the two stalls before their ends.
    assert sorted(e["ts"] for e in slices) == [1001000.0, 1002000.0, 1002000.0, 1004000.0]
    assert Timeline(rank=0, begin_s=0.0, wall_s=1.0).to_trace().to_dict()["traceEvents"]
