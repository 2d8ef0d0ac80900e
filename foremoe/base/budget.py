"""Byte budget: limits arrays made from a file or an answer by its actual size, not by the sizes in its header."""

import os

from foremoe.base.errors import InputError

# What arrays of counts may take that are made of a file or an answer: this, and so many times its bytes.
FREE_BYTES, FACTOR = 64 * 2**20, 4


def require_budget(num_bytes: int, what: str, cure: str, source_bytes: int | None = None) -> None:
    """Raises InputError if arrays would be too large; call it with products of sizes, before memory is allocated.

    Args:
        num_bytes: Bytes of the arrays.
        what: The arrays, for the message: ``"counts of 4 micro-steps"``.
        cure: What the caller can do.
        source_bytes: Bytes of the source of the sizes; None if the caller chose them: then only the machine limits them.
    """
    # A kernel may promise memory that it does not have and end the process later.
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
    if num_bytes > have:
        raise InputError(f"{what} take {num_bytes / 1e9:,.0f} GB of this machine's {have / 1e9:,.0f} GB; {cure}.")
    if source_bytes is not None and num_bytes > FREE_BYTES + FACTOR * source_bytes:
        allowed = f"more than the {(FREE_BYTES + FACTOR * source_bytes) / 1e6:,.0f} MB that {source_bytes:,} bytes may become"
        raise InputError(f"{what} take {num_bytes / 1e6:,.0f} MB, {allowed}; {cure}.")
