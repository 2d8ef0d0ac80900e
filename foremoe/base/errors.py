"""The errors a user of foremoe can meet: bad input, a plan that breaks a law, and a transfer that failed."""

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


class TransferError(RuntimeError):
    """Weights, gradients or tokens did not arrive: the step cannot go on, and its result must not be used.

    Args:
        message: one sentence with the numbers and the cure.
        ranks: the ranks of the EP group at fault, as far as they are known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class StaleWeights(TransferError):
    """Weights changed between the moment a plan began and a copy of them: an optimizer step inside a plan."""
