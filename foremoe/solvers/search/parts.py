"""Parts of the search: each can be left out, for `bench.ablation`, which says what it is worth."""

from __future__ import annotations

from collections.abc import Iterable

from foremoe.base.errors import InputError

# In the order in which a row meets them.
PARTS = (
    "nearest", "node first", "copy limits", "split", "prune", "bring", "groups", "smoothing", "busiest", "links", "ranks",
    "replacement", "wanted",
)  # fmt: skip
(
    NEAREST, NODE_FIRST, COPY_LIMITS, SPLIT, PRUNE, BRING, GROUPS, SMOOTHING, BUSIEST, LINKS, RANKS, REPLACEMENT, WANTED,
) = (1 << i for i in range(len(PARTS)))  # fmt: skip


def without(names: Iterable[str]) -> int:
    """The bits of all parts but some.

    Raises:
        InputError: There is no such part.
    """
    bits = (1 << len(PARTS)) - 1
    for name in names:
        if name not in PARTS:
            raise InputError(f"the search has no part {name!r}; its parts are {', '.join(PARTS)}.")
        bits &= ~(1 << PARTS.index(name))
    return bits
