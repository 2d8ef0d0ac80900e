"""Converts results of SGLang's `--enable-return-routed-experts` to payloads for `from_routed_experts` and `count_workload`.

SGLang itself is not imported.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from foremoe.base.errors import InputError
from foremoe.routing.readers.answers import get, sequences_of, total
from foremoe.routing.readers.sequences import Routed, parse_routed


def payloads(outputs: Any) -> list[Routed]:
    """Returns one `Routed` for each output or choice, in order. SGLang returns no routing for the last token of a sequence.

    Args:
        outputs: A dict with `meta_info` as returned by `/generate` and the engine, an answer of an OpenAI route with `choices`,
            or a list of these. A nested list holds the requests (turns, resumed rollouts) of one sequence, in order. OpenAI
            routes send the routing of only the first choice, in `sglext`, unless the request has `return_meta_info`. Lengths are
            taken from token ids and token counts. If an answer has neither, pass `lengths` to the function that reads the
            payloads. Answers do not repeat the request's `routed_experts_start_len`. If the request set it, add the value to the
            answer under this name, or pass `start`.

    Raises:
        InputError: The output is in another format.
    """
    return sequences_of(outputs, _of_answer)


def _of_answer(answer: Any) -> list[Routed]:
    if not isinstance(answer, Mapping):
        raise InputError(f"an output of SGLang is a dict with meta_info or choices; got {type(answer).__name__}.")
    start = answer.get("routed_experts_start_len") or 0
    if "choices" not in answer:
        return [_of_choice(answer, start)]
    choices = answer["choices"] or [{}]  # in a stream, the chunk with the routing has no choice
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, Mapping) for choice in choices):
        raise InputError(f"choices of an output must be a list of dicts; got {type(choices).__name__}.")
    if get(answer.get("sglext"), "routed_experts") is None:
        return [_of_choice(choice, start) for choice in choices]
    sent, usage = answer["sglext"], answer.get("usage") if len(choices) == 1 else None  # for several choices, usage has sums
    output_ids = get(sent, "output_ids") or [None] * len(choices)
    out = []
    for i, choice in enumerate(choices):
        ids = choice.get("response_token_ids"), choice.get("token_ids"), output_ids[i] if i < len(output_ids) else None
        length = total((choice.get("prompt_token_ids"), get(sent, "input_ids")), ids, usage)
        data = get(sent, "routed_experts") if i == 0 else None
        out.append(Routed(data=data, length=length, start=start if i == 0 else 0, num_last_missing=None))
    return out


def _of_choice(choice: Mapping[str, Any], start: int) -> Routed:
    """Returns the routing of an output or choice that holds its own routing, or was aborted."""
    meta = choice.get("meta_info")
    reason = get(meta, "finish_reason") or choice.get("finish_reason")
    if (get(reason, "type") or reason) == "abort" and "routed_experts" not in {*choice, *(meta or ())}:
        choice = {**choice, "routed_experts": None}
    item = parse_routed(choice)
    return dataclasses.replace(item, start=item.start or start, num_last_missing=1 if item.length is None else 0)
