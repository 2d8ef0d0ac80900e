"""Nothing unknown looks perfect: traces without routing, a few known sequences, empty micro-steps, and repeated rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import foremoe
from foremoe.workload.skew import mean_skew

T, L, K, E, G = 6, 4, 4, 16, 2


def payload(seed: int) -> np.ndarray:
    return np.argsort(np.random.default_rng(seed).random((T, L, E)), axis=2)[:, :, :K].astype(np.int16)


def read(payloads: list[np.ndarray | None]) -> foremoe.RoutingTrace:
    return foremoe.from_routed_experts(
        payloads, num_experts=E, num_topk=K, moe_layer_L=np.arange(L), lengths=[T] * len(payloads)
    )[0]


def problem_of(work: foremoe.Workload) -> foremoe.Problem:
    model = dataclasses.replace(foremoe.Model.preset("qwen3-30b-a3b"), num_layers=L, num_experts=E, num_topk=K)
    return foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=G), model=model)


def test_a_rollout_without_any_routing_is_refused() -> None:
    trace = read([None] * 64)
    with pytest.raises(foremoe.InputError, match="none of the 384 tokens has a known routing"):
        foremoe.Workload.from_trace(trace, num_ranks=G, tokens_per_rank=100)


def test_the_share_that_is_not_known_is_told() -> None:
    trace = read([payload(0), *[None] * 63])
    work = foremoe.Workload.from_trace(trace, num_ranks=G, tokens_per_rank=500)
    _, summary = foremoe.Planner().plan(problem_of(work))
    assert summary.unknown_share == pytest.approx(63 / 64)
    known = foremoe.Workload.from_trace(read([payload(0), payload(1)]), num_ranks=G, tokens_per_rank=500)
    assert foremoe.Planner().plan(problem_of(known))[1].unknown_share == 0.0


def test_an_empty_micro_step_is_in_no_mean() -> None:
    full = foremoe.Workload.from_trace(read([payload(0), payload(1)]), num_ranks=G, tokens_per_rank=T)
    load_MLGE = np.concatenate([full.load_MLGE, np.zeros_like(full.load_MLGE)])
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=K)
    assert foremoe.skew_statistics(work)["skew_mean"] == foremoe.skew_statistics(full)["skew_mean"] > 1.0
    plans = [foremoe.resolve("static").plan(problem_of(one))[0] for one in (full, work)]
    assert plans[0].skew_mean == plans[1].skew_mean
    assert plans[1].skew_ML[1].tolist() == [1.0] * L  # though each such row is level
    lines = [plan.summary().splitlines()[1] for plan in plans]
    assert lines[0] == lines[1]
    compared = [foremoe.compare(problem_of(one), {"static": foremoe.resolve("static")})[0]["skew_mean"] for one in (full, work)]
    assert compared[0] == compared[1]


def test_no_load_at_all_is_level() -> None:
    assert mean_skew(np.zeros((3, 2))) == 1.0


def test_repeated_rows_are_counted_but_not_over_the_end_of_a_sequence() -> None:
    again = np.repeat(payload(0)[:1], T, axis=0)
    assert read([payload(1), again]).num_repeats() == T - 1
    assert read([again[:1].repeat(T, 0), again]).num_repeats() == 2 * (T - 1)
    assert read([payload(1), payload(2)]).num_repeats() == 0
    assert read([again, None]).num_repeats() == T - 1  # rows that are not known say nothing
