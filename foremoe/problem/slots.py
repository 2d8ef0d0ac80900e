"""Slot policies: where the weights of replicas lie between being copied in and being used."""

from collections.abc import Callable
from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.problem.placement import repeated


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """One ring of buffers per rank, shared by all layers: little memory, weights are sent again for backward.

    A rank has ``redundant * depth`` buffers. A deeper ring lets copies start earlier; content that is still in the ring when
    it is needed again (around the turn from forward to backward) is not sent twice. With large micro-steps two do as well
    (8192 tokens per rank: 0.2 % longer stages at most); with small ones the third buffer pays.
    """

    depth: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", whole(self.depth, "depth of SharedSlots", 1, 1024))

    def num_buffers(self, redundant: int, num_layers: int) -> int:
        """Buffers on one rank, each as large as one expert."""
        return redundant * self.depth


@dataclass(frozen=True, slots=True)
class ResidentSlots:
    """Buffers of their own for every layer: more memory, and replicas that stay from one micro-step to the next.

    A replica that stays is sent once, and its gradient is summed in its slot and goes home once. A rank has
    ``redundant * copies`` buffers per layer. Under 1F1B a later forward overwrites what an earlier backward still needs unless
    ``copies`` covers the micro-steps in flight; with fewer, weights are sent again.

    Example:
        >>> resident = foremoe.Problem.of(work, cluster, redundant=1, slots=foremoe.ResidentSlots())
        >>> kept, _ = foremoe.Planner().plan(resident)
        >>> len(kept.transfers), len(plan.transfers)
        (38, 111)
    """

    copies: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", whole(self.copies, "copies of ResidentSlots", 1, 1024))

    def num_buffers(self, redundant: int, num_layers: int) -> int:
        """Buffers on one rank, each as large as one expert."""
        return redundant * self.copies * num_layers


Slots = SharedSlots | ResidentSlots


def resident_fault(resident_LGS: Array | None, slots: Slots, num_experts: int, num_base: int) -> str:
    """Why slots cannot hold this at the start, in one sentence; empty if they can."""
    if resident_LGS is None:
        return ""
    if not isinstance(slots, ResidentSlots):
        return "resident_LGS is for ResidentSlots; SharedSlots hold nothing from one plan to the next."
    if resident_LGS.size and not -1 <= resident_LGS.min() <= resident_LGS.max() < num_experts:
        held = f"{resident_LGS.min()} to {resident_LGS.max()}"
        return f"resident_LGS holds {held}; give experts from 0 to {num_experts - 1}, or -1 for an empty slot."
    twice = repeated(resident_LGS[..., num_base:]).any()
    return "resident_LGS holds an expert twice on one rank; empty one of the two slots." if twice else ""


def slots_of(text: str) -> Slots:
    """The slot policy of ``shared:DEPTH`` or ``resident:COPIES`` (3 and 1 where the number is left out)."""
    kind, colon, count = text.strip().lower().partition(":")
    kinds: dict[str, Callable[..., Slots]] = {"shared": SharedSlots, "resident": ResidentSlots}
    if kind not in kinds or (colon and not (count.isascii() and count.isdigit() and len(count) <= 9)):
        raise InputError(f"{text!r} is not a valid slot policy; write shared:DEPTH or resident:COPIES, for example shared:3.")
    return kinds[kind](int(count)) if colon else kinds[kind]()
