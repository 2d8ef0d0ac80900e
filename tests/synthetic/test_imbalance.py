"""The eight imbalances: exact pairs, distinct experts, and the one cause that each is named after."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foremoe
from foremoe.base.errors import InputError
from foremoe.synthetic import IMBALANCES, imbalance_workload
from foremoe.synthetic.imbalance import distinct_counts
from foremoe.workload.workload import Workload

G, TOKENS, M = 8, 512, 8


def workload(name: str, model: str = "qwen3-30b-a3b", **options: object) -> Workload:
    sizes = {"num_ranks": G, "tokens_per_rank": TOKENS, "micro_steps": M, "num_layers": 2} | options
    return imbalance_workload(model, name, **sizes)  # type: ignore[arg-type]


def rank_skew(work: Workload) -> np.ndarray:
    """[M, L]: largest over mean load of ranks with contiguous homes."""
    load_MLG = work.load_MLE.reshape(work.M, work.L, work.G, -1).sum(axis=3)
    return load_MLG.max(axis=2) / load_MLG.mean(axis=2)


def heat(work: Workload) -> np.ndarray:
    """[M, L]: largest over mean load of experts."""
    return work.load_MLE.max(axis=2) / work.load_MLE.mean(axis=2)


@pytest.mark.parametrize("name", IMBALANCES)
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_pairs_are_exact_and_no_expert_gets_two_of_a_token(name: str, model: str) -> None:
    work = workload(name, model)
    topk = foremoe.Model.preset(model).num_topk
    assert (work.load_MLGE.sum(axis=3) == topk * work.tokens_MG[:, None]).all()
    assert (work.load_MLGE <= work.tokens_MG[:, None, :, None]).all()
    assert work.tokens_MG.sum() == M * G * TOKENS and not work.unknown_ML.any()
    assert work.same_as(workload(name, model)) and workload(name, model, seed=1).same_as(work) == (name == "balanced")
    assert (workload(name, model, num_layers=1).load_MLGE == work.load_MLGE[:, :1]).all()


def test_each_has_its_cause() -> None:
    made = {name: workload(name) for name in IMBALANCES}
    # Three quarters of the tokens on a quarter of the experts, and their share of the rest: 3.25 times the mean.
    for name in ("hot-expert-set", "hot-rank", "spread-hot-experts", "rotating-hot-spot"):
        assert heat(made[name]).mean() == pytest.approx(3.25, rel=0.1), name
    assert (heat(made["balanced"]) - 1 < 1e-3).all()
    assert rank_skew(made["hot-rank"]) == pytest.approx(3.25, rel=0.05)
    assert rank_skew(made["spread-hot-experts"]) == pytest.approx(1.0, abs=0.05)
    assert (rank_skew(made["hot-expert-set"]) > 1.1).all() and (rank_skew(made["hot-expert-set"]) < 3).all()
    assert (np.diff(made["ragged-sources"].tokens_MG) < 0).all() and made["ragged-sources"].tokens_MG[0, 0] == 768
    assert rank_skew(made["ragged-sources"]) == pytest.approx(1.0, abs=0.05)
    assert not made["idle-rank"].load_MLE[..., :64].any() and made["idle-rank"].load_MLE[..., 64:].all()
    spot_M = made["rotating-hot-spot"].load_MLE[:, 0].reshape(M, 4, 32).sum(axis=2).argmax(axis=1)
    assert spot_M.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    burst_M = rank_skew(made["burst"])[:, 0]
    assert burst_M[[3, 7]] == pytest.approx(2.5, rel=0.05) and np.delete(burst_M, [3, 7]) == pytest.approx(1.0, abs=0.05)


def test_a_single_rank_is_not_ragged() -> None:
    assert workload("ragged-sources", num_ranks=1).tokens_MG.tolist() == [[TOKENS]] * M


def test_draws_of_distinct_experts_are_uniform_over_sets() -> None:
    """One token draws every set of 2 of 4 equally often; of many tokens, counts spread as those of drawn sets do."""
    rng = np.random.default_rng(0)
    found_XP = distinct_counts(rng, np.ones(60_000, np.int64), 4, 2)
    sets, times = np.unique(found_XP, axis=0, return_counts=True)
    assert len(sets) == len(list(itertools.combinations(range(4), 2))) and abs(times - 10_000).max() < 500
    counts_XP = distinct_counts(rng, np.full(20_000, 30), 6, 2)
    # A third of the tokens take an expert; two experts share a token with chance 1/15.
    covariance = np.cov(counts_XP.T)
    assert np.diag(covariance) == pytest.approx(30 * (1 / 3) * (2 / 3), rel=0.05)
    assert covariance[~np.eye(6, dtype=bool)] == pytest.approx(30 * (1 / 15 - 1 / 9), rel=0.1)


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 8), st.integers(0, 1000))
def test_draws_keep_their_totals(tokens: int, num_experts: int, num_topk: int, seed: int) -> None:
    num_topk = min(num_topk, num_experts)
    load_XP = distinct_counts(np.random.default_rng(seed), np.array([tokens, 1]), num_experts, num_topk)
    assert load_XP.sum(axis=1).tolist() == [tokens * num_topk, num_topk] and (load_XP <= [[tokens], [1]]).all()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InputError, match="choose one of balanced, hot-expert-set"):
        workload("mid")
