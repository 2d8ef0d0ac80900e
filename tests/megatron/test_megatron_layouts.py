"""With a plan the program computes what it computes without, in every layout: losses, gradients, weights, checkpoints."""

import compare
import pytest
from layouts import CASES, CHOICES, FACTORS, Case, all_pairs, few, pairs_of
from program import Layout

# One expert per rank, for which Megatron has a path of its own.
SINGLE = Case(4, Layout(ep=4, num_experts=4, recompute="full"))
# Experts that add weight gradients to float32 themselves; in one micro-step, they are reduced in the backward that makes them.
FUSED = (
    Case(2, Layout(bf16=True, engine="Fused")),
    Case(2, Layout(bf16=True, engine="Fused", overlap_grad=True, M=1)),
    Case(2, Layout(bf16=True, engine="Fused", recompute="full2")),
    Case(4, Layout(bf16=True, engine="Fused", narrow=True)),
)
# Experts with biases, as gpt-oss has: two more tensors of every replica.
BIASED = (
    Case(2, Layout(options=(("add_bias_linear", True),))),
    Case(
        4, Layout(bf16=True, engine="Fused", overlap_grad=True, overlap_param=True, options=(("add_bias_linear", True),)), nodes=2
    ),
    Case(4, Layout(pp=2, num_layers=4, recompute="full2", engine="GroupedLinear", options=(("add_bias_linear", True),))),
)
# Pipeline ranks with different numbers of layers, as recipes of models with 94 layers have.
UNEVEN = (
    Case(4, Layout(pp=2, num_layers=3, recompute="full", options=(("num_layers_in_first_pipeline_stage", 1),))),
    Case(4, Layout(pp=2, num_layers=3, options=(("num_layers_in_last_pipeline_stage", 1),))),
    Case(4, Layout(pp=2, num_layers=3, dense=(1,), options=(("account_for_embedding_in_pipeline_split", True),))),
)
# What the optimizer and checkpoints have to do with; what made the gradients is compared in one step.
OF_THE_OPTIMIZER = ("grid", "tp", "overlap_grad", "optimizer", "experts")
# The case, and whether products of matrices are `steady_rows` or those of BLAS.
LONG = (
    (Case(4, Layout(pp=2, num_layers=4, recompute="full2", overlap_grad=True, overlap_param=True, M=2), nodes=2), False),
    (Case(4, Layout(overlap_grad=True, overlap_param=True, bf16=True, M=2), 1), True),
)


def test_all_pairs_are_covered():
    assert set().union(*map(pairs_of, CHOICES)) == all_pairs()
    assert len(all_pairs()) > sum(map(len, FACTORS.values()))


@pytest.mark.parametrize("case", [*CASES, SINGLE, *FUSED, *BIASED, *UNEVEN], ids=str)
def test_one_step_equals_the_program_without_foremoe(pool, case):
    verdicts = pool.run(compare.one_step, case, num_ranks=case.num_ranks)
    for rank, verdict in enumerate(verdicts):
        assert verdict.equal and verdict.served and verdict.as_expected, (rank, verdict)
        assert verdict.drift == 0 and verdict.fell_back == 0, (rank, verdict)
        assert verdict.distinct, "every micro-step and layer should have a plan of its own"
        # The first step counts and compares, the second goes by what is known.
        assert verdict.known == (0, verdict.skew_ML[1].size)
    assert all(verdict.replicas and verdict.copies == 0 for verdict in verdicts)
    # Every gradient of a replica comes home once; the ranks of an EP group have the same plan.
    assert sum(v.returns for v in verdicts) * case.layout.ep == sum(v.replicas for v in verdicts)
    assert all((verdict.cross_node > 0) == (case.nodes > 1) for verdict in verdicts)


@pytest.mark.parametrize("case", few(2, OF_THE_OPTIMIZER, each=("optimizer",)), ids=str)
def test_two_steps_are_as_near_as_another_order_of_summation(pool, case):
    check_several(pool, case, 2)


@pytest.mark.parametrize(("case", "steady"), LONG, ids=str)
def test_twenty_steps_are_as_near_as_another_order_of_summation(pool, case, steady):
    check_several(pool, case, 20, steady)


def check_several(pool, case, num_steps, steady=True):
    answers = pool.run(compare.several_steps, case, num_steps, "", steady, num_ranks=case.num_ranks, limit_s=300.0)
    assert all(places == [] for _, places in answers), "checkpoints should have the same keys and shapes"
    further = compare.further_than_control(answers)
    assert all(times <= 2.0 for times in further.values()), further
