"""Small files with large sizes: what reads them and what is worked out of them keeps the byte budget or refuses in a sentence."""

from __future__ import annotations

import base64
import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from limits import limited
from safetensors.numpy import save

import foremoe
from foremoe.base import budget
from foremoe.base.errors import InputError
from foremoe.cli.figures import plan_figures, popularity, trace_figures, trace_text, workload_figures, workload_text
from foremoe.cli.files import history_load
from foremoe.cli.main import main
from foremoe.plan.files import load_plan
from foremoe.plan.plan import Plan
from foremoe.routing.readers.counting import count_pairs
from foremoe.routing.trace import RoutingTrace
from foremoe.solvers.pack.balanced_tokens import BalancedTokens
from foremoe.solvers.pack.expert_aware import ExpertAware
from foremoe.workload import Workload, count_workload, from_routed_experts

# The law of docs/reliability.md, with a smaller fixed sum, so that what breaks it is seen at little cost.
FULL, FREE, PER_BYTE, FIXED = budget.FREE_BYTES, 2**20, 64, 48 * 2**20
SMALL, LARGE = st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 4, 64, 1024, 2048, 32767])
FEW = settings(max_examples=20, phases=[Phase.generate])  # sizes are few: nothing to shrink, and a failure costs memory


@pytest.fixture(scope="module", autouse=True)
def smaller_budget():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "FREE_BYTES", FREE)
        yield


def within(num_bytes: int, *uses: Callable[[], Any]) -> None:
    """Each use works or refuses, and takes no more than the law allows for a file of `num_bytes`."""
    for use in uses:
        tracemalloc.start()
        try:
            with limited(1024, 300):  # enough to compile, too, where nothing is compiled yet
                use()
        except InputError as error:
            assert str(error).isprintable() and len(str(error)) < 2500
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < FIXED + 8 * FREE + PER_BYTE * num_bytes, f"{peak / 1e6:.0f} MB of {num_bytes} bytes"


@FEW
@given(T=SMALL, L=LARGE, K=SMALL, E=LARGE, G=LARGE, one_each=st.booleans(), suffix=st.sampled_from([".npz", ".safetensors"]))
def test_traces(tmp_path_factory, T, L, K, E, G, one_each, suffix):
    assume(T * L * K < 2**17 and K <= E and L < 3000)
    path = tmp_path_factory.mktemp("t") / f"trace{suffix}"
    arrays = {
        "topk_ids": np.broadcast_to(np.arange(K, dtype=np.uint8), (T, L, K)).copy(),
        "seq_len": np.ones(T, np.int64) if one_each else np.array([T]),
        "num_experts": np.array(E),
    }
    if suffix == ".npz":
        np.savez(path, **arrays)
    else:
        path.write_bytes(save(arrays))
    trace, G = RoutingTrace.load(path), min(G, E)

    def dealt(packer=None):
        workload_text(workload_figures(Workload.from_trace(trace, num_ranks=G, tokens_per_rank=1, packer=packer)))

    work = Workload.from_counts(np.ones((1, 1, 1, E), np.int32), num_topk=1)
    within(
        path.stat().st_size,
        lambda: RoutingTrace.load(path), lambda: trace_text(trace_figures(trace)), dealt, lambda: dealt(ExpertAware()),
        lambda: dealt(BalancedTokens()), lambda: history_load(str(path), work, None),
        lambda: count_pairs(trace.topk_TLK, E),
    )  # fmt: skip


@FEW
@given(shape=st.sampled_from([(1, 1, 4, 8192), (1, 2, 64, 1024), (2, 8, 8, 64)]).flatmap(st.permutations))
def test_workloads(tmp_path_factory, shape):
    M, L, G, E = shape
    path = tmp_path_factory.mktemp("w") / "work.safetensors"
    Workload.from_counts(np.ones((M, L, G, E), np.int32), num_topk=1).save(path)
    work = Workload.load(path)
    within(path.stat().st_size, lambda: Workload.load(path), lambda: workload_text(workload_figures(work)))


def a_plan(M: int, L: int, G: int, B: int, R: int, slot_depth: int) -> Plan:
    """A plan of these sizes that serves nothing, made without a planner."""
    E, cost = G * B, foremoe.CostModel(objective="balance")
    counts = Workload.from_counts(np.zeros((1, 1, 1, 8), np.int32), num_topk=2)
    cluster = foremoe.Cluster.preset("8xh100", 1)
    problem = foremoe.Problem.of(counts, cluster, model=foremoe.Model.preset("mixtral-8x7b"), redundant=0, cost=cost)
    small, _ = foremoe.Planner(rank=()).plan(problem)
    header = dataclasses.replace(
        small.header, model=dataclasses.replace(problem.model, num_experts=E, num_layers=L, num_topk=1), slot_depth=slot_depth,
        cluster=foremoe.Cluster.preset("8xh100", G), schedule=foremoe.Schedule.accumulate(M), redundant=R,
        moe_layer_L=np.arange(L),
    )  # fmt: skip
    expert_MLGS = np.full((M, L, G, B + R), -1, np.int16)
    expert_MLGS[..., :B] = np.arange(E).reshape(G, B)
    return dataclasses.replace(
        small, header=header, home_LE=np.tile(np.arange(E), (L, 1)), load_MLE=np.zeros((M, L, E), np.int32),
        expert_MLGS=expert_MLGS, quota_MLGS=np.zeros_like(expert_MLGS),
        cost_ML=small.cost_ML.each(lambda part_ML: np.zeros((M, L))), bound_ML=np.zeros((M, L)),
        load_bound_ML=np.zeros((M, L)), stop_ML=np.zeros((M, L), np.uint8),
    )  # fmt: skip


PLANS = st.sampled_from([(1, 1, 1024), (4, 32, 512), (1, 1, 16000), (2, 64, 64)]).flatmap(st.permutations)


@FEW
@given(shape=PLANS, M=SMALL, B=SMALL, depth=st.sampled_from([3, 1024]))
def test_plans(tmp_path_factory, shape, M, B, depth):
    L, G, R = shape
    assume(G * B < 2**15)
    path = tmp_path_factory.mktemp("p") / "plan.safetensors"
    a_plan(M, L, G, B, R, depth).save(path)

    def used():
        plan = load_plan(path)
        plan.violations()
        plan_figures(plan), plan.summary(), plan.explain(0, 0)

    within(path.stat().st_size, used)


def test_a_plan_of_these_sizes_is_read_where_they_are_few(tmp_path):
    a_plan(2, 3, 4, 2, 1, 3).save(tmp_path / "plan.safetensors")
    assert Plan.load(tmp_path / "plan.safetensors").checked


@FEW
@given(T=SMALL, L=LARGE, K=SMALL, E=LARGE, M=SMALL, G=LARGE, length=st.sampled_from([None, 9, 2**20, 2**24]), Q=SMALL)
def test_payloads(T, L, K, E, M, G, length, Q):
    assume(T * L * K < 2**15 and K <= E)
    ids_TLK = np.broadcast_to(np.arange(K, dtype=np.uint8), (T, L, K))
    payload = {"data": base64.b64encode(ids_TLK.tobytes()).decode(), "shape": [T, L, K], "dtype": "uint8"}
    unknown = [] if length is None else [{"routed_experts": None, "prompt_tokens": length, "completion_tokens": 0}] * Q
    for payloads in ([payload, *unknown], [*unknown, payload], [ids_TLK.tolist(), *unknown], unknown or [payload]):
        places = {"micro_step_Q": np.arange(len(payloads)) % M, "rank_Q": np.zeros(len(payloads), int), "num_micro_steps": M}
        within(
            len(str(payloads)),
            lambda given=payloads: from_routed_experts(given, num_experts=E),
            lambda given=payloads, places=places: count_workload(given, num_ranks=G, num_experts=E, **places),
        )


def test_real_sizes_are_far_within_the_budget(monkeypatch):
    """61 layers, 256 experts, a million tokens on 64 ranks; and the widest EP group that fits 512 experts."""
    monkeypatch.setattr(budget, "FREE_BYTES", FULL)
    tokens, ids = 10**6, 10**6 * 61 * 8
    for ranks, tokens_per_rank in ((64, 4096), (64, 256), (256, 1024)):
        micro_steps = -(-tokens // (ranks * tokens_per_rank))
        budget.require_budget(4 * micro_steps * 61 * ranks * 256, "counts", "-", ids)
    for layers, experts in ((48, 512), (60, 384), (61, 256)):
        budget.require_budget(4 * layers * experts * experts, "tables of a plan", "-", 0)


def test_the_command_line_works_layer_by_layer(tmp_path):
    """638 bytes that say 8,000 layers of 32,767 experts took 9 GB."""
    path = tmp_path / "trace.npz"
    np.savez_compressed(path, topk_ids=np.zeros((1, 2000, 1), np.uint8), seq_len=np.array([1]), num_experts=32767)
    found = []
    within(path.stat().st_size, lambda: found.append(CliRunner().invoke(main, ["inspect", str(path), "--json"])))
    figures = json.loads(found[0].stdout)["popularity"]
    assert figures["never_chosen"] == 2000 * 32766 and figures["hottest"][4] == {"layer": 4, "expert": 0, "over_mean": 32767.0}
    found = CliRunner().invoke(main, ["inspect", str(path), "--ranks", "1"])
    assert found.exit_code == 2 and "counts of 1 micro-steps x 2000 layers x 1 ranks x 32767 experts take 262 MB" in found.stderr


def test_popularity_is_that_of_all_layers_at_once():
    rng = np.random.default_rng(0)
    load_LE = rng.integers(0, 4, (40, 9))
    load_LE[3] = 0
    over_LE = load_LE / np.maximum(load_LE.mean(axis=1, keepdims=True), 1e-300)
    order = np.argsort(-over_LE.ravel(), kind="stable")[:5]
    found = popularity(iter(load_LE))
    assert [(one["layer"], one["expert"]) for one in found["hottest"]] == [divmod(int(at), 9) for at in order]
    assert found["hottest_over_mean"] == {"mean": over_LE.max(axis=1).mean(), "max": over_LE.max()}
    assert found["never_chosen"] == (load_LE == 0).sum()
