"""vLLM: what its `--enable-return-routed-experts` returns, as payloads for `from_routed_experts` and `count_workload`.

vLLM itself is not imported.
"""

from collections.abc import Mapping
from typing import Any

from foremoe.base.errors import InputError
from foremoe.routing.readers.sequences import Routed, num_ids


def payloads(outputs: Any) -> list[Routed]:
    """One `Routed` per completion, in order.

    Args:
        outputs: A `RequestOutput` of vLLM or a response of its HTTP server as a dict, or a list of them. Of a request,
            `prompt_token_ids`, `prompt_routed_experts` and `routed_experts_prompt_start` are read, of its completions (`outputs`
            or `choices`) `token_ids` and `routed_experts`. Without token ids, give `lengths`.

    Raises:
        InputError: Something without completions.
    """
    out = []
    for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
        completions = get(output, "outputs") or get(output, "choices")
        if not isinstance(completions, list | tuple) or not completions:
            raise InputError(f"a request's output needs outputs or choices with routed_experts; got {type(output).__name__}.")
        prompt, prompt_length = get(output, "prompt_routed_experts"), num_ids(get(output, "prompt_token_ids"))
        start = get(output, "routed_experts_prompt_start") or 0
        for completion in completions:
            num_tokens = num_ids(get(completion, "token_ids"))
            length = None if prompt_length is None or num_tokens is None else prompt_length + num_tokens
            data = get(completion, "routed_experts")
            out.append(Routed(data=data, prompt=prompt, length=length, prompt_length=prompt_length, start=start))
    return out


def get(value: Any, name: str) -> Any:
    """A key of a dict or an attribute of an object; None if there is none."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
