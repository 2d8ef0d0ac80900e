"""Workload: every token counted once, sequences whole, budgets kept, files that come back byte for byte."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from foremoe.base.errors import InputError
from foremoe.levels import PackSolver
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.dealing import Dealt
from foremoe.workload.packing import AsGiven
from foremoe.workload.workload import Workload

E = 6


def make_trace(seed=0, seq_len=(3, 1, 4), L=2, K=2, unknown=0.0):
    rng = np.random.default_rng(seed)
    T = sum(seq_len)
    topk = np.argsort(rng.random((T, L, E)), axis=2)[:, :, :K]
    known = rng.random(T) >= unknown if unknown else None
    if known is not None:
        known[rng.integers(T)] = True  # what knows no token at all is refused
    return RoutingTrace(topk_TLK=topk, num_experts=E, seq_len_Q=seq_len, known_T=known, moe_layer_L=np.arange(3, 3 + L))


@st.composite
def traces(draw):
    return make_trace(
        seed=draw(st.integers(0, 99)),
        seq_len=draw(st.lists(st.integers(1, 9), min_size=1, max_size=12)),
        L=draw(st.integers(1, 3)),
        K=draw(st.integers(1, 3)),
        unknown=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


def counts_of(trace, micro_step_T, rank_T, M, G):
    """The slow, obvious count."""
    load = np.zeros((M, trace.L, G, trace.num_experts), int)
    for t in range(trace.T):
        if trace.known_T is None or trace.known_T[t]:
            for layer in range(trace.L):
                for e in trace.topk_TLK[t, layer]:
                    load[micro_step_T[t], layer, rank_T[t], e] += 1
    return load


def as_given(seq_len, G, budget, group, order):
    """File order, next-fit, fewest tokens first, written from the definition."""
    micro_step, rank = [0] * len(seq_len), [0] * len(seq_len)
    m, inside = 0, []
    for q in order:
        if inside and (sum(seq_len[i] for i in inside) + seq_len[q] > budget or group[q] != group[inside[-1]]):
            m, inside = m + 1, []
        tokens = [sum(seq_len[i] for i in inside if rank[i] == g) for g in range(G)]
        rank[q], micro_step[q] = tokens.index(min(tokens)), m
        inside.append(q)
    return micro_step, rank


@settings(deadline=None)
@given(trace=traces(), G=st.integers(1, 5), tokens=st.integers(1, 12), grouped=st.booleans(), shuffle=st.booleans())
def test_from_trace_deals_whole_sequences_and_counts_every_token_once(trace, G, tokens, grouped, shuffle):
    group_Q = np.arange(trace.Q) // 3 if grouped else None
    packer = AsGiven(shuffle=shuffle)
    work = Workload.from_trace(trace, num_ranks=G, tokens_per_rank=tokens, packer=packer, sample_group_Q=group_Q, seed=3)
    m_Q, g_Q, len_Q = work.micro_step_Q, work.rank_Q, trace.seq_len_Q
    m_T, g_T = np.repeat(m_Q, len_Q), np.repeat(g_Q, len_Q)
    assert (work.load_MLGE == counts_of(trace, m_T, g_T, work.M, G)).all()
    known = trace.T if trace.known_T is None else int(trace.known_T.sum())
    assert work.load_MLE.sum(axis=(0, 2)).tolist() == [known * trace.K] * trace.L
    assert (work.load_MLE == work.load_MLGE.sum(axis=2)).all() and work.load_MLE.dtype == np.int32
    assert work.unknown_ML.sum(axis=0).tolist() == [trace.T - known] * trace.L
    assert work.tokens_MG.sum() == trace.T and work.attention_MG.sum() == (len_Q**2).sum()
    for m in range(work.M):
        inside = np.flatnonzero(m_Q == m)
        assert inside.size and (len_Q[inside].sum() <= G * tokens or inside.size == 1)
        assert group_Q is None or len(set(group_Q[inside])) == 1
    assert work.dealt.over_budget == tuple(np.flatnonzero(len_Q > G * tokens))
    assert work.dealt.packer == f"AsGiven(shuffle={shuffle})" and work.trace_id == trace.id
    assert work.moe_layer_L.tolist() == trace.moe_layer_L.tolist() and work.num_topk == trace.K
    order = range(trace.Q) if not shuffle else shuffled(trace.Q, group_Q, 3)
    expected = as_given(len_Q.tolist(), G, G * tokens, [0] * trace.Q if group_Q is None else group_Q.tolist(), order)
    assert (m_Q.tolist(), g_Q.tolist()) == expected


def shuffled(Q, group_Q, seed):
    order = np.random.default_rng(seed).permutation(Q).tolist()
    return order if group_Q is None else sorted(order, key=lambda q: group_Q[q])


def test_shuffling_is_a_function_of_the_seed():
    trace = make_trace(seq_len=[3] * 20)
    deal = lambda packer, seed: Workload.from_trace(  # noqa: E731
        trace, num_ranks=2, tokens_per_rank=6, packer=packer, seed=seed
    ).micro_step_Q.tolist()
    assert deal(AsGiven(), 0) == deal(AsGiven(), 1) == sorted(deal(AsGiven(), 0))
    assert deal(AsGiven(shuffle=True), 0) == deal(AsGiven(shuffle=True), 0) != deal(AsGiven(shuffle=True), 1)


def test_a_case_by_hand():
    trace = make_trace(seq_len=[5, 1, 2, 9, 1, 1])
    work = Workload.from_trace(trace, num_ranks=2, tokens_per_rank=4)
    assert work.micro_step_Q.tolist() == [0, 0, 0, 1, 2, 2] and work.rank_Q.tolist() == [0, 1, 1, 0, 0, 1]
    assert work.tokens_MG.tolist() == [[5, 3], [9, 0], [1, 1]]
    assert work.attention_MG.tolist() == [[25, 5], [81, 0], [1, 1]]
    assert work.dealt == Dealt(tokens_per_rank=4, packer="AsGiven(shuffle=False)", seed=0, over_budget=(3,))
    assert (work.M, work.L, work.G, work.E) == (3, 2, 2, 6) and "3 micro-steps" in repr(work)


def test_later_micro_steps_can_be_left_out():
    trace = make_trace(seq_len=[5, 1, 2, 9, 1, 1])
    whole = Workload.from_trace(trace, num_ranks=2, tokens_per_rank=4)
    for keep in (1, 2, 3, 7):
        work = Workload.from_trace(trace, num_ranks=2, tokens_per_rank=4, max_micro_steps=keep)
        assert work.dealt.dropped_micro_steps == max(0, 3 - keep)
        assert work.dealt.over_budget == ((3,) if keep > 1 else ())
        assert dataclasses.replace(work, dealt=None).same_as(dataclasses.replace(whole[:keep], dealt=None))
    assert whole[:1].micro_step_Q.tolist() == [0, 0, 0, -1, -1, -1] and whole[:1].rank_Q.tolist() == [0, 1, 1, -1, -1, -1]


class _Broken(PackSolver):
    def __init__(self, micro_step, rank):
        self.answer = micro_step, rank

    def solve(self, trace, *, num_ranks, tokens_per_rank, sample_group_Q=None, seed=0):
        return self.answer

    def __repr__(self):
        return "Broken()"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be a whole number of at least 1; got 0"),
        ({"num_ranks": 2.0}, "num_ranks must be"),
        ({"num_ranks": True}, "num_ranks must be"),
        ({"tokens_per_rank": 0}, "tokens_per_rank must be"),
        ({"tokens_per_rank": -5}, "tokens_per_rank must be"),
        ({"tokens_per_rank": float("nan")}, "tokens_per_rank must be"),
        ({"tokens_per_rank": None}, "tokens_per_rank must be"),
        ({"max_micro_steps": 0}, "max_micro_steps must be"),
        ({"seed": -1}, "seed must be"),
        ({"stage": "rollout"}, "stage must be one of recompute, update"),
        ({"packer": "as given"}, "packer must be a pack solver"),
        ({"sample_group_Q": [0, 1, 0]}, "falls from 1 to 0 at sequence 2"),
        ({"sample_group_Q": [0, 1]}, "shape"),
        ({"sample_group_Q": [0, 0.5, 1]}, "whole numbers"),
        ({"packer": _Broken([0, 1, 2], [0, 2, 0])}, r"Broken\(\) names ranks from 0 to 2"),
        ({"packer": _Broken([0, 1, 3], [0, 0, 0])}, "3 micro-steps numbered from 0 to 3"),
        ({"packer": _Broken([-1, 0, 1], [0, 0, 0])}, "numbered from -1"),
        ({"packer": _Broken([0, 1], [0, 0])}, "shape"),
        ({"packer": _Broken([0, 0, 0], [0, 0, 1])}, "put 8 tokens in 3 sequences into micro-step 0, over the budget of 6"),
        ({"packer": _Broken([0, 0, 1], [0, 0, 1]), "sample_group_Q": [0, 1, 1]}, "put groups 0 and 1 into micro-step 0"),
    ],
)
def test_bad_dealing_is_refused(options, message):
    with pytest.raises(InputError, match=message) as caught:
        Workload.from_trace(make_trace(), **{"num_ranks": 2, "tokens_per_rank": 3, **options})
    assert "\n" not in str(caught.value)


def test_as_given_checks_its_own_numbers():
    for bad in ({"num_ranks": 0, "tokens_per_rank": 1}, {"num_ranks": 1, "tokens_per_rank": 0}):
        with pytest.raises(InputError, match="must be at least 1"):
            AsGiven().solve(make_trace(), **bad)
    assert AsGiven() == AsGiven(shuffle=False) and hash(AsGiven()) == hash(AsGiven()) and AsGiven.level == "pack"


def test_from_counts():
    trace = make_trace(unknown=0.3)
    dealt = Workload.from_trace(trace, num_ranks=2, tokens_per_rank=3)
    counts = {"load_MLGE": dealt.load_MLGE.astype(float), "num_topk": 2, "moe_layer_L": [3, 4], "trace_id": trace.id}
    exact = Workload.from_counts(
        **counts, tokens_MG=dealt.tokens_MG, unknown_ML=dealt.unknown_ML, attention_MG=dealt.attention_MG
    )
    assert exact.same_as(dataclasses.replace(dealt, micro_step_Q=None, rank_Q=None, dealt=None))
    derived = Workload.from_counts(**counts)
    assert (derived.tokens_MG == dealt.load_MLGE[:, 0].sum(axis=2) // 2).all() and not derived.attention_MG.any()
    dropped = Workload.from_counts([[[[3, 0], [0, 1]], [[2, 2], [1, 0]]]], num_topk=2)
    assert dropped.tokens_MG.tolist() == [[2, 1]] and dropped.unknown_ML.tolist() == [[0, 0]]
    assert Workload.from_counts(np.ones((1, 26, 1, 64)), num_topk=6, model="deepseek-v2-lite").moe_layer_L[0] == 1


@pytest.mark.parametrize(
    ("load", "options", "message"),
    [
        ([[[[1, -1]]]], {}, "negative"),
        ([[[[1, np.nan]]]], {}, "NaN"),
        ([[[[1, np.inf]]]], {}, "infinities or fractions"),
        ([[[[1, 0.5]]]], {}, "infinities or fractions"),
        ([[[[1, 2**31]]]], {}, "int32"),
        ([[[1, 1]]], {}, "shape"),
        (np.zeros((0, 1, 1, 2)), {}, "empty axis"),
        ([[[["a", "b"]]]], {}, "numbers"),
        ([[[[2**31 - 1, 0], [2**31 - 1, 0]]]], {"num_topk": 1}, "summed over ranks"),
        ([[[[2, 2]]]], {"num_topk": 3}, "num_topk 3 exceeds the 2 experts"),
        ([[[[2, 2]]]], {"num_topk": 0}, "num_topk must be"),
        ([[[[2, 2]]]], {"tokens_MG": [[3]]}, "counts 4 pairs but its 3 tokens, 0 of them unknown, make 6 at top-2"),
        ([[[[2, 2]]]], {"tokens_MG": [[2]], "unknown_ML": [[1]]}, "1 of them unknown, make 2"),
        ([[[[2, 2]]]], {"tokens_MG": [[1]], "unknown_ML": [[-1]]}, "at most|negative"),
        ([[[[2, 0], [2, 0]]]], {"tokens_MG": [[0, 2]]}, "rank 0 counts 2 pairs but its 0 tokens make at most 0"),
        ([[[[2, 2]]]], {"unknown_ML": [[1]]}, "more than its tokens make without the 1 unknown"),
        ([[[[2, 2]]]], {"tokens_MG": [[2, 2]]}, "shape"),
        ([[[[2, 2]]]], {"tokens_MG": [[-2]]}, "make -4|negative"),
        ([[[[2, 2]]]], {"attention_MG": [[np.nan]]}, "NaN"),
        ([[[[2, 2]]]], {"attention_MG": [[-1.0]]}, "negative"),
        ([[[[2, 2]]]], {"stage": "rollout"}, "stage must be"),
        ([[[[2, 2]]]], {"model": "mixtral-8x7b"}, "top-2 of 8 experts but the data is top-2 of 2"),
        ([[[[2, 2]]]], {"model": 3}, "model must be a Model or the name"),
        ([[[[2, 2]]]], {"trace_id": None}, "trace_id must be text"),
        ([[[[2, 2]]]], {"moe_layer_L": [1, 2]}, "shape"),
    ],
)
def test_bad_counts_are_refused(load, options, message):
    with pytest.raises(InputError, match=message) as caught:
        Workload.from_counts(load, **{"num_topk": 2, **options})
    assert "\n" not in str(caught.value)


def test_where_sequences_went_is_checked():
    work = Workload.from_trace(make_trace(), num_ranks=2, tokens_per_rank=3)
    for change, message in (
        ({"rank_Q": None}, "give both or neither"),
        ({"rank_Q": [0, 1]}, "shape"),
        ({"rank_Q": [0, 1, 2]}, r"rank_Q holds numbers from 0 to 2; they must lie in \[-1, 2\)"),
        ({"micro_step_Q": [0, -2, 1]}, "micro_step_Q holds"),
    ):
        with pytest.raises(InputError, match=message):
            dataclasses.replace(work, **change)


@settings(deadline=None)
@given(trace=traces(), low=st.integers(0, 6), size=st.integers(1, 6))
def test_slices_and_layers_are_parts_of_the_whole(trace, low, size):
    work = Workload.from_trace(trace, num_ranks=2, tokens_per_rank=3)
    if low < work.M:
        part = work[low : low + size]
        assert (part.load_MLGE == work.load_MLGE[low : low + size]).all()
        assert (part.load_MLE == work.load_MLE[low : low + size]).all()
        for q in range(trace.Q):
            m = work.micro_step_Q[q] - low
            inside = 0 <= m < size
            assert (part.micro_step_Q[q], part.rank_Q[q]) == ((m, work.rank_Q[q]) if inside else (-1, -1))
    backwards = work.layers(range(trace.L)[::-1])
    assert (backwards.load_MLGE == work.load_MLGE[:, ::-1]).all()
    assert backwards.moe_layer_L.tolist() == work.moe_layer_L[::-1].tolist()
    assert backwards.layers(range(trace.L)[::-1]).same_as(work) and work[:].same_as(work)


def test_bad_parts_are_refused():
    work = Workload.from_trace(make_trace(), num_ranks=2, tokens_per_rank=3)
    with pytest.raises(InputError, match="index a workload by a slice"):
        work[0]
    with pytest.raises(InputError, match="selects none of the"):
        work[7:]
    for bad in ([], [2], [-1], 0, [0.5], [[0]], [True]):
        with pytest.raises(InputError, match="positions from 0 to 1"):
            work.layers(bad)
    with pytest.raises(InputError, match="distinct"):
        work.layers([0, 0])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces(), scale=st.sampled_from([1, 100, 10_000]))
def test_save_then_load_is_identity_and_bytes_repeat(trace, scale, tmp_path):
    dealt = Workload.from_trace(trace, num_ranks=2, tokens_per_rank=3, stage="recompute")
    counted = Workload.from_counts(dealt.load_MLGE * scale, num_topk=trace.K, model="mine")
    for work in (dealt, counted):
        path = tmp_path / "work.safetensors"
        work.save(path)
        back = Workload.load(path)
        assert back.same_as(work) and back.load_MLGE.dtype == np.int32
        back.save(tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_files_that_are_no_workload(tmp_path):
    work, path = Workload.from_trace(make_trace(), num_ranks=2, tokens_per_rank=3), tmp_path / "work"
    work.save(path)
    whole = path.read_bytes()

    def refused(message, content=None):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            Workload.load(path)
        assert "\n" not in str(caught.value) and caught.value.__cause__ is None

    for size in range(1, len(whole), max(1, len(whole) // 60)):
        refused("is not a workload file, or truncated|truncated or damaged", whole[:size])
    refused("is empty", b"")
    refused("is not a workload file", b"x" * 200)
    header = int.from_bytes(whole[:8], "little")
    data = 8 + header
    for at in (data, data + 9, len(whole) - 1):
        refused("was changed after it was written", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    newer = whole.replace(b'\\"format\\": 1', b'\\"format\\": 9')
    assert newer != whole
    refused("has workload format 9, this foremoe reads only format 1; install a newer", newer)
    save_file({"a": np.zeros(1)}, path, {"foremoe": json.dumps({"kind": "trace", "format": 1})})
    refused("is not a workload file, but a trace file; `foremoe inspect` shows it")
    save_file({"a": np.zeros(1)}, path)
    refused("is not a workload file")
    path.unlink()
    refused("there is no file")
    path.mkdir()
    refused("is not a file")
    with pytest.raises(InputError, match="cannot write"):
        work.save(tmp_path / "no" / "work")


def test_a_file_with_a_field_missing_or_odd_is_one_error(tmp_path):
    from foremoe.base.tensor_file import read_tensors, write_tensors

    work, path = Workload.from_trace(make_trace(), num_ranks=2, tokens_per_rank=3), tmp_path / "work"
    work.save(path)
    header, tensors = read_tensors(path, "workload", 1)
    cases = [({k: v for k, v in header.items() if k != "stage"}, tensors, "lacks or misnames a field")]
    cases.append((header, {k: v for k, v in tensors.items() if k != "tokens_MG"}, "lacks or misnames a field"))
    cases.append(({**header, "dealt": {"x": 1}}, tensors, "lacks or misnames a field"))
    cases.append(({**header, "dealt": [1]}, tensors, "lacks or misnames a field"))
    cases.append(({**header, "num_topk": 1}, tensors, "make at most"))
    cases.append((header, {**tensors, "tokens_MG": tensors["tokens_MG"][:1]}, "shape"))
    for head, arrays, message in cases:
        write_tensors(path, "workload", 1, {k: v for k, v in head.items() if k not in ("kind", "format", "checksum")}, arrays)
        with pytest.raises(InputError, match=message):
            Workload.load(path)
