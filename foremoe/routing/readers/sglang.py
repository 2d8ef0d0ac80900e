"""SGLang: what its `--enable-return-routed-experts` returns, as payloads for `from_routed_experts` and `count_workload`.

SGLang itself is not imported.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from foremoe.base.errors import InputError
from foremoe.routing.readers.sequences import Routed, parse_routed


def payloads(outputs: Any) -> list[Routed]:
    """One `Routed` per output, in order: rows from `routed_experts_start_len` on, the last token without one.

    Args:
        outputs: A dict with `meta_info` as `/generate` and the engine return it, a response of the OpenAI route with `choices`
            (`meta_info` or `sgl_ext`), or a list of these. Where `meta_info` counts tokens, no lengths are needed. A list in the
            list is one sequence of several requests (turns, resumed rollouts), in their order; see `Routed.segments`.

    Raises:
        InputError: Something else.
    """
    out = []
    for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
        if isinstance(output, list | tuple):
            segments = payloads(output)
            if len(segments) != len(output) or not segments:
                have = f"they have {len(segments)} together"
                raise InputError(f"a sequence of {len(output)} requests needs one choice in each; {have}.")
            out.append(Routed(segments=tuple(segments)))
            continue
        if not isinstance(output, Mapping):
            raise InputError(f"an output of SGLang is a dict with meta_info or choices; got {type(output).__name__}.")
        choices = output.get("choices") or [output]
        if not isinstance(choices, list | tuple):
            raise InputError(f"choices of an output must be a list; got {type(choices).__name__}.")
        for choice in choices:
            item = parse_routed(choice)
            out.append(item if item.length is not None else dataclasses.replace(item, num_last_missing=1))
    return out
