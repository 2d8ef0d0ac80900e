"""A byte budget for arrays from a file or an answer. It depends on the actual size, not on the sizes in the header."""

import os

from foremoe.base.errors import InputError

# Limit of count arrays made from a file or an answer: `FREE_BYTES` plus `FACTOR` times the size of the source.
FREE_BYTES, FACTOR = 64 * 2**20, 4


def require_budget(num_bytes: int, what: str, cure: str, source_bytes: int | None = None) -> None:
    """Raises InputError if arrays would be too large. Call it before memory is allocated.

    Args:
        num_bytes: Size of the arrays in bytes.
        what: Description of the arrays in the message, such as ``"counts of 4 micro-steps"``.
        cure: Remedy that the message suggests.
        source_bytes: Size in bytes of the source that states the sizes. None means that the caller chose the sizes, so that only
            the machine's memory limits them.
    """
    # The operating system may promise memory that it does not have, and kill the process later.
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63
    if num_bytes > have:
        raise InputError(f"{what} take {num_bytes / 1e9:,.0f} GB of this machine's {have / 1e9:,.0f} GB; {cure}.")
    if source_bytes is not None and num_bytes > FREE_BYTES + FACTOR * source_bytes:
        allowed = f"more than the {(FREE_BYTES + FACTOR * source_bytes) / 1e6:,.0f} MB that {source_bytes:,} bytes may become"
        raise InputError(f"{what} take {num_bytes / 1e6:,.0f} MB, {allowed}; {cure}.")
