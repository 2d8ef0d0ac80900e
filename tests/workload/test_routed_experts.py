"""What every rollout engine documents comes back as it was routed: encode as the engine does, read, compare."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from engine_payloads import b64, distinct, narrow, npy, routings, spread, torch
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples

from foremoe.routing.readers import sglang, vllm
from foremoe.routing.readers.sequences import Routed
from foremoe.routing.trace import RoutingTrace
from foremoe.workload import count_workload, from_routed_experts
from foremoe.workload.dealing import count_tokens, sum_cells
from foremoe.workload.workload import Workload

LAYOUTS = "CFr>nft" if torch else "CFr>nf"
INTEGERS = (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


def check(found, topk_TLK, known_T, moe, seq_len=None):
    """The trace holds the routing of the known tokens, and nothing else is known."""
    trace, report = found
    assert trace.seq_len_Q.tolist() == (seq_len or [len(topk_TLK)])
    assert trace.moe_layer_L.tolist() == list(moe)
    got_T = np.ones(trace.T, bool) if trace.known_T is None else trace.known_T
    assert got_T.tolist() == list(known_T)
    assert (trace.topk_TLK[got_T] == topk_TLK[got_T]).all()
    assert report.num_tokens == trace.T and report.num_unknown_tokens == int((~got_T).sum())
    return report


@given(routings(), st.sampled_from(INTEGERS), st.sampled_from(["all", "moe"]), st.booleans(), st.sampled_from(LAYOUTS))
def test_arrays_of_any_integer_dtype_layout_and_layers(routing, dtype, layers, last_missing, layout):
    topk_TLK, E, moe, all_layers = routing
    if np.iinfo(dtype).max < E:
        dtype = np.int16
    rows = (spread(topk_TLK, moe, all_layers) if layers == "all" else topk_TLK).astype(dtype)
    T = len(rows)
    rows = rows[: T - last_missing]
    if layout == "F":
        rows = np.asfortranarray(rows)
    elif layout == "r":
        rows = np.repeat(rows, 2, axis=0)[::2]
    elif layout == ">":
        rows = rows.astype(rows.dtype.newbyteorder(">"))
    elif layout == "t":
        rows = torch.from_numpy(rows)
    elif layout in "nf":
        rows = npy(rows if layout == "n" else np.asfortranarray(rows))
    found = from_routed_experts(rows, num_experts=E, moe_layer_L=moe, lengths=T)
    report = check(found, topk_TLK, [True] * (T - last_missing) + [False] * last_missing, moe)
    assert report.num_missing_tokens == last_missing
    assert found[0].topk_TLK.dtype == (np.uint8 if E <= 256 else np.int16)


@given(routings(), st.integers(0, 9), st.booleans(), st.booleans())
def test_sglang(routing, start, counted, listed):
    """meta_info: base64 of raw int32, rows of all layers from start to the last token but one."""
    topk_TLK, E, moe, all_layers = routing
    T, K = len(topk_TLK), topk_TLK.shape[2]
    start = min(start, T - 1)
    meta = {"id": "x", "routed_experts": b64(spread(topk_TLK, moe, all_layers)[start : T - 1].astype(np.int32).tobytes())}
    if counted:
        meta |= {"prompt_tokens": max(start, 1), "completion_tokens": T - max(start, 1)}
    if start or listed:
        meta["routed_experts_start_len"] = start
    output = {"text": "..", "meta_info": meta}
    items = sglang.payloads([output] if listed else output)
    found = from_routed_experts(
        items, num_experts=E, num_topk=K, num_layers=all_layers, moe_layer_L=moe, dtype=None if counted is False else "int32"
    )
    report = check(found, topk_TLK, [start <= t < T - 1 for t in range(T)], moe)
    assert report.num_missing_tokens == start + 1


@given(routings(), st.data())
def test_sglang_segments_of_one_sequence(routing, data):
    """Requests of one sequence, each from a start of its own: gaps are unknown, later rows hold, unknown rows take nothing."""
    topk_TLK, E, moe, all_layers = routing
    T, K = len(topk_TLK), topk_TLK.shape[2]
    turns, want_TLK, known_T, total = [], np.zeros_like(topk_TLK), np.zeros(T, bool), 0
    for i in range(data.draw(st.integers(1, 4))):
        end = data.draw(st.integers(2, T))
        start = data.draw(st.integers(0, end - 1))
        rows = topk_TLK[start : end - 1] if i == 0 else distinct(np.random.default_rng(i), (end - 1 - start, len(moe)), E, K)
        rows = rows.copy()
        lost = data.draw(st.integers(start, 2 * T)) - start  # a token whose routing is lost, or none
        rows[lost : lost + 1] = -1
        sure = [start + t for t in range(len(rows)) if t != lost and rows[t].any()]
        want_TLK[sure], known_T[sure], total = rows[np.array(sure, int) - start], True, max(total, end)
        payload = b64(spread(rows, moe, all_layers).astype(np.int32).tobytes())
        meta = {"routed_experts": payload, "routed_experts_start_len": start, "prompt_tokens": end - 1, "completion_tokens": 1}
        turns.append({"meta_info": meta})
    options = {"num_experts": E, "num_topk": K, "num_layers": all_layers, "moe_layer_L": moe, "dtype": "int32"}
    for items in (sglang.payloads([turns, turns]), [Routed(segments=turns)] * 2):
        found = from_routed_experts(items, **options)
        check(found, np.concatenate([want_TLK[:total]] * 2), known_T[:total].tolist() * 2, moe, [total, total])
    longer, _ = from_routed_experts(Routed(segments=turns, length=T), **options)
    assert longer.seq_len_Q.tolist() == [T]
    work, _ = count_workload(items, num_ranks=1, micro_step_Q=[0, 1], rank_Q=[0, 0], **options)
    assume(known_T[:total].any())  # a trace without routing is refused
    want = assigned(found[0], 1, np.repeat([0, 1], total), np.zeros(2 * total, int))
    assert (work.load_MLGE == want.load_MLGE).all() and (work.unknown_ML == want.unknown_ML).all()


def assigned(trace, num_ranks, micro_step_T, rank_T):
    """The workload of a trace, given the micro-step and the rank of every token."""
    places = micro_step_T.astype(np.int32), rank_T.astype(np.int32)
    load_MLGE, unknown_ML = count_tokens(trace, *places, num_ranks)
    attention_MG = sum_cells(*places, num_ranks, np.repeat(trace.seq_len_Q, trace.seq_len_Q))
    return Workload(
        load_MLGE=load_MLGE, tokens_MG=sum_cells(*places, num_ranks), attention_MG=attention_MG, unknown_ML=unknown_ML,
        num_topk=trace.K, stage="update", model=trace.model, moe_layer_L=trace.moe_layer_L, trace_id=trace.id,
    )  # fmt: skip


@given(routings(), st.booleans())
def test_sglang_openai_route_and_tensor(routing, tensor):
    topk_TLK, E, moe, all_layers = routing
    rows = spread(topk_TLK, moe, all_layers)[:-1].astype(np.int32)
    data = torch.from_numpy(rows) if tensor and torch else b64(rows.tobytes())
    usage = {"prompt_tokens": 1, "completion_tokens": len(rows)}
    responses = [
        {"choices": [{"index": 0}], "sglext": {"routed_experts": data}, "usage": usage},
        {"choices": [{"index": 0, "meta_info": {"routed_experts": data}}]},
    ]
    found = from_routed_experts(
        sglang.payloads(responses), num_experts=E, num_topk=rows.shape[2], num_layers=all_layers, moe_layer_L=moe, dtype="int32"
    )
    T = len(topk_TLK)
    check(found, np.concatenate([topk_TLK] * 2), ([True] * (T - 1) + [False]) * 2, moe, [T, T])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", *([torch.uint8] if torch else []), np.dtype("int64")])
def test_sglang_narrow_wire_is_told_apart_by_the_lengths(dtype):
    topk_TLK = distinct(np.random.default_rng(0), (20, 3), 60, 2)
    raw = topk_TLK[:-1].astype(str(dtype).removeprefix("torch.")).tobytes()
    options = {"num_experts": 60, "num_topk": 2, "num_layers": 3, "lengths": [20]}
    for data in (raw, b64(raw)):
        for told in (dtype, None):
            check(from_routed_experts([data], dtype=told, **options), topk_TLK, [True] * 19 + [False], range(3))


@given(routings(), st.sampled_from(["object", "json", "lists"]), st.integers(0, 9), st.integers(0, 3), st.booleans())
def test_vllm_prompt_and_response_apart(routing, form, P, cached, all_rows):
    """The older form: int16, MoE layers only, -1 for tokens of a cached prefix, shared prompt, one array per completion."""
    topk_TLK, E, moe, _ = routing
    T, P = len(topk_TLK), min(P, len(topk_TLK) - 1)
    cached = min(cached, P)
    prompt = topk_TLK[:P].astype(np.int16)
    prompt[:cached] = -1
    response = topk_TLK[P : T - (not all_rows)].astype(np.int16)
    as_form = (lambda x: x) if form == "object" else np.ndarray.tolist if form == "lists" else (lambda x: b64(npy(x)))
    make = dict if form != "object" else SimpleNamespace
    if form == "lists" and not prompt.size:
        return
    if form == "lists" and not response.size:
        response = None
    output = make(
        prompt_token_ids=list(range(P)),
        prompt_routed_experts=as_form(prompt),
        **{
            "choices" if form != "object" else "outputs": [
                make(token_ids=list(range(T - P)), routed_experts=None if response is None else as_form(response))
            ]
            * 2
        },
    )
    found = from_routed_experts(vllm.payloads(output), num_experts=E, moe_layer_L=moe)
    known = [cached <= t < T - (not all_rows) for t in range(T)]
    if form == "lists" and response is None:
        known[P:] = [False] * (T - P)
    check(found, np.concatenate([topk_TLK] * 2), known * 2, moe, [T, T])


@given(routings(), st.sampled_from(["array", "npy", "missing", "response only"]), st.integers(2, 9), st.integers(0, 3))
def test_vllm_whole_sequences(routing, form, P, start):
    """The newer form: uint8 or uint16 rows of prompt and response but for the last token; a preempted request has none."""
    topk_TLK, E, moe, _ = routing
    T = len(topk_TLK)
    P = min(P, T - 1)
    start = min(start, P) if form == "npy" else 0
    rows = topk_TLK.astype(narrow(E))
    data = {"array": rows[:-1], "npy": b64(npy(rows[start:-1].astype(np.int32))), "missing": None, "response only": rows[P:]}[
        form
    ]
    output = {
        "prompt_token_ids": [0] * P, "routed_experts_prompt_start": start,
        "choices": [{"token_ids": [0] * (T - P), "routed_experts": data}],
    }  # fmt: skip
    if form == "response only":  # of an engine that sends the prompt's apart, and has lost it
        output["prompt_routed_experts"] = None
    found = from_routed_experts(vllm.payloads([output]), num_experts=E, num_topk=rows.shape[2], moe_layer_L=moe)
    if form == "response only" and P > 1:
        known = [t >= P for t in range(T)]
    elif form == "response only":  # with one prompt token the rows are as many as those of prompt and response
        return
    else:
        known = [form != "missing" and start <= t < T - 1 for t in range(T)]
    check(found, topk_TLK, known, moe)


@given(routings(), st.integers(0, 5))
def test_prime_rl(routing, start):
    """dict of base64 data, shape, start and dtype; the last row is zeros."""
    topk_TLK, E, moe, _ = routing
    T, start = len(topk_TLK), min(start, len(topk_TLK) - 1)
    rows = topk_TLK.astype(narrow(E))
    rows[-1] = 0
    raw = rows[start:]
    payload = {"data": b64(raw.tobytes()), "shape": list(raw.shape), "start": start, "dtype": str(raw.dtype)}
    for wrapped in (payload, {"routed_experts": payload}, Routed(data=payload, length=T)):
        report = check(
            from_routed_experts(wrapped, num_experts=E, moe_layer_L=moe), topk_TLK, [start <= t < T - 1 for t in range(T)], moe
        )
        assert report.num_blank_tokens == 1 and report.num_missing_tokens == start


@pytest.mark.parametrize("trainer", ["slime", "areal", *(["nemo-rl", "verl", "nested"] if torch else [])])
@examples(25)
@given(drawn=st.lists(routings(), min_size=1, max_size=3))
def test_batches_of_trainers(drawn, trainer):
    """Lists of [len - 1, L, K], and padded batches with -1, zeros or arange as padding, left or right."""
    (first, E, moe, all_layers), rng = drawn[0], np.random.default_rng(0)
    K = first.shape[2]
    seqs = [first, *(distinct(rng, (len(other), len(moe)), E, K) for other, *_ in drawn[1:])]
    lengths, topk_TLK = [len(s) for s in seqs], np.concatenate(seqs)
    known = np.concatenate([np.arange(n) < n - 1 for n in lengths])
    options = {"num_experts": E, "num_topk": K, "moe_layer_L": moe, "num_layers": all_layers}
    if trainer == "slime":
        payloads = [spread(s, moe, all_layers)[:-1].astype(np.int32) for s in seqs]
        # In packed micro-batches slime pads with arange, which looks like routing: lengths cut it off.
        pad = np.broadcast_to(np.arange(K, dtype=np.int32) % E, (3, all_layers, K))
        padded = [np.concatenate([spread(s, moe, all_layers).astype(np.int32), pad]) for s in seqs]
        report = check(from_routed_experts(padded, lengths=lengths, **options), topk_TLK, [True] * len(topk_TLK), moe, lengths)
        assert report.num_padding_rows == 3 * len(seqs)
        check(from_routed_experts(payloads, lengths=lengths, **options), topk_TLK, known, moe, lengths)
    elif trainer == "areal":
        payloads = [b64(spread(s, moe, all_layers)[:-1].astype(np.int32).tobytes()) for s in seqs]
        check(from_routed_experts(payloads, lengths=lengths, dtype="int32", **options), topk_TLK, known, moe, lengths)
    elif trainer == "nested":
        payloads = torch.nested.nested_tensor(
            [torch.from_numpy(spread(s, moe, all_layers).astype(np.int16)) for s in seqs], layout=torch.jagged
        )
        check(from_routed_experts(payloads, **options), topk_TLK, [True] * len(topk_TLK), moe, lengths)
    else:
        S = max(lengths) + 2
        batch = np.full((len(seqs), S, all_layers, K), -1 if trainer == "nemo-rl" else 0, np.int16)
        mask = np.zeros((len(seqs), S), np.int64)
        for q, s in enumerate(seqs):
            at = 0 if trainer == "nemo-rl" else S - len(s)
            batch[q, at : at + len(s) - 1] = spread(s, moe, all_layers)[:-1]
            mask[q, at : at + len(s)] = 1
        where = {"lengths": lengths} if trainer == "nemo-rl" else {"mask": torch.from_numpy(mask)}
        check(from_routed_experts(torch.from_numpy(batch), **where, **options), topk_TLK, known, moe, lengths)


@given(routings(), st.randoms(use_true_random=False))
def test_none_and_minus_one_anywhere_are_unknown(routing, random):
    topk_TLK, E, moe, _ = routing
    nested, marked = topk_TLK.tolist(), topk_TLK.astype(np.int32)
    hole = random.choice(["token", "layer", "expert"])
    t, layer, k = (random.randrange(n) for n in topk_TLK.shape)
    if hole == "token":
        nested[t], marked[t] = None, -1
    elif hole == "layer":
        nested[t][layer], marked[t, layer] = None, -1
    else:
        nested[t][layer][k], marked[t, layer, k] = None, -1
    for payload in (nested, [nested], marked, marked.tolist(), marked.astype(np.int64)):
        report = check(from_routed_experts(payload, num_experts=E, moe_layer_L=moe), topk_TLK, np.arange(len(topk_TLK)) != t, moe)
        assert report.num_marked == (len(moe) if hole == "token" else 1)


@given(st.lists(routings(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_counts_are_those_of_the_trace(drawn, random):
    (first, E, moe, _), rng = drawn[0], np.random.default_rng(0)
    seqs = [first, *(distinct(rng, (len(other), len(moe)), E, first.shape[2]) for other, *_ in drawn[1:])]
    lengths = [len(s) for s in seqs]
    payloads = [s[:-1].astype(random.choice([np.int16, np.int32])) for s in seqs]
    payloads[random.randrange(len(seqs))][0] = -1
    options = {"num_experts": E, "moe_layer_L": moe, "lengths": lengths}
    micro_step_Q, rank_Q = [min(q // 2, 1) for q in range(len(seqs))], [random.randrange(3) for _ in seqs]
    trace, read = from_routed_experts(payloads, **options)
    assume(trace.known_T is None or trace.known_T.any())  # a trace without routing is refused
    want = assigned(trace, 3, np.repeat(micro_step_Q, lengths), np.repeat(rank_Q, lengths))
    got, counted = count_workload(payloads, num_ranks=3, micro_step_Q=micro_step_Q, rank_Q=rank_Q, **options)
    assert read == counted
    for name in ("load_MLGE", "tokens_MG", "attention_MG", "unknown_ML", "moe_layer_L"):
        assert (getattr(got, name) == getattr(want, name)).all(), name
    # The same tokens in pieces, every second one on the next rank: a split sequence is counted token by token.
    ranges = [(q, t, t + 1, micro_step_Q[q], (rank_Q[q] + t) % 3) for q, n in enumerate(lengths) for t in range(n)]
    random.shuffle(ranges)
    split, _ = count_workload(payloads, num_ranks=3, range_X5=ranges, **options)
    want = assigned(trace, 3, *(np.array([r[i] for r in sorted(ranges)]) for i in (3, 4)))
    assert (split.load_MLGE == want.load_MLGE).all() and (split.tokens_MG == want.tokens_MG).all()
    assert (split.attention_MG == want.attention_MG).all() and (split.unknown_ML == want.unknown_ML).all()


def test_a_repeated_expert_is_one_pair_and_no_part_of_a_trace():
    rows = [[[1, 1], [0, 2]], [[0, 1], [2, 0]]]
    work, report = count_workload(rows, num_experts=3, num_ranks=1, micro_step_Q=[0], rank_Q=[0])
    assert work.load_MLGE[0, :, 0].tolist() == [[1, 2, 0], [2, 0, 2]]
    assert (report.num_repeated_pairs, report.num_unknown_tokens, work.unknown_ML.tolist()) == (1, 0, [[0, 0]])
    trace, report = from_routed_experts(rows, num_experts=3)
    assert (trace.known_T.tolist(), report.num_repeated_pairs) == ([False, True], 1)


def test_a_layer_that_is_not_known_leaves_the_others_counted():
    rows = [[[1, 0], [-1, 2]], [[0, 1], [2, 0]]]
    work, report = count_workload(rows, num_experts=3, num_ranks=1, micro_step_Q=[0], rank_Q=[0])
    assert work.load_MLGE[0, :, 0].tolist() == [[2, 2, 0], [1, 0, 1]]
    assert (work.unknown_ML.tolist(), report.num_unknown_tokens, report.num_marked) == ([[0, 1]], 1, 1)


def test_sequences_left_out_are_not_even_decoded():
    good = distinct(np.random.default_rng(1), (3, 2), 8, 2)
    work, report = count_workload([good, "garbage"], num_experts=8, num_ranks=2, micro_step_Q=[0, -1], rank_Q=[1, 0])
    assert work.tokens_MG.tolist() == [[0, 3]] and report.num_sequences == 1
    assert (work.micro_step_Q.tolist(), work.rank_Q.tolist()) == ([0, -1], [1, -1])


def test_a_model_tells_experts_and_layers():
    topk_TLK = distinct(np.random.default_rng(2), (4, 26), 64, 6)
    for rows in (topk_TLK, np.concatenate([np.full((4, 1, 6), 7), topk_TLK], axis=1)):
        trace, _ = from_routed_experts(rows, model="deepseek-v2-lite")
        assert trace.moe_layer_L.tolist() == list(range(1, 27)) and (trace.topk_TLK == topk_TLK).all()
        assert isinstance(trace, RoutingTrace) and trace.model == "deepseek-v2-lite"


def test_a_stage_of_the_model_is_read_from_rows_of_all_layers():
    rows = distinct(np.random.default_rng(3), (4, 6), 16, 2)
    trace, _ = from_routed_experts(rows, num_experts=16, moe_layer_L=[1, 2], num_layers=6)
    assert (trace.topk_TLK == rows[:, 1:3]).all() and trace.moe_layer_L.tolist() == [1, 2]


def test_zeros_may_be_routing_at_top_1():
    trace, report = from_routed_experts(np.zeros((3, 2, 1), np.uint8), num_experts=4)
    assert trace.known_T is None and report.num_blank_tokens == 0


def test_a_payload_of_the_right_dtype_is_not_copied():
    rows = distinct(np.random.default_rng(4), (4, 3), 16, 2).astype(np.uint8)
    blob = npy(rows)
    from foremoe.routing.readers.payloads import Expected, decode

    assert np.shares_memory(decode(rows, Expected()), rows)
    assert np.shares_memory(decode(blob, Expected()), np.frombuffer(blob, np.uint8))
    assert torch is None or np.shares_memory(decode(torch.from_numpy(rows), Expected()), rows)


def test_readers_import_neither_torch_nor_an_engine():
    code = (
        "import sys; from foremoe.routing.readers import sglang, vllm; from foremoe import from_routed_experts;"
        " from_routed_experts([[[0, 1]]], num_experts=2); print({'torch', 'vllm', 'sglang'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_resumed_sequence_is_read_from_its_requests():
    """An engine that resumes sends the routing of the prompt again, which then holds what was generated before."""
    whole = distinct(np.random.default_rng(3), (9, 3), 8, 2).astype(np.int32)
    first, second = whole[:4], whole[:8]  # each without its last token
    requests = [
        {"prompt_token_ids": [1] * 2, "choices": [{"token_ids": [2] * 3, "routed_experts": first}]},
        {"prompt_token_ids": [1] * 5, "choices": [{"token_ids": [2] * 4, "routed_experts": second}]},
    ]
    for answer in (requests, requests[1:]):
        trace, report = from_routed_experts(vllm.payloads([answer]), num_experts=8)
        assert trace.T == 9 and report.num_missing_tokens == 1 and (trace.topk_TLK[:8] == whole[:8]).all()
