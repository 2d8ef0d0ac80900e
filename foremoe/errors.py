"""The two errors a user of foremoe can meet: bad input, and a plan that breaks a law."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from the caller: one sentence with the numbers and the cure."""


class PlanError(ValueError):
    """One broken law of the Plan IR.

    Args:
        law: which law is broken: ``tokens``, ``homes``, ``slots``, ``canonical``, ``quota``, ``residency``, ``buffers``,
            ``header``, ...
        where: the place, for example ``"micro-step 3, layer 7, rank 2"``.
        message: what is wrong, with the numbers.
    """

    def __init__(self, law: str, where: str, message: str) -> None:
        self.law, self.where, self.message = law, where, message
        super().__init__(f"[{law}] {where}: {message}" if where else f"[{law}] {message}")
