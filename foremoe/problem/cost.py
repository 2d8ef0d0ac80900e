"""The objective of solvers, and costs in seconds with their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, frozen_array
from foremoe.base.errors import InputError
from foremoe.base.fields import real
from foremoe.problem.rates import Rates

# Letters: N rows, M micro-steps, L layers.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cost(ArrayValue):
    """Costs in seconds, by part. All parts have the same shape ([], [N] or [M, L]) and sum to `total_s`.

    Attributes:
        window_s: Time of attention and other work before the experts on the slowest rank, summed over all passes.
        dispatch_s: Time that the busiest rank takes to send tokens to the experts, summed over all passes.
        compute_s: Time that the slowest rank takes to compute its experts, summed over all passes.
        combine_s: Time that the busiest rank takes to send the outputs of experts back, summed over all passes.
        transfer_s: Time of exposed weight copies, plus the compute time that is lost to copies.
        gradient_s: Time of exposed gradient returns from replicas, plus the compute time that is lost to them.
    """

    window_s: Array
    dispatch_s: Array
    compute_s: Array
    combine_s: Array
    transfer_s: Array
    gradient_s: Array

    def __post_init__(self) -> None:
        shape = np.shape(self.window_s)
        for part in dataclasses.fields(self):
            object.__setattr__(self, part.name, frozen_array(getattr(self, part.name), np.float64, part.name, shape))

    def parts(self) -> dict[str, Array]:
        """Returns the seconds of each part, keyed by its name."""
        return {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}

    @property
    def total_s(self) -> Array:
        """Sum of all parts, with the shape of a part."""
        return np.asarray(sum(self.parts().values()))

    def each(self, change: Callable[[Array], Array]) -> Cost:
        """Applies `change` to every part."""
        return Cost(**{name: change(part) for name, part in self.parts().items()})

    def sum(self) -> Cost:
        """Sums every part over all rows."""
        return self.each(np.sum)

    def reshape(self, *shape: int) -> Cost:
        """Reshapes every part."""
        return self.each(lambda part: part.reshape(*shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The objective, and the share of the window that can overlap with copies.

    Attributes:
        objective: Quantity to minimise. ``"time"`` is the time of the row, and ``"balance"`` the largest rank load only.
        overlap: Share of compute time that copies can overlap with, from 0 (as when planning online) to 1. The compute time is
            the window plus the expert compute of one balanced layer, or only the window if there is one buffer per slot.

    Example:
        >>> balance = foremoe.Problem.of(work, cluster, redundant=1, cost=foremoe.CostModel(objective="balance"))
        >>> print(foremoe.Planner().plan(balance)[0].summary().splitlines()[2])
        optimal: proven for 16 of 16 rows in balance
    """

    objective: str = "time"
    overlap: float = 1.0

    def __post_init__(self) -> None:
        if self.objective not in ("time", "balance"):
            raise InputError(f'objective must be "time" or "balance"; got {self.objective!r}.')
        real(self.overlap, "overlap", 0.0, 1.0, open_low=False)

    def adjust(self, rates: Rates) -> Rates:
        """Returns the rates for pricing. A subclass may override this method to change the rates that come from the machine."""
        return rates
