"""Answers that the protocol classes of vLLM and SGLang wrote, read as what they were given or refused with a cure."""

import json
import pathlib

import numpy as np
import pytest
from engine_answers import MOE_LAYERS, NUM_EXPERTS, NUM_TOPK, routing_of

from foremoe.base.errors import InputError
from foremoe.routing.readers import sglang, vllm
from foremoe.workload import from_routed_experts

CASES = json.loads((pathlib.Path(__file__).parent / "engine_answers.json").read_text())
READ = {"vllm": vllm.payloads, "sglang": sglang.payloads}
MODEL = {"num_experts": NUM_EXPERTS, "num_topk": NUM_TOPK, "num_layers": MOE_LAYERS[-1] + 1, "moe_layer_L": MOE_LAYERS}
VLLM = {**MODEL, "num_layers": None}


def read(case, **options):
    model = VLLM if case["engine"] == "vllm" else MODEL
    return from_routed_experts(READ[case["engine"]](case["answer"]), **model, **options)


def check(found, sequences):
    trace, report = found
    assert trace.seq_len_Q.tolist() == [T for _, T, _, _ in sequences]
    want_TLK = np.concatenate([routing_of(q, T) for q, T, _, _ in sequences])
    known_T = np.concatenate([(first <= np.arange(T)) & (np.arange(T) < end) for _, T, first, end in sequences])
    got_T = np.ones(trace.T, bool) if trace.known_T is None else trace.known_T
    assert got_T.tolist() == known_T.tolist() and report.num_padding_rows == 0
    assert (trace.topk_TLK[known_T] == want_TLK[known_T]).all()


def named(what, engine="vllm", version=None):
    return next(c for c in CASES if c["what"] == what and c["engine"] == engine and version in (None, c["version"]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['engine']} {case['version']} {case['what']}")
def test_what_engines_answer_is_read_or_refused(case):
    if isinstance(case["expected"], str):
        with pytest.raises(InputError, match=case["expected"]):
            read(case)
    else:
        check(read(case), case["expected"])


def test_who_requested_no_start_may_say_so():
    """Choices without ids end at the last token but one, wherever the request let them begin."""
    case = named("ChatCompletionResponse of two choices without ids")
    check(read(case, start=0), [[0, 9, 0, 8], [1, 7, 0, 6]])
    check(read(case, lengths=[9, 7]), [[0, 9, 0, 8], [1, 7, 0, 6]])
    with pytest.raises(InputError, match=r"8 rows from token 0 on do not reach the end of 10 tokens.* give start=1"):
        read(case, lengths=[10, 7])


def test_a_start_may_be_given_beside_the_answer():
    for kind in ("CompletionResponse", "ChatCompletionResponse"):
        check(read(named(f"{kind} from token 3 on, unsaid"), start=3), [[0, 9, 3, 8]])
        check(read(named(f"{kind} from token 3 on, unsaid", "sglang"), start=3), [[0, 9, 3, 8]])


@pytest.mark.parametrize("engine", READ)
def test_requests_of_one_sequence(engine):
    whole, rest = named("ChatCompletionResponse", "sglang"), named("ChatCompletionResponse from token 3 on", "sglang")
    if engine == "vllm":
        whole, rest = named("CompletionResponse without"), named("CompletionResponse from token 3 on")
    case = {"engine": engine, "answer": [[whole["answer"], rest["answer"]], whole["answer"]]}
    check(read(case), [[0, 9, 0, 8]] * 2)
    with pytest.raises(InputError, match="a sequence of 1 requests needs one choice in each; they have 2 together"):
        READ[engine]([[named("ChatCompletionResponse of two choices", engine)["answer"]]])


def test_the_last_chunk_of_a_stream_has_the_routing():
    answer = {**named("ChatCompletionResponse", "sglang")["answer"], "choices": [], "usage": None}
    check(read({"engine": "sglang", "answer": answer}, lengths=[9]), [[0, 9, 0, 8]])
