"""Splits the answers of rollout engines into sequences and finds the lengths of the sequences."""

from collections.abc import Callable, Mapping
from typing import Any

from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.routing.readers.sequences import MAX_TOKENS, Routed, num_ids


def sequences_of(answers: Any, read: Callable[[Any], list[Routed]]) -> list[Routed]:
    """Returns the sequences that `read` finds in each answer, in order. A nested list holds the requests of one sequence."""
    out = []
    for answer in answers if isinstance(answers, list | tuple) else [answers]:
        if not isinstance(answer, list | tuple):
            out += read(answer)
            continue
        segments = [item for request in answer for item in read(request)]
        if len(segments) != len(answer) or not segments:
            have = f"they have {len(segments)} together"
            raise InputError(f"a sequence of {len(answer)} requests needs one choice in each; {have}.")
        out.append(Routed(segments=tuple(segments)))
    return out


def total(prompt: tuple[Any, ...], completion: tuple[Any, ...], usage: Any) -> int | None:
    """Returns the number of tokens of a sequence, or None if it is not known.

    Prompt and completion each have the length of their first list of ids or, without such a list, the length given in `usage`.
    """
    counts = []
    for ids, name in ((prompt, "prompt_tokens"), (completion, "completion_tokens")):
        known = [n for n in map(num_ids, ids) if n is not None]
        given = None if known else get(usage, name)
        counts += known[:1] or ([] if given is None else [whole(given, name, 0, MAX_TOKENS)])
    return sum(counts) if len(counts) == 2 else None


def get(value: Any, name: str) -> Any:
    """Returns the value of a dict's key or of an object's attribute, or None if it does not exist."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
