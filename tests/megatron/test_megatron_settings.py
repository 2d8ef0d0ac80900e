"""Ranks that were given other settings are told which, with both values, before anything else; on all ranks alike."""

import dataclasses

import program_arms as arms
from layouts import Case
from program import Layout, Program

from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.solvers import Search

PLAIN = Case(2, Layout(), 2)
CLUSTER = Cluster.preset("8xh100", num_ranks=2)


def said_by(group, case, each):
    """Returns the error of a rank that has one option of its own, for each of these options, or an empty text."""
    program, found = Program(case.layout), []
    topk_MTLK = program.routing(0)
    for options_G in each:
        try:
            with arms.attached(program, case, **options_G[group.rank]) as moe, moe.stage([x.numpy() for x in topk_MTLK]):
                program.forward_backward(0, topk_MTLK)
            found.append("")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


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


def test_a_setting_that_differs_is_named_on_all_ranks(pool):
    each = [options_G for *options_G, _ in DIFFERENT]
    for told in pool.run(said_by, PLAIN, [*each, ({}, {})], num_ranks=2, timeout_s=20.0):
        assert told.pop() == "", "a stage runs after all that was refused"
        for said, (*_, wanted) in zip(told, DIFFERENT, strict=True):
            assert said.startswith("InputError: rank 1 has ") and wanted in said and said.endswith("give all ranks the same."), (
                said
            )
