"""Answers that the protocol classes of vLLM and SGLang wrote, read as what they were given or refused with a cure."""

import json

import pytest
from engine_answers import DATA, check, fault, read

from foremoe.base.errors import InputError
from foremoe.routing.readers import sglang, vllm

CASES = json.loads(DATA.read_text())
READ = {"vllm": vllm.payloads, "sglang": sglang.payloads}


def named(what, engine="vllm", version=None):
    return next(c for c in CASES if c["what"] == what and c["engine"] == engine and version in (None, c["version"]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['engine']} {case['version']} {case['what']}")
def test_what_engines_answer_is_read_or_refused(case):
    assert fault(case) is None


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
