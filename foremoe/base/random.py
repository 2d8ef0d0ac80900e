"""A random number generator for compiled searches, which has the same results on all machines."""

import numpy as np

from foremoe.base.compiled import kernel


@kernel
def next_random(state):
    """Returns the next uint64 of SplitMix64 (Steele, Lea, Flood 2014) and advances `state`, uint64 [1]."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def random_below(state, num):
    """Returns a random int64 in [0, num) and advances `state`."""
    return np.int64(next_random(state) % np.uint64(num))
