"""Layers by their numbers: `HybridModel`, whose layers stand in a pattern, and layers of multi-token prediction."""

import dataclasses

import compare
import pytest
from hybrid import HAS_HYBRID, pattern_of
from layouts import Case, few
from program import Layout
from test_megatron_layouts import check_several

PREDICTING = (("mtp_num_layers", 1),)
needs_hybrid = pytest.mark.skipif(not HAS_HYBRID, reason="HybridModel is not in this megatron-core; make test-megatron-newest")


def hybrid(case, **changes):
    """The case with its layers in a pattern."""
    return dataclasses.replace(case, layout=dataclasses.replace(case.layout, hybrid=True, **changes))


HYBRID = [hybrid(case) for case in few(1)]
PREDICTED = [
    Case(2, Layout(options=PREDICTING)),
    Case(4, Layout(pp=2, num_layers=6, dense=(1, 2), recompute="full", options=PREDICTING)),
    Case(4, Layout(pp=2, vpp=2, num_layers=4, tp=2, overlap_grad=True, options=PREDICTING)),
]


# A layer of prediction that runs forward again pops its router's replay once more for the stack of layers inside.
AGAIN = Case(4, Layout(pp=2, num_layers=6, dense=(1, 2), recompute="selective", options=PREDICTING))


def check(pool, case):
    for rank, verdict in enumerate(pool.run(compare.one_step, case, num_ranks=case.num_ranks)):
        assert verdict.equal and verdict.served and verdict.drift == 0 and verdict.fell_back == 0, (rank, verdict)
        assert verdict.known == (0, verdict.skew_ML[1].size) and verdict.replicas


def test_a_pattern_has_experts_where_the_layout_has():
    layout = Layout(pp=2, num_layers=4, dense=(1,), hybrid=True, options=PREDICTING)
    assert pattern_of(layout) == "*E*-|*E*E/*E"
    assert layout.moe_layers == [i for i, kind in enumerate("*E*-*E*E") if kind == "E"]


@needs_hybrid
@pytest.mark.parametrize("case", HYBRID, ids=str)
def test_one_step_of_a_hybrid_model_equals_the_program_without_foremoe(pool, case):
    """Ranks know routing of all MoE layers, by which pipeline ranks have different numbers of them."""
    check(pool, case)


@needs_hybrid
def test_two_steps_of_a_hybrid_model_are_as_near_as_another_order_of_summation(pool):
    check_several(pool, hybrid(Case(4, Layout(pp=2, num_layers=4, dense=(1,), recompute="full2"), nodes=2)), 2)


@pytest.mark.parametrize("case", PREDICTED, ids=str)
def test_routing_has_a_layer_more_where_a_model_predicts(pool, case):
    check(pool, case)


@needs_hybrid
@pytest.mark.parametrize("case", [PREDICTED[0], AGAIN], ids=str)
def test_routing_has_a_layer_more_where_a_hybrid_model_predicts(pool, case):
    check(pool, hybrid(case))
