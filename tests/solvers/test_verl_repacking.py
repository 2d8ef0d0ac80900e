"""Packing changes which samples of a rank share a micro-batch, and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foremoe.solvers.pack.repack import UNIT, repack

# Letters: Q samples, M micro-batches, J layers, G ranks of the EP group, D data-parallel ranks.


def cost(attention_Q, pairs_QJG, rank_Q, step_Q):
    """Attention of the slowest rank and pairs of the busiest home rank, summed over micro-batches."""
    M, D = step_Q.max() + 1, rank_Q.max() + 1
    attention_MD, load_MJG = np.zeros((M, D), np.int64), np.zeros((M, *pairs_QJG.shape[1:]), np.int64)
    np.add.at(attention_MD, (step_Q, rank_Q), attention_Q)
    np.add.at(load_MJG, step_Q, pairs_QJG)
    return attention_MD.max(axis=1).sum() + UNIT * load_MJG.max(axis=2).sum()


@st.composite
def mini_batches(draw):
    """Samples of several domains on several ranks, in micro-batches within a token limit, none empty."""
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    D, M, G = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.sampled_from([2, 4]))
    rank_Q = np.sort(np.concatenate([np.repeat(np.arange(D), M), rng.integers(0, D, draw(st.integers(0, 12)))]))
    len_Q = rng.integers(1, 30, len(rank_Q))
    step_Q = np.concatenate([rng.permutation(np.arange(n) % M) for n in np.bincount(rank_Q)])
    domain_QG = rng.dirichlet(np.full(G, 0.3), 3)[rng.integers(0, 3, len(rank_Q))]
    pairs_QJG = np.stack([rng.multinomial(2 * n, p, 2) for n, p in zip(len_Q, domain_QG, strict=True)]).astype(np.int32)
    tokens_MD = np.zeros((M, D), np.int64)
    np.add.at(tokens_MD, (step_Q, rank_Q), len_Q)
    limit_D = tokens_MD.max(axis=0) + rng.integers(0, 20, D)
    return len_Q, len_Q.astype(np.int64) ** 2, pairs_QJG, rank_Q, limit_D, M, step_Q


@given(mini_batches())
def test_limits_hold_and_the_cost_falls_by_what_is_said(mini_batch):
    len_Q, attention_Q, pairs_QJG, rank_Q, limit_D, M, step_Q = mini_batch
    found_Q = step_Q.copy()
    gain = repack(len_Q, attention_Q, pairs_QJG, rank_Q, limit_D, M, found_Q)
    before, after = (cost(attention_Q, pairs_QJG, rank_Q, steps_Q) for steps_Q in (step_Q, found_Q))
    assert gain == before - after >= 0
    D = len(limit_D)
    tokens_MD, longest_MD, given_MD = (np.zeros((M, D), np.int64) for _ in range(3))
    np.add.at(tokens_MD, (found_Q, rank_Q), len_Q)
    np.add.at(longest_MD, (found_Q, rank_Q), attention_Q)
    np.add.at(given_MD, (step_Q, rank_Q), attention_Q)
    assert (tokens_MD > 0).all(), "no micro-batch of a rank becomes empty"
    assert (tokens_MD <= limit_D).all() and (longest_MD.max(axis=0) <= given_MD.max(axis=0)).all()
    again_Q = step_Q.copy()
    repack(len_Q, attention_Q, pairs_QJG, rank_Q, limit_D, M, again_Q)
    assert (again_Q == found_Q).all()


def test_two_domains_are_mixed():
    """Samples that want rank 0 in one micro-batch and those that want rank 1 in the other: each should have half of both."""
    pairs_QJG = np.repeat([[[80, 0]], [[0, 80]]], 4, axis=0).astype(np.int32)
    step_Q = np.repeat([0, 1], 4)
    len_Q, rank_Q = np.full(8, 40), np.zeros(8, np.int64)
    assert repack(len_Q, len_Q, pairs_QJG, rank_Q, np.array([160]), 2, step_Q) > 0
    assert [np.sort(step_Q[:4]).tolist(), np.sort(step_Q[4:]).tolist()] == [[0, 0, 1, 1]] * 2
