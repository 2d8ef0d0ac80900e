"""The cost model and its parts."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foremoe.base.errors import InputError
from foremoe.problem.cost import Cost, CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.pricing import price, row_objective
from foremoe.testing.samples import many_row_problem
from foremoe.testing.strategies import placements, problems

CLOSE = 1.0 + 1e-9  # costs are sums of floats


@given(st.data())
def test_parts_add_up(data: st.DataObject) -> None:
    problem = data.draw(problems())
    placement = data.draw(placements(problem))
    cost = price(problem, placement)
    assert all((part >= 0).all() for part in cost.parts().values())
    np.testing.assert_allclose(cost.total_s, np.sum(list(cost.parts().values()), axis=0), rtol=1e-12)
    np.testing.assert_allclose(cost.sum().total_s, cost.total_s.sum(), rtol=1e-12)
    assert cost.reshape(problem.M, problem.L).total_s.shape == (problem.M, problem.L)
    assert cost.sum().total_s.shape == ()


@given(st.data())
def test_the_objective_is_the_largest_rank_load_or_the_seconds(data: st.DataObject) -> None:
    problem = data.draw(problems())
    placement = data.draw(placements(problem))
    objective_N = row_objective(problem, placement)
    if problem.cost.objective == "time":
        np.testing.assert_array_equal(objective_N, price(problem, placement).total_s)
    else:
        np.testing.assert_array_equal(objective_N, [max(row_GS.sum() for row_GS in row) for row in placement.quotas_NGS])


@given(st.data())
def test_hiding_copies_never_costs_more(data: st.DataObject) -> None:
    problem = data.draw(problems(min_ranks=2, min_redundant=1, objectives=("time",)))
    placement = data.draw(placements(problem))
    hidden, half, bare = (
        row_objective(dataclasses.replace(problem, cost=dataclasses.replace(problem.cost, overlap=overlap)), placement)
        for overlap in (1.0, 0.5, 0.0)
    )
    assert (hidden <= half).all() and (half <= bare).all()


def test_copies_are_priced_by_fan_out() -> None:
    # Two replicas of one home cost more than one replica each of two homes.
    problem = many_row_problem(4)[:1]
    problem = dataclasses.replace(problem, load_MLE=np.full_like(problem.load_MLE, 10), slot_depth=3)
    problem = dataclasses.replace(
        problem, cost=CostModel(overlap=0.0), cluster=dataclasses.replace(problem.cluster, node_of_rank_G=[0, 0, 0, 0])
    )

    def priced(*replicas: tuple[int, int]) -> float:
        expert_NGS, quota_NGS = problem.static().expert_NGS.copy(), problem.static().quotas_NGS.copy()
        for g, e in replicas:
            expert_NGS[:, g, -1], quota_NGS[:, g, -1] = e, 2
            quota_NGS[expert_NGS == e] = 5
        return float(price(problem, Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)).transfer_s[0])

    assert priced((1, 0)) < priced((1, 0), (2, 6)) < priced((1, 0), (2, 1))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: CostModel(objective="speed"), 'objective must be "time" or "balance"; got \'speed\''),
        (lambda: CostModel(overlap=1.5), "overlap must be in [0, 1]; got 1.5"),
        (lambda: CostModel(overlap=float("nan")), "overlap must be in [0, 1]; got nan"),
        (
            lambda: Cost(**dict.fromkeys(Cost.__dataclass_fields__, np.zeros(2)) | {"compute_s": np.zeros(3)}),
            "compute_s must have",
        ),
    ],
)
def test_bad_input_is_one_sentence(build, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        build()
