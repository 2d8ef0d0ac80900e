"""Parts of the search. Each part can be left out, so that `bench.ablation` can measure the gain from it."""

from __future__ import annotations

from collections.abc import Iterable

from foremoe.base.errors import InputError

# In the order in which they are applied to a row.
PARTS = (
    "nearest", "node first", "copy limits", "split", "prune", "bring", "groups", "smoothing", "busiest", "links", "ranks",
    "replacement", "wanted",
)  # fmt: skip
(
    NEAREST, NODE_FIRST, COPY_LIMITS, SPLIT, PRUNE, BRING, GROUPS, SMOOTHING, BUSIEST, LINKS, RANKS, REPLACEMENT, WANTED,
) = (1 << i for i in range(len(PARTS)))  # fmt: skip


def without(names: Iterable[str]) -> int:
    """Returns the bits of all parts except the named ones.

    Raises:
        InputError: A name is not in `PARTS`.
    """
    bits = (1 << len(PARTS)) - 1
    for name in names:
        if name not in PARTS:
            raise InputError(f"the search has no part {name!r}; its parts are {', '.join(PARTS)}.")
        bits &= ~(1 << PARTS.index(name))
    return bits
