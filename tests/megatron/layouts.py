"""Which layouts are tested: every pair of what a program can be asked for, in few runs."""

import collections
import itertools
import os
import random
from dataclasses import dataclass

from program import Layout

# What every factor can be. The grid is (ranks, EP, PP, VPP), and EDP what is left; sizes that need eight ranks are left out.
FACTORS = {
    "grid": ((2, 2, 1, None), (4, 4, 1, None), (4, 2, 1, None), (4, 2, 2, None), (4, 2, 2, 2)),
    "tp": (1, 2),
    "recompute": (None, "full", "full2", "block", "selective"),
    "overlap_grad": (False, True),
    "optimizer": ("plain", "distributed", "overlap_param"),
    # Modules, parameters' dtype and main gradients'; Megatron has no grouped float32.
    "experts": (
        ("sequential", "fp32", "fp32"), ("sequential", "bf16", "fp32"), ("sequential", "bf16", "bf16"),
        ("grouped", "bf16", "fp32"), ("grouped", "bf16", "bf16"),
    ),
    "slot_depth": (1, 3, 8),
    "nodes": (1, 2),
    "dense": (False, True),
    "shared_experts": (False, True),
}  # fmt: skip
# Of the first 150 seeds, one with the fewest choices: 28, where grid and experts alone need 25.
SEED = 41


@dataclass(frozen=True)
class Case:
    """A layout, and how it is balanced.

    Attributes:
        nodes: over how many the EP group is spread, as far as planning knows.
    """

    num_ranks: int
    layout: Layout
    slot_depth: int = 3
    nodes: int = 1

    def __str__(self):
        return f"{self.num_ranks}-{self.layout}-s{self.slot_depth}-n{self.nodes}"


def case_of(choice):
    """The case of one value per factor."""
    num_ranks, ep, pp, vpp = choice["grid"]
    chunks = pp * (vpp or 1)
    # A block of two layers needs two in a chunk (Megatron wants whole blocks); a dense layer should have others around it.
    per_chunk = 2 if choice["recompute"] == "full2" or chunks <= 2 else 1
    if choice["dense"] and chunks == 1:
        per_chunk = 4 if choice["recompute"] == "full2" else 3
    num_layers = chunks * per_chunk
    layout = Layout(
        ep=ep, tp=choice["tp"], pp=pp, vpp=vpp, num_layers=num_layers, dense=(1,) if choice["dense"] else (),
        recompute=choice["recompute"], distributed=choice["optimizer"] != "plain", overlap_grad=choice["overlap_grad"],
        overlap_param=choice["optimizer"] == "overlap_param", bf16=choice["experts"][1] == "bf16",
        narrow=choice["experts"][1:] == ("bf16", "bf16"), grouped=choice["experts"][0] == "grouped",
        shared_experts=choice["shared_experts"], M=2 if chunks == 1 else 4,
    )  # fmt: skip
    return Case(num_ranks, layout, choice["slot_depth"], choice["nodes"])


def pairs_of(choice):
    """Every two of the choice's values, each with its factor."""
    return set(itertools.combinations(choice.items(), 2))


def all_pairs():
    """Every pair of values of different factors; all are feasible."""
    return {
        ((a, x), (b, y)) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]
    }  # fmt: skip


def covering():
    """Choices that together hold every pair: each is built up factor by factor, by what is new with it."""
    left, choices = all_pairs(), []
    used = collections.Counter()
    drawn = random.Random(SEED)
    while left:
        # Start from a pair that nobody has; then each factor takes the value with the most new pairs to those before, or the
        # one that was used least.
        choice = dict(drawn.choice(sorted(left, key=repr)))
        names = [name for name in FACTORS if name not in choice]
        drawn.shuffle(names)
        for name in names:
            choice[name] = max(FACTORS[name], key=lambda v, n=name: (_num_new(left, choice, n, v), -used[n, v]))
        choice = {name: choice[name] for name in FACTORS}
        used.update(choice.items())
        left -= pairs_of(choice)
        choices.append(choice)
    return choices


def _num_new(left, choice, name, value):
    order = list(FACTORS)
    pairs = (sorted((one, (name, value)), key=lambda part: order.index(part[0])) for one in choice.items())
    return len(left & set(map(tuple, pairs)))


CHOICES = sorted(covering(), key=lambda choice: [repr(choice["grid"]), choice["tp"]])
CASES = [case_of(choice) for choice in CHOICES]


def few(together, names=tuple(FACTORS), reverse=False, each=()):
    """Fewer of CASES, in their order: all combinations of so many values of the named factors that there are in CASES.

    For laws that do not depend on every pair; at night they are tried on all cases.

    Args:
        each: factors that every combination has a value of.
    """
    if os.environ.get("HYPOTHESIS_PROFILE") == "nightly":
        return CASES
    chosen = [some for some in itertools.combinations(names, together) if set(each) <= set(some)]
    combinations = [{tuple((name, choice[name]) for name in some) for some in chosen} for choice in CHOICES]
    left, taken = set().union(*combinations), set()
    order = sorted(range(len(CASES)), reverse=reverse)
    while left:
        best = max(order, key=lambda i: len(left & combinations[i]))
        left -= combinations[best]
        taken.add(best)
    return [CASES[i] for i in sorted(taken)]
