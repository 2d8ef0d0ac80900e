"""Ranks that were given other settings are told which, with both values, before anything else; on all ranks alike."""

import dataclasses

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed; make test-megatron installs it")

import program_arms as arms
from layouts import Case
from program import Layout, Program

from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.solvers import Search

PLAIN = Case(2, Layout(), 2)
CLUSTER = Cluster.preset("8xh100", num_ranks=2)


def said_by(group, case, options_G):
    """What a rank with its own options says to a stage; empty where it runs."""
    program = Program(case.layout)
    topk_MTLK = program.routing(0)
    try:
        with arms.attached(program, case, **options_G[group.rank]) as moe, moe.stage([x.numpy() for x in topk_MTLK]):
            program.forward_backward(0, topk_MTLK)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


DIFFERENT = [
    ({"redundant": 1}, {"redundant": 2}, "redundant=2, rank 0 has redundant=1"),
    ({"planner": "greedy"}, {"planner": "quota"}, "planner.rank=(Quota(min_pairs=0),), rank 0 has planner.rank=(Greedy(),)"),
    ({"planner": Planner()}, {"planner": Planner(rank=(Search(effort=4),))}, "rank 1 has planner.rank=(Search(effort=4"),
    ({"replicas": "any"}, {"replicas": "node"}, "replicas='node', rank 0 has replicas='any'"),
    ({"cost": CostModel()}, {"cost": CostModel(overlap=0.5)}, "cost.overlap=0.5, rank 0 has cost.overlap=1.0"),
    ({"slot_depth": 2}, {"slot_depth": 3}, "slot_depth=3, rank 0 has slot_depth=2"),
    ({"cluster": CLUSTER}, {"cluster": dataclasses.replace(CLUSTER, nic_sharing=2)}, "cluster.nic_sharing=2, rank 0 has"),
    ({"cluster": CLUSTER}, {"cluster": None}, "cluster=None, rank 0 has cluster=Cluster"),
    ({"backends": ("collective",)}, {"backends": ("local",)}, "backends=Local, rank 0 has backends=Collective;"),
    ({"prefetch": 2}, {"prefetch": 0}, "prefetch=0, rank 0 has prefetch=2"),
    ({"debug": True}, {}, "debug=False, rank 0 has debug=True"),
]


@pytest.mark.parametrize("options_G", DIFFERENT, ids=lambda options_G: next(iter(options_G[0])))
def test_a_setting_that_differs_is_named_on_all_ranks(pool, options_G):
    *options_G, wanted = options_G
    for said in pool.run(said_by, PLAIN, options_G, num_ranks=2, timeout_s=20.0):
        assert said.startswith("InputError: rank 1 has ") and wanted in said and said.endswith("give all ranks the same."), said
