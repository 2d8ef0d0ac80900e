"""Rerouted: totals stay, a share changes, the same by seed; plans for it are served by the law that the runtime follows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foremoe
from foremoe import InputError, Planner, Rerouted
from foremoe.plan.split import split_over_sources
from foremoe.planner.start import served
from foremoe.problem.foresight import foreseen, require_foresight
from foremoe.problem.problem import Problem
from foremoe.solvers import Greedy
from foremoe.synthetic import synthetic_workload
from foremoe.testing import strategies as draws

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, S slots, P = G*S, E experts, T tokens, K top-k.

VIEWS = st.builds(Rerouted, st.floats(0, 1), st.sampled_from(["swap", "redraw"]), st.integers(0, 2**32))


@given(VIEWS, draws.problems(sources=True), st.integers(1, 4))
def test_every_source_keeps_its_pairs_whatever_changes(view: Rerouted, problem: Problem, num_topk: int) -> None:
    load_MLGE = problem.load_MLGE
    assert load_MLGE is not None
    changed_MLGE = view.counts(load_MLGE, num_topk)
    assert changed_MLGE.min() >= 0 and (changed_MLGE.sum(axis=3) == load_MLGE.sum(axis=3)).all()
    assert (view.counts(load_MLGE, num_topk) == changed_MLGE).all(), "the draw follows from the seed"
    assert (view.counts(load_MLGE[:1], num_topk) == changed_MLGE[:1]).all(), "and not from the number of micro-steps"
    most = num_topk if view.how == "redraw" else 1
    moved_MLG = np.abs(changed_MLGE - load_MLGE).sum(axis=3) // 2
    assert (moved_MLG <= load_MLGE.sum(axis=3) // num_topk * most).all()


@given(st.sampled_from(["swap", "redraw"]), draws.problems())
def test_no_share_is_exact_foresight(how: str, problem: Problem) -> None:
    exact, _ = Planner(rank=(Greedy(),)).plan(problem)
    plan, _ = Planner(rank=(Greedy(),), foresight=Rerouted(0.0, how)).plan(problem)
    for field in ("expert_MLGS", "quota_MLGS", "bound_ML"):
        assert np.array_equal(getattr(plan, field), getattr(exact, field))
    assert foreseen(problem, Rerouted(0.0, how), None) is problem
    if problem.load_MLGE is not None:
        assert np.array_equal(Rerouted(0.0, how).counts(problem.load_MLGE, 2), problem.load_MLGE)


@given(VIEWS, draws.problems())
def test_plans_for_other_routing_are_valid_and_served_in_full(view: Rerouted, problem: Problem) -> None:
    plan, _ = Planner(rank=(Greedy(),), foresight=view).plan(problem)
    plan.check(problem)


@given(st.data(), st.integers(0, 2**32 - 1))
def test_counts_are_served_as_remap_serves_tokens(data: st.DataObject, seed: int) -> None:
    """Any valid placement of one load, any other load: source by source what `remap` does with its pairs, in any order."""
    torch = pytest.importorskip("torch", reason="ranks remap tensors")
    from foremoe.runtime import remap

    problem = data.draw(draws.problems(sources=True, max_micro_steps=2, max_layers=2, max_pairs=12))
    plan = data.draw(draws.plans(problem))
    rng = np.random.default_rng(seed)
    other_MLGE = rng.integers(0, 13, problem.load_MLGE.shape).astype(np.int32)
    other = dataclasses.replace(problem, load_MLE=other_MLGE.sum(axis=2, dtype=np.int32), load_MLGE=other_MLGE)
    served_NP = np.zeros((problem.N, problem.G * problem.S), np.int64)
    rank_LE, slot_LE = np.divmod(problem.home_LE, problem.B)
    for g in range(problem.G):
        node_G = problem.cluster.node_of_rank_G
        split_NP = split_over_sources(problem.load_NGE, plan.expert_NGS, plan.quota_NGS, node_G, g)
        for n in range(problem.N):
            pairs_Z = rng.permutation(np.repeat(np.arange(problem.E), other.load_NGE[n, g]))
            home_E = (rank_LE * problem.S + slot_LE)[n % problem.L]
            tables = (pairs_Z[:, None], split_NP[n], plan.expert_NGS[n].ravel(), home_E)
            slot_Z1, _ = remap(*(torch.from_numpy(np.array(table, np.int64)) for table in tables))
            served_NP[n] += np.bincount(slot_Z1[:, 0].numpy(), minlength=served_NP.shape[1])
    placement = plan.placement
    assert np.array_equal(served(other, problem, placement).quotas_NGS.reshape(served_NP.shape), served_NP)


@given(VIEWS, st.integers(1, 40), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_choices_stay_distinct_and_unknown_ones_unknown(view: Rerouted, T: int, L: int, E: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    K = int(rng.integers(1, E + 1))
    topk_TLK = np.argsort(rng.random((T, L, E)), axis=2)[..., :K].astype(np.int16)
    topk_TLK[rng.random(T) < 0.2] = -1
    changed_TLK = view.choices(topk_TLK)
    assert changed_TLK.dtype == topk_TLK.dtype and np.array_equal(view.choices(topk_TLK), changed_TLK)
    assert np.array_equal(changed_TLK == -1, topk_TLK == -1)
    ordered_TLK = np.sort(changed_TLK[topk_TLK[:, 0, 0] >= 0], axis=2)
    assert (ordered_TLK[..., 1:] > ordered_TLK[..., :-1]).all() and np.isin(changed_TLK, topk_TLK).all()
    if view.how == "swap":
        assert ((changed_TLK != topk_TLK).sum(axis=2) <= 1).all()
    if view.share == 0:
        assert np.array_equal(changed_TLK, topk_TLK)


@pytest.mark.parametrize("how", ["swap", "redraw"])
def test_counts_follow_what_happens_to_tokens(how: str) -> None:
    """The two models agree on the mean load after half of all choices changed; each source has its own favourites."""
    rng = np.random.default_rng(0)
    weight_GE, sizes = rng.lognormal(0, 1, (3, 16)), (3000, 2000, 1000)
    parts = zip(weight_GE, sizes, strict=True)
    topk_TLK = np.concatenate([np.argsort(np.log(w_E) + rng.gumbel(size=(T, 1, 16)))[..., -4:] for w_E, T in parts])
    source_T = np.repeat(np.arange(3), sizes)

    def counts(topk_TLK: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(topk_TLK[source_T == g].ravel(), minlength=16) for g in range(3)])

    load_GE = counts(topk_TLK)
    by_tokens = np.mean([counts(Rerouted(0.5, how, s).choices(topk_TLK)) for s in range(20)], axis=0)
    by_counts = np.mean([Rerouted(0.5, how, s).counts(load_GE[None, None], 4)[0, 0] for s in range(20)], axis=0)
    assert np.abs(by_tokens - load_GE).sum() > 200
    assert np.abs(by_tokens - by_counts).sum() < 0.25 * np.abs(by_tokens - load_GE).sum()
    assert ((Rerouted(0.5, how).choices(topk_TLK) != topk_TLK).any(axis=2).mean()) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("view", "limit"), [(Rerouted(0.1), 1.02), (Rerouted(0.1, "redraw"), 1.02), (Rerouted(1.0), 1.12)])
def test_at_real_sizes_skew_as_served_is_near_the_plans(view: Rerouted, limit: float) -> None:
    """10 % of the choices changed: within 2 % of what the plan has on the routing that it was made for."""
    work = synthetic_workload("qwen3-30b-a3b", num_ranks=16, tokens_per_rank=4096, micro_steps=2, num_layers=3, regime="mid")
    cost = foremoe.CostModel(objective="balance")
    problem = Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=16), cost=cost)
    hint = foreseen(problem, view, None)
    planned, _ = Planner().plan(hint)
    plan, _ = Planner(foresight=view).plan(problem)
    assert (plan.skew_ML <= limit * planned.skew_ML).all()
    static, _ = Planner(rank=()).plan(problem)
    assert plan.skew_ML.mean() < 0.7 * static.skew_ML.mean()


def test_what_is_refused() -> None:
    for options in ({"share": 1.1}, {"share": -0.1}, {"how": "shuffle"}, {"seed": -1}):
        with pytest.raises(InputError):
            Rerouted(**options)
    require_foresight(Rerouted())
    with pytest.raises(InputError, match=r"Noisy\(drift\) or Rerouted\(share\)"):
        require_foresight("rerouted")
