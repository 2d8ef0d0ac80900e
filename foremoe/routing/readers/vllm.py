"""Converts results of vLLM's `--enable-return-routed-experts` to payloads for `from_routed_experts` and `count_workload`.

vLLM itself is not imported.
"""

from collections.abc import Mapping
from typing import Any

from foremoe.base.errors import InputError
from foremoe.routing.readers.answers import get, sequences_of, total
from foremoe.routing.readers.sequences import Routed, num_ids


def payloads(outputs: Any) -> list[Routed]:
    """Returns one `Routed` per completion, in order.

    Args:
        outputs: A `RequestOutput` of vLLM, an answer of its HTTP server as a dict, or a list of these. A nested list holds the
            requests (turns, resumed rollouts) of one sequence. Lengths are taken from token ids, or from `usage` if an answer has
            one choice. If an answer has neither, pass `lengths` to the function that reads the payloads. Answers do not repeat
            the request's `routed_experts_prompt_start`. If the request set it, add the value to the answer under this name, or
            pass `start`.

    Raises:
        InputError: An output has no completions.
    """
    return sequences_of(outputs, _of_answer)


def _of_answer(answer: Any) -> list[Routed]:
    completions = get(answer, "outputs") or get(answer, "choices")
    if not isinstance(completions, list | tuple) or not completions:
        raise InputError(f"a request's output needs outputs or choices with routed_experts; got {type(answer).__name__}.")
    usage = get(answer, "usage") if len(completions) == 1 else None  # for several choices, usage has sums
    prompt_ids, start = get(answer, "prompt_token_ids"), get(answer, "routed_experts_prompt_start") or 0
    apart = "prompt_routed_experts" in answer if isinstance(answer, Mapping) else hasattr(answer, "prompt_routed_experts")
    out = []
    for completion in completions:
        length = total((get(completion, "prompt_token_ids"), prompt_ids), (get(completion, "token_ids"),), usage)
        routed = Routed(
            data=get(completion, "routed_experts"), prompt=get(answer, "prompt_routed_experts"), length=length, start=start,
            prompt_length=num_ids(prompt_ids) if apart else None, num_last_missing=None,
        )  # fmt: skip
        out.append(routed)
    return out
