"""What the comparisons are worth: each notices what is broken on purpose."""

import compare
import pytest
from layouts import Case
from program import Layout

from foremoe.base.errors import InputError

PLAIN = Case(2, Layout(), 1)
PIPELINED = Case(4, Layout(pp=2, num_layers=4), 1)


def verdicts(pool, case, breakage):
    return pool.run(compare.one_step, case, breakage, num_ranks=case.num_ranks)


@pytest.mark.parametrize("case", [PLAIN, PIPELINED], ids=str)
def test_nothing_broken(pool, case):
    assert all(v.equal and v.served for v in verdicts(pool, case, "nothing"))


@pytest.mark.parametrize("breakage", ["everything_at_home", "one_pair_elsewhere"])
def test_a_wrong_quota_shows_in_what_slots_served(pool, breakage):
    found = verdicts(pool, PLAIN, breakage)
    assert all(v.equal for v in found)  # the right expert computes, at another place
    assert not any(v.served for v in found)


@pytest.mark.parametrize("breakage", ["wrong_expert", "swapped_micro_steps"])
@pytest.mark.parametrize("case", [PLAIN, PIPELINED], ids=str)
def test_pairs_that_reach_another_expert_show_in_losses(pool, case, breakage):
    found = verdicts(pool, case, breakage)
    assert max(v.loss for v in found) > 1e-4 and all(v.other > 1e-6 for v in found)


@pytest.mark.parametrize("breakage", ["lost_return", "double_return"])
@pytest.mark.parametrize("case", [PLAIN, PIPELINED, Case(2, Layout(bf16=True))], ids=str)
def test_a_gradient_that_is_lost_or_doubled_shows(pool, case, breakage):
    found = verdicts(pool, case, breakage)
    assert all(v.loss == v.other == 0 for v in found)
    assert max(v.expert for v in found) > (10 if case.layout.bf16 else 1000)


def test_weights_of_another_micro_step_are_refused(pool):
    for error in pool.run(compare.one_step, PLAIN, "swapped_uses", num_ranks=2, errors=True):
        assert isinstance(error, InputError) and "the plan's schedule has forward of micro-step 0, layer 0 next" in str(error)


def test_weights_that_are_not_looked_up_again_show(pool):
    """By the time backward comes, that place of the ring holds another expert, and the right one lies elsewhere."""
    case = Case(4, Layout(pp=2, num_layers=4), 2)
    assert all(v.equal for v in verdicts(pool, case, ""))
    assert not all(v.equal for v in verdicts(pool, case, "kept_weights"))


@pytest.mark.parametrize("distributed", [False, True])
def test_gradients_that_come_home_too_late_show(pool, distributed):
    case = Case(2, Layout(overlap_grad=True, distributed=distributed))
    assert all(v.equal for v in verdicts(pool, case, ""))
    assert max(v.expert for v in verdicts(pool, case, "late_returns")) > 1000


def test_homes_that_are_read_before_they_were_shared_show(pool):
    """Data-parallel ranks have each other's new weights only once gathers are finished."""
    case = Case(4, Layout(overlap_grad=True, overlap_param=True))
    good = pool.run(compare.several_steps, case, 3)
    assert compare.further_than_control(good)["weights"] <= 2.0
    bad = pool.run(compare.several_steps, case, 3, "unfinished_gather")
    assert compare.further_than_control(bad)["weights"] > 100.0
