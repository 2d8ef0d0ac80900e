"""The split law, against a reference that lays out single pairs."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.plan.split import split_over_sources
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import many_row_problem, plan_of, random_sources
from foremoe.testing.strategies import placements, problems
from foremoe.workload.workload import Workload

# Letters: N rows, G ranks, E experts, S slots per rank, P = G*S.


def reference_split(load_GE: Array, expert_GS: Array, quota_GS: Array, node_G: Array) -> Array:
    """int [G, P] of one row: pairs and places in line, one by one, tier after tier."""
    G, S = expert_GS.shape
    split_GP = np.zeros((G, G * S), np.int64)
    for e in range(load_GE.shape[1]):
        pairs = [g for g in range(G) for _ in range(load_GE[g, e])]
        places = [p for p in range(G * S) if expert_GS.flat[p] == e for _ in range(quota_GS.flat[p])]
        domains = [[g] for g in range(G)] + [np.flatnonzero(node_G == v).tolist() for v in np.unique(node_G)] + [list(range(G))]
        for members in domains:
            here = [g for g in pairs if g in members]
            there = [p for p in places if p // S in members]
            num = min(len(here), len(there))  # places spread over slots; where all are taken, it is all of them
            there = [p for i, p in enumerate(there) if (i + 1) * num // len(there) > i * num // len(there)]
            for g, p in zip(here, there, strict=False):
                split_GP[g, p] += 1
                pairs.remove(g)
                places.remove(p)
    return split_GP


def split_all(problem: Problem, load_MLGE: Array, placement: Placement) -> Array:
    """int [N, G, P]: the split of every source rank."""
    load_NGE, node_G = load_MLGE.reshape(problem.N, problem.G, problem.E), problem.cluster.node_of_rank_G
    return np.stack(
        [split_over_sources(load_NGE, placement.expert_NGS, placement.quotas_NGS, node_G, g) for g in range(problem.G)], axis=1
    )


@st.composite
def cases(draw: st.DrawFn, **options: object) -> tuple[Problem, Array, Placement]:
    problem = draw(problems(**{"max_pairs": 10, "max_micro_steps": 2, "max_layers": 2, **options}))
    note(describe(problem))
    return problem, random_sources(problem, np.random.default_rng(draw(st.integers(0, 99)))), draw(placements(problem))


@given(cases())
def test_equals_pairs_laid_out_one_by_one(case: tuple[Problem, Array, Placement]) -> None:
    problem, load_MLGE, placement = case
    split_NGP = split_all(problem, load_MLGE, placement)
    node_G = problem.cluster.node_of_rank_G
    for n, load_GE in enumerate(load_MLGE.reshape(problem.N, problem.G, problem.E)):
        expected = reference_split(load_GE, placement.expert_NGS[n], placement.quotas_NGS[n], node_G)
        np.testing.assert_array_equal(split_NGP[n], expected)


@pytest.mark.heavy
@given(st.data())
def test_any_mapping_of_ranks_to_nodes_and_sums_known_before(data: st.DataObject) -> None:
    """Nodes need not be neighbours in rank order, and what nodes ask for may be given."""
    problem, load_MLGE, placement = data.draw(cases(replicas=("any",)))
    named = data.draw(st.lists(st.integers(0, problem.G - 1), min_size=problem.G, max_size=problem.G))
    node_G = np.unique(named, return_inverse=True)[1].astype(np.int32)
    load_NGE = load_MLGE.reshape(problem.N, problem.G, problem.E)
    demand_NVE = np.stack([load_NGE[:, node_G == v].sum(axis=1, dtype=np.int32) for v in range(node_G.max() + 1)], axis=1)
    for g in range(problem.G):
        split_NP = split_over_sources(load_NGE, placement.expert_NGS, placement.quotas_NGS, node_G, g)
        again_NP = split_over_sources(load_NGE, placement.expert_NGS, placement.quotas_NGS, node_G, g, demand_NVE)
        np.testing.assert_array_equal(split_NP, again_NP)
        for n in range(problem.N):
            expected = reference_split(load_NGE[n], placement.expert_NGS[n], placement.quotas_NGS[n], node_G)
            np.testing.assert_array_equal(split_NP[n], expected[g])


@given(cases(replicas=("any",)))
def test_rows_of_a_plan_are_the_split_of_its_slots(case: tuple[Problem, Array, Placement]) -> None:
    problem, load_MLGE, placement = case
    plan = plan_of(problem, placement)
    work = Workload.from_counts(load_MLGE, num_topk=problem.model.num_topk, stage=problem.stage)
    split_NGP = split_all(problem, load_MLGE, placement)
    for g in range(problem.G):
        assert (plan.rows_for(work, g).reshape(problem.N, -1) == split_NGP[:, g]).all()


def test_rows_for_refuses_other_counts_and_unknown_ranks() -> None:
    problem = many_row_problem(8)
    problem = dataclasses.replace(problem, load_MLGE=random_sources(problem, np.random.default_rng(0)))
    plan = plan_of(problem, problem.static())
    work = Workload.from_counts(problem.load_MLGE, num_topk=2)
    assert plan.rows_for(work, 3).sum() == work.load_MLGE[:, :, 3].sum()
    with pytest.raises(InputError, match="rank 4 does not exist; the plan has 4 ranks"):
        plan.rows_for(work, 4)
    with pytest.raises(InputError, match="counts differ"):
        plan.rows_for(Workload.from_counts(work.load_MLGE[::-1], num_topk=2), 0)
