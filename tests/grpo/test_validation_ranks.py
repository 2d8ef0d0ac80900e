"""Configurations of `bench.validation`: stages from host stores and with re-forward compute what the plain ones do."""

import pytest
import torch

from bench.validation_ranks import Configuration, Rank
from examples.grpo.arms import Arms
from examples.grpo.planning import cluster_of
from examples.grpo.task import MAX_ANSWER
from foremoe.plan.transfers import Link
from foremoe.testing.ranks import get_pool


def gradients(group, options):
    """What an update leaves on a rank, and whether copies came from host stores, and forwards ran again."""
    torch.use_deterministic_algorithms(True)
    config = Configuration(hidden=32, tokens=256, skew=1.3, redundant=2, slot_depth=3, held_out=True, **options)
    rank = Rank(group, config, config.cluster(cluster_of(2)))
    with rank.runtime:
        arms = Arms(rank.policy, rank.runtime, rank.clock, rank.plans)
        _, old = arms.recompute("foremoe", rank.batches["recompute"])
        advantage = [torch.ones_like(old_A) for old_A in old]
        run = arms.update("foremoe", rank.batches["update"], old, advantage, len(rank.samples.length_Q) * MAX_ANSWER)
    assert run.report["drift"] == run.report["fell_back"] == 0
    plan = rank.plans["update"].plan
    links = set(plan.transfers.link_C.tolist())
    found = [p.grad.flatten() for p in (*rank.policy.parameters(), *rank.bank.parameters()) if p.grad is not None]
    return torch.cat(found), links, plan.header.schedule.reforward


@pytest.mark.parametrize(
    "options", [{"host_nodes": 1}, {"host_nodes": 2}, {"reforward": True}, {"host_nodes": 2, "reforward": True}]
)
def test_host_stores_and_reforward_leave_the_same_gradients(options):
    plain = get_pool(2).run(gradients, {}, num_ranks=2)
    for (want, _, _), (found, links, reforward) in zip(plain, get_pool(2).run(gradients, options, num_ranks=2), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
        assert reforward == options.get("reforward", False)
        assert (links == {int(Link.HOST)}) == ("host_nodes" in options)
