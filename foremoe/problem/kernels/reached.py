"""Estimates, from counts of pairs, of the number of tokens with an expert in a place. A place is a rank or a node."""

from foremoe.base.compiled import inner_kernel


@inner_kernel
def reached(tokens, pairs, num_topk, num_experts):
    """Returns the number of tokens that have at least one expert in a place, which serves `pairs` of these tokens' pairs.

    The estimate assumes that all tokens draw distinct experts from the same distribution.
    """
    if pairs <= 0.0:
        return 0.0
    held, without, all_drawn = pairs / (tokens * num_topk) * num_experts, 1.0, 1.0
    for drawn in range(num_topk):
        without *= max(0.0, num_experts - drawn - held)
        all_drawn *= num_experts - drawn
    return tokens * (1.0 - without / all_drawn)


@inner_kernel
def alone(share, num_topk, num_experts):
    """Returns the probability that an expert of a token is the token's only one in a place with this share of all experts."""
    none = 1.0
    for drawn in range(1, num_topk):
        none *= max(0.0, 1.0 - (share * num_experts - 1.0) / (num_experts - drawn))
    return min(1.0, none)
