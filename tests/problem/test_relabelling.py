"""Law 5: cost, bounds and check do not change when experts, or ranks of a symmetric cluster, are renamed with the plan."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from mutations import copying_plans, mutated

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan
from foremoe.problem.bounds import load_bound, row_bound
from foremoe.problem.memory import rank_memory
from foremoe.problem.placement import Placement
from foremoe.problem.pricing import price, row_objective
from foremoe.problem.problem import Problem
from foremoe.testing.pasteable import describe
from foremoe.testing.strategies import placements, problems

# Letters: E experts, G ranks, B base slots, L layers. `new_E` and `new_G` map an old number to its new one.


def permuted(array: Array, new: Array, axis: int) -> Array:
    """`array` with entry i of `axis` moved to place ``new[i]``."""
    return np.take(array, np.argsort(new), axis=axis)


def rename_experts(problem: Problem, new_E: Array) -> Problem:
    return dataclasses.replace(
        problem,
        load_MLE=permuted(problem.load_MLE, new_E, 2),
        load_MLGE=None if problem.load_MLGE is None else permuted(problem.load_MLGE, new_E, 3),
        home_LE=permuted(problem.home_LE, new_E, 1),
    )


def rename_ranks(problem: Problem, new_G: Array) -> Problem:
    B = problem.B
    move = lambda array, axis: None if array is None else permuted(array, new_G, axis)  # noqa: E731
    return dataclasses.replace(
        problem,
        load_MLGE=move(problem.load_MLGE, 2),
        tokens_MG=move(problem.tokens_MG, 1),
        attention_MG=move(problem.attention_MG, 1),
        home_LE=(new_G[problem.home_LE // B] * B + problem.home_LE % B).astype(np.int32),
        cluster=dataclasses.replace(problem.cluster, node_of_rank_G=permuted(problem.cluster.node_of_rank_G, new_G, 0)),
    )


def renamed(expert: Array, new_E: Array) -> Array:
    """Expert numbers mapped; -1 stays."""
    return np.where(expert < 0, np.int16(-1), new_E[expert].astype(np.int16))


def rename_experts_of_plan(plan: Plan, problem: Problem, new_E: Array) -> Plan:
    t = plan.transfers
    known_C = (t.expert_C >= 0) & (t.expert_C < len(new_E))
    return dataclasses.replace(
        plan,
        home_LE=problem.home_LE,
        load_MLE=problem.load_MLE,
        expert_MLGS=renamed(plan.expert_MLGS, new_E),
        transfers=t.replace(expert_C=np.where(known_C, new_E[t.expert_C % len(new_E)], t.expert_C)),
    )


def rename_ranks_of_plan(plan: Plan, problem: Problem, new_G: Array) -> Plan:
    t = plan.transfers
    rename = lambda rank_C: np.where((rank_C >= 0) & (rank_C < plan.G), new_G[rank_C % plan.G], rank_C)  # noqa: E731
    return dataclasses.replace(
        plan,
        header=dataclasses.replace(plan.header, cluster=problem.cluster),
        home_LE=problem.home_LE,
        expert_MLGS=permuted(plan.expert_MLGS, new_G, 2),
        quota_MLGS=permuted(plan.quota_MLGS, new_G, 2),
        transfers=t.replace(src_C=rename(t.src_C), dst_C=rename(t.dst_C)),
    )


def rank_permutation(problem: Problem, rng: np.random.Generator) -> Array:
    """Nodes, NICs of a node and ranks of a NIC change places: the machine stays what it was."""
    per_node, sharing = problem.cluster.ranks_per_node, problem.cluster.nic_sharing
    whole = per_node // sharing  # the last NIC of a node may serve fewer ranks, and stays the last

    def place() -> list[int]:
        nics = [*rng.permutation(whole), *range(whole, -(-per_node // sharing))]
        ranks = [nic * sharing + rng.permutation(min(sharing, per_node - nic * sharing)) for nic in nics]
        return np.concatenate(ranks).tolist()

    return np.concatenate([node * per_node + np.array(place()) for node in rng.permutation(problem.cluster.num_nodes)])


def assert_same_price(problem: Problem, placement: Placement, other: Problem, renamed_placement: Placement) -> None:
    np.testing.assert_allclose(row_objective(problem, placement), row_objective(other, renamed_placement), rtol=1e-12)
    for name, part in price(problem, placement).parts().items():
        np.testing.assert_allclose(part, price(other, renamed_placement).parts()[name], rtol=1e-12, atol=1e-18, err_msg=name)
    np.testing.assert_allclose(row_bound(problem), row_bound(other), rtol=1e-12)
    assert (load_bound(problem) == load_bound(other)).all()


@given(st.data())
def test_renaming_experts_changes_no_price(data: st.DataObject) -> None:
    problem = data.draw(problems())
    note(describe(problem))
    placement = data.draw(placements(problem))
    new_E = np.array(data.draw(st.permutations(range(problem.E))))
    other = rename_experts(problem, new_E)
    moved = Placement(expert_NGS=renamed(placement.expert_NGS, new_E), quota_NGS=placement.quota_NGS)
    assert_same_price(problem, placement, other, moved)
    assert (rank_memory(problem, placement).peak_G == rank_memory(other, moved).peak_G).all()


@given(st.data())
def test_renaming_ranks_changes_no_price(data: st.DataObject) -> None:
    problem = data.draw(problems(symmetric=True))
    # Under "node" a message goes to the rank of the same place, so other names are other costs.
    problem = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, dispatch="pairs"))
    note(describe(problem))
    placement = data.draw(placements(problem))
    new_G = rank_permutation(problem, np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))))
    other = rename_ranks(problem, new_G)
    assert np.ptp(np.bincount(other.cluster.node_of_rank_G)) == 0
    moved = Placement(expert_NGS=permuted(placement.expert_NGS, new_G, 1), quota_NGS=permuted(placement.quotas_NGS, new_G, 1))
    assert_same_price(problem, placement, other, moved)
    peak_G = rank_memory(problem, placement).peak_G
    assert (permuted(peak_G, new_G, 0) == rank_memory(other, moved).peak_G).all()


@pytest.mark.parametrize("broken", [False, True])
@given(data=st.data())
def test_renaming_experts_changes_no_verdict(broken: bool, data: st.DataObject) -> None:
    problem, plan = data.draw(copying_plans())
    if broken:
        plan = dataclasses.replace(plan, transfers=data.draw(mutated(plan.transfers)))
    new_E = np.array(data.draw(st.permutations(range(problem.E))))
    other = rename_experts(problem, new_E)
    assert laws_of(rename_experts_of_plan(plan, other, new_E), other) == laws_of(plan, problem)
    assert broken or not laws_of(plan, problem)


@pytest.mark.parametrize("broken", [False, True])
@given(data=st.data())
def test_renaming_ranks_changes_no_verdict(broken: bool, data: st.DataObject) -> None:
    problem, plan = data.draw(copying_plans(symmetric=True))
    if problem.cluster.dispatch == "node":
        return  # a message goes to the rank of the same place, so other names are other costs
    if broken:
        plan = dataclasses.replace(plan, transfers=data.draw(mutated(plan.transfers)))
    new_G = rank_permutation(problem, np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))))
    other = rename_ranks(problem, new_G)
    # Copies stand in the order of their destinations, which have other names now.
    plan, renamed = in_order(plan), in_order(rename_ranks_of_plan(plan, other, new_G))
    assert laws_of(renamed, other) == laws_of(plan, problem)
    assert broken or not laws_of(plan, problem)


def in_order(plan: Plan) -> Plan:
    t = plan.transfers
    return dataclasses.replace(plan, transfers=t.cut(C=np.lexsort((t.slot_C, t.dst_C, t.need_C))))


def laws_of(plan: Plan, problem: Problem) -> set[str]:
    return {error.law for error in plan.violations(problem)}
