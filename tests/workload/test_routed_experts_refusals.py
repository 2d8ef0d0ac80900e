"""Garbage is refused in one sentence, and nothing is allocated for what it claims."""

import base64
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from engine_payloads import b64, distinct, npy, torch
from hypothesis import given
from hypothesis import strategies as st

from foremoe.base.errors import InputError
from foremoe.routing.readers import sglang, vllm
from foremoe.routing.readers.counting import count_pairs
from foremoe.routing.readers.sequences import Routed
from foremoe.workload import count_workload, from_routed_experts

ROWS = distinct(np.random.default_rng(0), (4, 3), 8, 2)
I32 = ROWS.astype(np.int32)
FLAT = {"num_topk": 2, "num_layers": 3}


def lying_header(shape, dtype="<i4", data=b"\0" * 96):
    blob = npy(I32)
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return blob[:10] + header.ljust(117) + b"\n" + data


def changed(value, where=(1, 2, 0)):
    rows = I32.copy()
    rows[where] = value
    return rows


def objects():
    array = np.empty((4, 3, 2), object)
    array[:] = 1
    return array


GARBAGE = {
    "another shape": (I32[0], {}, r"shape \[tokens, layers, top-k\]"),
    "five axes": (I32[None, None], {}, "fewer axes"),
    "no layers": (I32[:, :0], {}, "shape"),
    "other layers": (I32, {"moe_layer_L": [0, 3]}, "3 layers was given where 4 or 2 fit"),
    "other top-k": (I32, {"num_topk": 3}, "not top-3"),
    "an id too large": (changed(8), {}, "token 1, layer 2 of the payload lists expert 8"),
    "an id too large in uint8": (changed(255).astype(np.uint8), {}, "lists expert 255"),
    "an id too large in uint64": (changed(0).astype(np.uint64) + np.uint64(2**63), {}, "lists expert"),
    "a negative id": (changed(-2), {}, "lists expert -2"),
    "a negative int8": (changed(-3).astype(np.int8), {"num_experts": 128}, "lists expert -3"),
    "uint8 of 384 experts": (I32.astype(np.uint8), {"num_experts": 384}, "uint8 ends at 255 but there are 384 experts"),
    "int8 of 256 experts": (npy(I32.astype(np.int8)), {"num_experts": 256}, "int8 ends at 127 but there are 256 experts"),
    "bytes of 384 experts": (I32.astype(np.uint8).tobytes(), {**FLAT, "num_experts": 384, "dtype": "uint8"}, "uint8 ends at 255"),
    "bytes of 384 experts without dtype": (bytes(24), {**FLAT, "num_experts": 384, "lengths": 4}, "do not make 4 or 3 rows"),
    "garbage beside -1": (np.where(changed(-1) == -1, -1, 99), {}, "lists expert 99"),
    "a resumed sequence twice": (np.concatenate([I32[:2], I32]), {"lengths": 4}, "6 rows .* routing, .* in a nested list"),
    "floats": (I32.astype(np.float32), {}, "whole numbers; got float32"),
    "bools": (I32 > 3, {}, "whole numbers; got bool"),
    "objects": (objects(), {}, r"whole numbers; got object .*to_pylist\(\)"),
    "a column of objects": (np.array([I32, None], object), {}, r"whole numbers; got object .*to_pylist\(\)"),
    "one array per layer": (list(I32.transpose(1, 0, 2)), FLAT, r"got \[4, 2\]: stack one array per layer on axis 1"),
    "one array per layer of no model": (list(I32.transpose(1, 0, 2)), {}, "stack one array per layer on axis 1"),
    "shape and bytes": ([(I32.shape, I32.tobytes())], FLAT, "a pair of shape and bytes does not contain its dtype; give {'data'"),
    "dtype, shape and bytes": (("int32", list(I32.shape), I32.tobytes()), FLAT, "a pair of shape and bytes"),
    "base85": (base64.b85encode(I32.tobytes()).decode(), FLAT, "not base64.* base85; decode it with base64.b85decode"),
    "empty without a length": ("", FLAT, "None or empty needs the length of its sequence"),
    "no rows without a length": (I32[:0], {}, "None or empty needs the length of its sequence"),
    "nothing said of its end": (Routed(data=I32, num_last_missing=None), {}, "neither token ids nor counts"),
    "an engine's start left out": (Routed(data=I32, length=8), {}, "4 rows from token 0 on .* give start=3 if the request left"),
    "a number": (7, {}, "got int"),
    "a set": ({1, 2}, {}, "got set"),
    "ragged lists": ([[[1, 2]], [[1, 2], [3, 4]]], {}, r"each level of one length; among the tokens are lengths \[1, 2\]"),
    "ragged experts": ([[[1, 2], [1]]], {}, "among the layers are lengths"),
    "lists of bool": ([[[1, True]]], {}, "hold whole numbers or None; got bool"),
    "lists of float": ([[[1, 2.0]]], {}, "hold whole numbers or None; got float"),
    "lists of text": ([[["1", "2"]]], {}, "of str"),
    "huge numbers": ([[[1, 2**40]]], {}, "beyond 32 bits"),
    "two levels": ([[1, 2]], {}, "2 deep"),
    "seven levels": ([[[[[[[1]]]]]]], {}, "6 deep"),
    "empty": ([], {}, "at least one"),
    "nothing but None": ([[None, None]], {}, "nothing|of empty"),
    "None without length": ([None], {}, "needs the length"),
    "truncated base64": (b64(I32.tobytes())[:-3], FLAT, "truncated"),
    "shortened base64": (b64(I32.tobytes())[:-4], {**FLAT, "lengths": 4}, "truncated"),
    "no base64": ("*" * 128, FLAT, "not base64"),
    "text": ("é" * 128, FLAT, "not base64"),
    "raw bytes without a shape": (b64(I32.tobytes()), {}, "have no shape"),
    "raw bytes of other rows": (I32.tobytes(), {**FLAT, "lengths": 11}, "do not make 11 or 10 rows"),
    "half of the raw bytes": (I32.tobytes(), {**FLAT, "lengths": 9}, "look like wider numbers"),
    "no layer numbers": (I32, {"moe_layer_L": []}, "at least one layer"),
    "layer numbers of text": (I32, {"moe_layer_L": "abc"}, "moe_layer_L must"),
    "ambiguous raw bytes": (b"\1" * 12, {**FLAT, "lengths": 2}, "fit both"),
    "ambiguous layers": (bytes(4 * 2 * 6), {"num_topk": 2, "moe_layer_L": [1, 2]}, "fit both"),
    "another dtype": (I32.astype(np.uint8).tobytes(), {**FLAT, "dtype": "int32", "lengths": 4}, "do not make"),
    "uint8 read as int32": (bytes(range(24)), FLAT, "lists expert"),
    "a dtype of floats": (I32.tobytes(), {**FLAT, "dtype": "float32"}, "dtype must name whole numbers"),
    "a dtype of anything": (I32.tobytes(), {**FLAT, "dtype": "(100000,100000)i4"}, "dtype must name whole numbers"),
    "npy claims 100 GB": (lying_header("(25000000, 125, 8)"), {}, "claims int32 .* 100000000000 bytes, but 96 follow"),
    "npy claims it in base64": (b64(lying_header("(25000000, 125, 8)")), {}, "claims int32"),
    "npy truncated": (npy(I32)[:-8], {}, "claims int32"),
    "npy with more behind": (npy(I32) + b"\0", {}, "claims int32"),
    "npy of objects": (npy(objects()), {}, r"header says \|O"),
    "npy of floats": (npy(I32.astype(float)), {}, "header says <f8"),
    "npy without header": (npy(I32)[:9], {}, "no readable header"),
    "npy with a negative axis": (lying_header("(-4, -3, 2)"), {}, "no readable header"),
    "npy with code": (lying_header("__import__('os')"), {}, "no readable header"),
    "npy with two axes": (npy(I32[0]), {}, "shape"),
    "dict without routing": ({"text": "a"}, {}, "this one has text"),
    "dict of a response": ({"choices": []}, {}, "routing.readers.vllm or .sglang"),
    "dict claims 100 GB": ({"data": "AAAA", "shape": [10**9, 50, 2], "dtype": "uint8"}, {}, "3 bytes cannot hold"),
    "dict with a wild shape": ({"data": "AAAA", "shape": [3, -1], "dtype": "uint8"}, {}, "shape must be"),
    "dict with a shape of text": ({"data": "AAAA", "shape": "312", "dtype": "uint8"}, {}, "shape must be"),
    "dict with another encoding": ({"data": "AAAA", "encoding": "zstd"}, {}, "encoding"),
    "too few rows": (I32, {"lengths": 6}, "4 rows from token 0 on do not reach the end of 6 tokens"),
    "start beyond the end": (I32, {"lengths": 3, "start": 4}, "cannot have start 4"),
    "start twice": ({"data": I32, "start": 1}, {"start": 2}, "start says 2 but the payload 1"),
    "lengths twice": (Routed(data=I32, length=5), {"lengths": 4}, "lengths says 4"),
    "lengths for another number": (I32, {"lengths": [4, 4]}, "2 numbers for 1 sequences"),
    "one length for many": ([I32, I32], {"lengths": 4}, "give one for each"),
    "a length of zero": (I32, {"lengths": 0}, "at least 1"),
    "a length of text": (I32, {"lengths": ["4"]}, "whole number"),
    "a mask in pieces": (I32[None], {"mask": [[1, 0, 1, 1]]}, "one run of at least one token"),
    "a mask of floats": (I32[None], {"mask": [[1, 1, 1, 0.5]]}, "mask must be bool"),
    "a mask for a list": ([I32], {"mask": [[1, 1, 1, 1]]}, "mask .* goes with one array"),
    "no experts": (I32, {"num_experts": None}, "give model, or num_experts"),
    "a contradiction": (I32, {"model": "mixtral-8x7b", "num_experts": 9}, "contradicts the model"),
    "layers that a row cannot have": (I32, {"num_layers": 3, "moe_layer_L": [0, 5]}, "given where 3 fit"),
    "layer numbers twice": (I32, {"moe_layer_L": [0, 0, 1]}, "moe_layer_L"),
    "fewer experts than top-k": (I32, {"num_experts": 1}, "impossible"),
    "counts of tokens as text": ({"routed_experts": I32, "prompt_tokens": "1", "completion_tokens": 3}, {}, "count of tokens"),
    "segments beyond the end": (Routed(segments=[{"data": I32, "start": 2}], length=5), {}, "reach token 6 of a sequence of 5"),
    "a segment of garbage": (Routed(segments=[I32, {"data": "AAAA", "shape": [3, -1]}]), {}, "segment 1: .*shape must be"),
    "a prompt that is too short": (
        Routed(data=I32, prompt=I32, prompt_length=5, length=9), {}, "4 rows of prompt from token 0 on do not make its 5"
    ),
}  # fmt: skip
if torch:
    GARBAGE |= {
        "float tensor": (torch.from_numpy(I32).to(torch.bfloat16), {}, "tensor of bfloat16"),
        "bool tensor": (torch.from_numpy(I32 > 3), {}, "tensor of bool"),
        "meta tensor": (torch.empty(4, 3, 2, dtype=torch.int32, device="meta"), {}, "no plain values"),
        "sparse tensor": (torch.from_numpy(I32).to_sparse(), {}, "no plain values"),
    }


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_in_one_sentence(name):
    payload, options, message = GARBAGE[name]
    options = {"num_experts": 8, **options}
    with pytest.raises(InputError, match=message) as error:
        from_routed_experts(payload, **options)
    text = str(error.value)
    assert text.endswith(".") and ". " not in text and len(text) < 400, text


@pytest.mark.parametrize("name", ["npy claims 100 GB", "npy claims it in base64", "dict claims 100 GB", "an id too large"])
def test_nothing_is_allocated_for_garbage(name):
    payload, options, _ = GARBAGE[name]
    options = {"num_experts": 8, **options}
    with pytest.raises(InputError):
        from_routed_experts(payload, **options)  # imports and kernels
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            from_routed_experts(payload, **options)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200), st.sampled_from(["raw", "base64", "npy", "text"]), st.integers(0, 99))
def test_noise_is_read_or_refused(noise, form, at):
    blob = npy(I32)
    payload = {
        "raw": noise,
        "base64": b64(noise),
        "npy": blob[: 6 + at] + noise + blob[6 + at + len(noise) :],
        "text": noise.decode("latin1"),
    }[form]
    try:
        trace, _ = from_routed_experts(payload, num_experts=8, **FLAT)
    except InputError as error:
        assert str(error).endswith(".")
    else:
        assert trace.topk_TLK.shape[1:] == (3, 2)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({}, "give either micro_step_Q and rank_Q, or range_X5"),
        ({"micro_step_Q": [0]}, "give either micro_step_Q and rank_Q"),
        ({"micro_step_Q": [0], "rank_Q": [0], "range_X5": [[0, 0, 1, 0, 0]]}, "give either"),
        ({"micro_step_Q": [0], "rank_Q": [2]}, "ranks 2 to 2"),
        ({"micro_step_Q": [1], "rank_Q": [0], "num_micro_steps": 1}, "micro-steps up to 1"),
        (
            {"micro_step_Q": [10**9], "rank_Q": [0]},
            r"1000000001 micro-steps x 2 ranks take .*; number micro-steps from 0 without",
        ),
        ({"micro_step_Q": [-1], "rank_Q": [0]}, "no sequence has a micro-step"),
        ({"micro_step_Q": [0, 0], "rank_Q": [0, 0]}, "must have shape"),
        ({"range_X5": [[1, 0, 1, 0, 0]]}, "names sequence 1"),
        ({"range_X5": [[0, 0, 5, 0, 0]]}, "reaches token 5 of 4"),
        ({"range_X5": [[0, 0, 3, 0, 0], [0, 2, 4, 0, 1]]}, "overlapping"),
        ({"range_X5": [[0, 2, 2, 0, 0]]}, "empty or overlapping"),
        ({"range_X5": [[0, -1, 2, 0, 0]]}, "negative"),
    ],
)
def test_places_that_do_not_exist_are_refused(places, message):
    with pytest.raises(InputError, match=message):
        count_workload(I32, num_experts=8, num_ranks=2, **places)


@pytest.mark.parametrize(
    ("read", "outputs", "message"),
    [
        (vllm.payloads, {"text": "a"}, "needs outputs or choices"),
        (vllm.payloads, SimpleNamespace(outputs=[]), "needs outputs or choices"),
        (vllm.payloads, {"choices": [{}], "prompt_token_ids": 3}, "token ids must be a list"),
        (sglang.payloads, "text", "meta_info or choices"),
        (sglang.payloads, [[]], "0 requests"),
        (sglang.payloads, [[{"choices": [{"routed_experts": I32}] * 2}]], "they have 2 together"),
        (vllm.payloads, [[]], "0 requests"),
        (sglang.payloads, {"text": "a", "meta_info": {"id": 1}}, "needs routed_experts"),
        (sglang.payloads, {"choices": [{"sgl_ext": {"routed_experts": b64(I32.tobytes())}}]}, "needs routed_experts"),
        (sglang.payloads, {"choices": 3}, "choices of an output must be a list of dicts; got int"),
    ],
)
def test_responses_without_routing_are_refused(read, outputs, message):
    with pytest.raises(InputError, match=message):
        read(outputs)


@pytest.mark.parametrize("empty", ["", b"", [], None, I32[:0], npy(I32[:0])], ids=repr)
def test_a_request_that_was_aborted_is_unknown_tokens(empty):
    """Engines send no rows for it, in one encoding or another; the other sequences are read."""
    trace, report = from_routed_experts([empty, I32], num_experts=8, num_topk=2, num_layers=3, lengths=[3, 4])
    assert trace.known_T.tolist() == [False] * 3 + [True] * 4 and report.num_missing_tokens == 3


def test_an_error_names_the_sequence():
    with pytest.raises(InputError, match="sequence 1: token 1"):
        from_routed_experts([I32, changed(9)], num_experts=8)
    with pytest.raises(InputError, match="sequence 1: "):
        from_routed_experts([I32, {"x": 1}], num_experts=8)


@pytest.mark.parametrize("topk", [I32.astype(float), I32 > 3, I32[0], changed(8), changed(-2)])
def test_count_pairs_refuses(topk):
    with pytest.raises(InputError, match=r"routing (must be|holds)"):
        count_pairs(topk, 8)
