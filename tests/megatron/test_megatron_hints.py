"""Without replay plans are made from a hint: routers route by themselves, and the program computes what it computes alone."""

import compare
import numpy as np
import program_arms as arms
import pytest
from layouts import Case, few
from program import Layout, Program

from foremoe.workload.skew import skew


@pytest.mark.parametrize("case", few(1), ids=str)
def test_with_a_hint_one_step_equals_the_program_without_foremoe(pool, case):
    """Of the hint every fifth choice is wrong; what ranks serve is what the remap law says, and so is the skew reported."""
    verdicts = pool.run(compare.one_step, case, "", 0, False, None, 0.2, num_ranks=case.num_ranks)
    for rank, verdict in enumerate(verdicts):
        assert verdict.equal and verdict.as_expected and verdict.fell_back == 0, (rank, verdict)
    assert sum(verdict.drift for verdict in verdicts) > 0 and all(verdict.replicas for verdict in verdicts)
    reported = [verdict.served_skew_ML for verdict in verdicts]
    # Ranks of an EP group are those with the same plans and the same answer; each rank's own load is in it.
    for skew_XML in reported:
        group = [v.load_ML for v, other in zip(verdicts, reported, strict=True) if np.array_equal(other, skew_XML)]
        assert len(group) == case.layout.ep
        assert np.allclose(skew(np.stack(group, axis=-1)), skew_XML)


def test_with_ten_percent_of_choices_changed_skew_as_served_is_within_two_percent_of_the_plan(pool):
    case = Case(4, Layout(ep=4, sequence=480, batch=8, M=2))
    verdicts = pool.run(compare.one_step, case, "", 0, False, None, 0.1, num_ranks=case.num_ranks)
    assert all(verdict.equal and verdict.as_expected and verdict.drift > 0 for verdict in verdicts)
    assert (verdicts[0].served_skew_ML <= 1.02 * verdicts[0].skew_ML).all()


def hinted_recompute(_group, case):
    """A recompute stage planned from a hint: losses with and without foremoe, and the metrics."""
    program = Program(case.layout)
    hint = [topk_TLK.numpy() for topk_TLK in arms.changed(program.own_routing(0, forward_only=True)[0], 0.1, program)]
    alone = program.forward_backward(0, None, forward_only=True)
    with arms.attached(program, case) as moe:
        with moe.stage(hint, "recompute", replay=False):
            planned = program.forward_backward(0, None, forward_only=True)
        hinted = moe.metrics()
        with moe.stage(hint, "recompute"):
            program.forward_backward(0, None, forward_only=True)
        return alone, planned, hinted, moe.metrics()


def test_a_recompute_pass_runs_by_a_hint_and_reports_the_skew_as_served(pool):
    for alone, planned, hinted, replayed in pool.run(hinted_recompute, Case(2, Layout(sequence=120)), num_ranks=2):
        assert alone == planned
        assert 1.0 <= hinted["skew_served"] < hinted["skew_before"] and hinted["drift"] > 0
        assert "skew_served" not in replayed
