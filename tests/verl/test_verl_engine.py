"""veRL's own Megatron engine gives the same with foremoe as without: log-probs, losses, gradient norms, weights."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import dataclasses

import numpy as np
import pytest
import torch
from program import K, Layout
from verl_arms import run

from foremoe.integrations.settings import Settings
from foremoe.problem.foresight import Rerouted

STEPS = 2
# Toy sizes gain no predicted time from a replica.
SETTINGS = Settings(cost="balance", debug=True)
CASES = {
    "R3-EP4": ("R3", Layout(ep=4)),
    "R3-PP2xEP2-full": ("R3", Layout(ep=2, pp=2, num_layers=4, recompute="full")),
    "R3-TP2xEP4-full": ("R3", Layout(ep=4, tp=2, recompute="full")),
    "R2-EP2xEDP2-full": ("R2", Layout(ep=2, recompute="full")),
    "R3-EP2xEDP2-dense": ("R3", Layout(ep=2, num_layers=3, dense=(0,))),
    "R2-TP2xEP4": ("R2", Layout(ep=4, tp=2)),
    "R3-EP4-deepep": ("R3", Layout(ep=4, dispatcher="deepep")),
}


@pytest.fixture(scope="module", params=list(CASES))
def arms(request, pool):
    mode, layout = CASES[request.param]
    plain = pool.run(run, layout, mode, None, STEPS, timeout_s=120, limit_s=900)
    planned = pool.run(run, layout, mode, SETTINGS, STEPS, timeout_s=120, limit_s=900)
    return mode, layout, plain, planned


def test_same_log_probs_losses_gradients_and_weights(arms):
    require_same(*arms[2:])


def require_same(plain, planned):
    compared = 0
    for a, b in zip(plain, planned, strict=True):
        assert b.engine == "ForeMoEEngine"
        for x, y in zip(a.log_probs, b.log_probs, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                compared += 1
                # Summation order differs, in float32; Adam divides by square roots of gradients that may be tiny.
                torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)
        for x, y in zip(a.losses, b.losses, strict=True):
            assert y == (None if x is None else pytest.approx(x, rel=1e-5))
        for x, y in zip(a.grad_norms, b.grad_norms, strict=True):
            assert y == (None if x is None else pytest.approx(x, rel=1e-4))  # veRL has it on one rank of a model copy
        for name, weight in a.weights.items():
            torch.testing.assert_close(b.weights[name], weight, rtol=0, atol=2e-4)
    assert compared


def test_slots_serve_what_the_plan_says_and_drift_is_counted_exactly(arms):
    mode, layout, _, planned = arms
    planned_stages = 0
    for stage in range(2 * STEPS):
        for group in ep_groups(planned, layout):
            reports = [member.reports[stage] for member in group]
            if reports[0] is None:
                assert mode == "R2" and stage % 2 == 0, "only R2's recording pass runs without a plan"
                continue
            planned_stages += 1
            plan = reports[0].plan
            assert plan.num_replicas > 0 and float(plan.skew_ML.mean()) < 1.05
            home_MLG = plan.load_MLE.reshape(plan.M, plan.L, plan.G, -1).sum(axis=3)
            assert float((home_MLG.max(2) / home_MLG.mean(2)).mean()) > 1.05, "there should be something to balance"
            drift_ML = sum(report.drift_ML for report in reports)
            served_MLGS = np.stack([report.served_MLS for report in reports], axis=2)
            excess = served_MLGS - plan.quota_MLGS
            # Replayed pairs meet every quota; what veRL lets the router choose goes to homes.
            assert (excess >= 0).all() and (excess[..., plan.B :] == 0).all()
            np.testing.assert_array_equal(excess.sum(axis=(2, 3)), drift_ML)
            native_M = np.sum([member.native[stage] for member in group], axis=0)
            np.testing.assert_array_equal(drift_ML.sum(axis=1), native_M)
            if mode == "R3":
                assert (drift_ML >= K).all(), "the last row of every sequence is routed by the model"
    assert planned_stages


def test_all_rows_go_by_known_routes_once_their_kind_of_stage_has_been_compared(arms):
    """The model routes the last token of each sequence; padding for tensor parallelism has one expert several times."""
    for member in arms[3]:
        first, second = member.reports[:2], member.reports[2:]
        for report in filter(None, first):
            assert report.known_rows == 0 and report.counted_rows["first"] == report.plan.N
        for report in filter(None, second):
            assert report.known_rows == report.plan.N, report.counted_rows


def test_metrics_are_in_verls_dictionary(arms):
    mode, _, _, planned = arms
    recompute, update = next((m.metrics[0], m.metrics[1]) for m in planned if m.metrics[1])
    for stage, metrics in (("recompute", recompute), ("update", update)):
        if stage == "recompute" and mode == "R2":
            assert not metrics
            continue
        wanted = ("plan_s", "begin_exposed_s", "exposed_s", "drift", "slot_bytes", "received_bytes", "replicas")
        assert {f"foremoe/{stage}/{name}" for name in wanted} <= set(metrics)
        assert metrics[f"foremoe/{stage}/unplanned"] == 0.0
        assert metrics[f"foremoe/{stage}/skew_after"] < metrics[f"foremoe/{stage}/skew_before"]


def test_metrics_are_those_of_all_stages_and_ranks_of_a_model_copy(arms):
    _, layout, _, planned = arms
    told = 0
    for member, copy in zip(planned, copies(planned, layout), strict=True):
        for stage, metrics in enumerate(member.metrics):
            if not metrics:
                continue
            told += 1
            of = {name.rpartition("/")[2]: value for name, value in metrics.items() if "layer_" not in name}
            reports = [[other.reports[stage] for other in group] for group in copy]
            plans, ranks = [group[0].plan for group in reports], [report for group in reports for report in group]
            assert of["replicas"] == sum(plan.num_replicas for plan in plans)
            assert of["skew_after"] == pytest.approx(np.mean(np.concatenate([plan.skew_ML.ravel() for plan in plans])))
            assert of["drift"] == sum(report.drift_ML.sum() for report in ranks)
            received = [sum(report.timeline.bytes_by_backend.values()) for report in ranks]
            assert of["received_bytes"] == sum(received) > 0
            assert of["slot_bytes"] == max(report.slot_bytes for report in ranks)
            assert of["plan_s"] == max(report.plan_s for report in ranks)
            assert of["begin_exposed_s"] >= of["plan_s"]
    assert told >= len(planned) // layout.pp // layout.tp


@pytest.mark.parametrize("layout", [Layout(ep=4), Layout(ep=2, pp=2, num_layers=4, recompute="full")], ids=str)
def test_where_routers_do_not_replay_rollouts_routing_is_a_hint(pool, layout):
    """R2 records what routers choose by themselves; a tenth of it is changed, or it is not used at all."""
    limits = {"timeout_s": 120, "limit_s": 900}
    recorded, plain = (pool.run(run, layout, mode, None, STEPS, **limits) for mode in ("R2", "disabled"))
    hints = [[changed(routes, 0.1) for routes in member.routes] for member in recorded]
    far, near = (pool.run(run, layout, "disabled", SETTINGS, STEPS, True, False, each, **limits) for each in (None, hints))
    for planned in (far, near):
        require_same(plain, planned)
    for member in near:
        for report in member.reports:
            home_MLG = report.plan.load_MLE.reshape(*report.plan.load_MLE.shape[:2], layout.ep, -1).sum(axis=3)
            assert report.served_skew_ML.mean() < (home_MLG.max(2) / home_MLG.mean(2)).mean()
    served = [mean_served(members) for members in (near, far)]
    assert 1.0 < served[0] < served[1], "a hint that is nearly true should serve better than one that has nothing to do with it"


def test_with_ten_percent_of_choices_changed_skew_as_served_is_within_two_percent_of_the_plan(pool):
    layout, limits = Layout(ep=4), {"timeout_s": 120, "limit_s": 900}
    recorded = pool.run(run, layout, "R2", None, 1, True, False, None, 40, **limits)
    hints = [[changed(routes, 0.1) for routes in member.routes] for member in recorded]
    for member in pool.run(run, layout, "disabled", SETTINGS, 1, True, False, hints, 40, **limits):
        for report in member.reports:
            assert report.drift_ML.sum() > 0 and (report.served_skew_ML <= 1.02 * report.plan.skew_ML).all()


def mean_served(members):
    """Of all stages, as veRL's logger has it."""
    found = [value for member in members for of in member.metrics for name, value in of.items() if name.endswith("/skew_served")]
    return np.mean(found)


def changed(routes, share):
    """Routes with a share of the (token, layer) choices changed: one expert of each is another, drawn by load."""
    values = routes.values()
    other_TLK = torch.from_numpy(Rerouted(share, seed=0).choices(values.numpy()))
    return torch.nested.nested_tensor_from_jagged(other_TLK.to(values.dtype), offsets=routes.offsets())


def test_a_pipeline_stage_without_experts_runs_along(pool):
    layout = Layout(ep=2, pp=2, num_layers=4, dense=(0, 1))
    plain = pool.run(run, layout, "R3", None, 1, timeout_s=120, limit_s=900)
    planned = pool.run(run, layout, "R3", SETTINGS, 1, timeout_s=120, limit_s=900)
    assert [member.reports[0] is None for member in planned] == [True, True, False, False]
    for a, b in zip(plain, planned, strict=True):
        assert b.grad_norms[0] == (a.grad_norms[0] and pytest.approx(a.grad_norms[0], rel=1e-4))
    assert any(member.metrics[1].get("foremoe/update/replicas", 0) > 0 for member in planned)


@pytest.mark.parametrize("layout", [Layout(ep=4), Layout(ep=2, pp=2, num_layers=4), Layout(ep=4, tp=2)], ids=str)
def test_packing_changes_micro_batches_and_no_result(pool, layout):
    """Samples of several domains: micro-batches that mix them have less skew at home, in all stages together."""
    packing = dataclasses.replace(SETTINGS, packing=True)
    plain, apart, packed = (
        pool.run(run, layout, "R3", settings, STEPS, True, True, timeout_s=120, limit_s=900)
        for settings in (None, SETTINGS, packing)
    )
    changed, skews = 0, []
    for a, b, c in zip(plain, apart, packed, strict=True):
        assert not c.warned
        for x, y in zip(a.log_probs, c.log_probs, strict=True):
            if x is not None:
                torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)  # in the order of the samples
        for x, y in zip(a.losses, c.losses, strict=True):
            assert x is None or (len(x) == len(y) and sum(y) == pytest.approx(sum(x), rel=1e-5))
        for x, y in zip(a.grad_norms, c.grad_norms, strict=True):
            assert y == (None if x is None else pytest.approx(x, rel=1e-4))
        for name, weight in a.weights.items():
            torch.testing.assert_close(c.weights[name], weight, rtol=0, atol=2e-4)
        for x, y in zip(b.reports, c.reports, strict=True):
            assert x.plan.load_MLE.shape == y.plan.load_MLE.shape
            np.testing.assert_array_equal(x.plan.load_MLE.sum(axis=0), y.plan.load_MLE.sum(axis=0))
            changed += (x.plan.load_MLE != y.plan.load_MLE).any()
        for x, y in zip(b.metrics, c.metrics, strict=True):
            for name in x:
                if name.endswith("skew_before"):
                    skews.append((x[name], y[name]))
                    assert y[name.replace("skew_before", "pack_s")] > 0
    assert changed and all(after <= before for before, after in skews)
    assert sum(after for _, after in skews) < sum(before for before, _ in skews)


def test_interleaved_pipeline_recomputes_the_same(pool):
    """Recompute alone: the interleaved schedule of Megatron-Core 0.16.1 deadlocks over gloo in an update, without foremoe too,
    when sequence lengths vary: one stage waits for a tensor, the next for its shape."""
    layout = Layout(ep=2, pp=2, vpp=2, num_layers=4)
    plain = pool.run(run, layout, "R3", None, 1, False, timeout_s=120, limit_s=900)
    planned = pool.run(run, layout, "R3", SETTINGS, 1, False, timeout_s=120, limit_s=900)
    assert any(member.log_probs[0] is not None for member in plain)
    for a, b in zip(plain, planned, strict=True):
        if a.log_probs[0] is not None:
            torch.testing.assert_close(b.log_probs[0], a.log_probs[0], rtol=1e-5, atol=1e-5)
        assert b.reports[0].plan.header.schedule.num_chunks == 2 and b.reports[0].plan.num_replicas > 0


def copies(members, layout):
    """For each rank the runs of its model copy, EP group by EP group: the like of its own in every pipeline rank."""
    groups = list(ep_groups(members, layout))
    per_stage = len(groups) // layout.pp
    return [groups[(rank // layout.ep) % per_stage :: per_stage] for rank in range(len(members))]


def ep_groups(members, layout):
    """The ranks' runs by EP group, as Megatron lays ranks out: pipeline ranks outermost, then EP inside data parallelism."""
    per_stage = len(members) // layout.pp
    for first in range(0, len(members), layout.ep):
        assert first // per_stage == (first + layout.ep - 1) // per_stage
        yield members[first : first + layout.ep]
