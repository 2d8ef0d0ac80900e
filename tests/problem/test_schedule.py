"""Schedules: every pass exactly once and in a legal order, uses in execution order, ranges and text forms."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foremoe.base.errors import InputError
from foremoe.problem.schedule import Phase, Schedule
from foremoe.testing.strategies import schedules


def passes(schedule: Schedule) -> list[tuple[int, int, int]]:
    """(micro-step, phase, chunk) of every pass."""
    columns = (schedule.micro_step_X, schedule.phase_X, schedule.chunk_X)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(st.data())
def test_every_pass_runs_once_and_backward_after_forward(data: st.DataObject) -> None:
    M, L = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 6))
    schedule = data.draw(schedules(M, num_layers=L))
    order = passes(schedule)
    phases = (Phase.FORWARD, Phase.BACKWARD) if schedule.trains else (Phase.FORWARD,)
    assert sorted(order) == sorted((m, p, c) for m in range(M) for p in phases for c in range(schedule.num_chunks))
    assert schedule.M == M
    for m, phase, chunk in order:
        if phase == Phase.BACKWARD:
            assert order.index((m, Phase.FORWARD, chunk)) < order.index((m, Phase.BACKWARD, chunk))


@given(st.data())
def test_data_flows_through_chunks_in_order(data: st.DataObject) -> None:
    pp, vpp = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    M = pp * data.draw(st.integers(1, 3))
    order = passes(Schedule.interleaved(M, pp, vpp, data.draw(st.integers(0, pp - 1))))
    for m in range(M):
        forward = [order.index((m, Phase.FORWARD, c)) for c in range(vpp)]
        backward = [order.index((m, Phase.BACKWARD, c)) for c in reversed(range(vpp))]
        assert forward + backward == sorted(forward + backward)


@given(st.data())
def test_uses_are_the_layers_of_the_passes_in_execution_order(data: st.DataObject) -> None:
    L = data.draw(st.integers(1, 6))
    schedule = data.draw(schedules(data.draw(st.integers(1, 5)), num_layers=L, uneven=True))
    chunk_L = schedule.chunks(L).tolist()
    block_L = list(range(L)) if schedule.block_L is None else schedule.block_L.tolist()
    expected = []
    for x, (m, phase, chunk) in enumerate(passes(schedule)):
        layers = [layer for layer in range(L) if chunk_L[layer] == chunk]
        if phase == Phase.FORWARD:
            expected += [(m, layer, phase, x) for layer in layers]
        for block in sorted({block_L[layer] for layer in layers}, reverse=True) if phase == Phase.BACKWARD else ():
            mine = [layer for layer in layers if block_L[layer] == block]
            if len(mine) > 1:
                expected += [(m, layer, Phase.REFORWARD, x) for layer in mine]
            expected += [(m, layer, Phase.BACKWARD, x) for layer in reversed(mine)]
    uses = [column.tolist() for column in schedule.uses(L)]
    assert list(zip(*uses[1:], strict=True)) == expected
    assert uses[0] == list(range(len(expected)))


def test_chunks_may_have_different_numbers_of_layers() -> None:
    """As with leading dense layers: the first chunk of a stage has fewer MoE layers."""
    schedule = dataclasses.replace(Schedule.interleaved(2, 2, 2, 0), chunk_L=[0, 1, 1])
    assert [len(schedule.uses(3).layer_U[schedule.uses(3).pass_U == x]) for x in range(4)] == [1, 1, 2, 2]
    assert schedule.cut(L=np.array([1, 2])).chunks(2).tolist() == [1, 1]
    assert not schedule.without_backward().trains
    assert schedule.without_backward().uses(3).micro_step_U.tolist() == [0, 1, 0, 0, 1, 1]


def test_one_f_one_b_keeps_no_more_micro_steps_in_flight_than_stages_remain() -> None:
    for pp in range(1, 5):
        for pp_rank in range(pp):
            in_flight = np.cumsum(
                [1 if phase == Phase.FORWARD else -1 for _, phase, _ in passes(Schedule.one_f_one_b(8, pp, pp_rank))]
            )
            assert in_flight.max() == pp - pp_rank and in_flight[-1] == 0


def test_known_orders() -> None:
    f, b = Phase.FORWARD, Phase.BACKWARD
    assert passes(Schedule.accumulate(2)) == [(0, f, 0), (0, b, 0), (1, f, 0), (1, b, 0)]
    assert passes(Schedule.forward_only(2)) == [(0, f, 0), (1, f, 0)]
    first = [(0, f, 0), (1, f, 0), (0, b, 0), (2, f, 0), (1, b, 0), (2, b, 0)]
    assert passes(Schedule.one_f_one_b(3, 2, 0)) == first
    assert passes(Schedule.one_f_one_b(3, 2, 1)) == passes(Schedule.accumulate(3))
    # The last of two stages with two chunks: (vpp - 1) * pp = 2 forward passes before the first pair.
    last = [(0, f, 0), (1, f, 0), (0, f, 1), (0, b, 1), (1, f, 1), (1, b, 1), (0, b, 0), (1, b, 0)]
    assert passes(Schedule.interleaved(2, 2, 2, 1)) == last


@given(st.data())
def test_a_range_keeps_the_order_of_what_is_left(data: st.DataObject) -> None:
    M = data.draw(st.integers(1, 6))
    schedule = data.draw(schedules(M, num_layers=4))
    low = data.draw(st.integers(0, M - 1))
    high = data.draw(st.integers(low + 1, M))
    kept = [(m - low, phase, chunk) for m, phase, chunk in passes(schedule) if low <= m < high]
    assert passes(schedule[low:high]) == kept
    assert schedule[0:M].same_as(schedule)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("forward", Schedule.forward_only(4)),
        ("accumulate", Schedule.accumulate(4)),
        (" Accumulate+REFORWARD ", Schedule.accumulate(4, True)),
        ("1f1b:2,1", Schedule.one_f_one_b(4, 2, 1)),
        ("interleaved:2,3,0+reforward", Schedule.interleaved(4, 2, 3, 0, True)),
    ],
)
def test_text_forms(text: str, schedule: Schedule) -> None:
    assert Schedule.parse(text, 4).same_as(schedule)


def make(micro_step: list[int], phase: list[int], chunk: list[int] | None = None, num_chunks: int = 1) -> Schedule:
    chunk_X = [0] * len(micro_step) if chunk is None else chunk
    return Schedule(micro_step_X=micro_step, phase_X=phase, chunk_X=chunk_X, num_chunks=num_chunks)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: make([], []), "at least one pass"),
        (lambda: make([0, 0], [1, 0]), "backward before forward"),
        (lambda: make([0, 0], [0, 0]), "2 forward"),
        (lambda: make([1], [0]), "2 micro-steps of 1 chunks need one forward pass each; the Schedule has 1"),
        (lambda: make([1, 1], [0, 1]), "micro-step 0, chunk 0 has 0 forward"),
        (lambda: make([0], [2]), "phases are 0"),
        (lambda: make([0, 0], [0, 1, 1]), "shape"),
        (lambda: make([0], [0], [1]), "chunk_X must lie in [0, 1)"),
        (lambda: make([-1], [0]), "start at 0"),
        (lambda: Schedule.forward_only(0), "num_micro_steps must be a whole number of at least 1; got 0"),
        (lambda: Schedule.one_f_one_b(2, 2, 2), "rank 2 of 2 does not exist"),
        (lambda: Schedule.interleaved(3, 2, 2, 0), "multiples of 2 ranks; got 3"),
        (lambda: Schedule.interleaved(2, 2, 2, 0).uses(3), "3 layers do not divide into 2 chunks"),
        (lambda: dataclasses.replace(Schedule.accumulate(1), chunk_L=[0, 1]), "chunk_L must lie in [0, 1)"),
        (lambda: dataclasses.replace(Schedule.accumulate(1), block_L=[0, 1]), "set reforward=True"),
        (lambda: dataclasses.replace(Schedule.accumulate(1, True), block_L=[1, 0]), "block_L must be ascending"),
        (lambda: dataclasses.replace(Schedule.accumulate(1, True), block_L=[0, 0]).uses(3), "is for 2 layers, the plan has 3"),
        (
            lambda: dataclasses.replace(Schedule.interleaved(2, 2, 2, 0, True), block_L=[0, 0, 0, 0]).uses(4),
            "a block lies in one chunk",
        ),
        (lambda: Schedule.accumulate(2)[2:], "cannot be cut"),
        (lambda: Schedule.parse("forward+reforward", 2), "is not a valid schedule"),
        (lambda: Schedule.parse("1f1b:2", 2), "is not a valid schedule"),
        (lambda: Schedule.parse("gpipe", 2), "is not a valid schedule"),
    ],
)
def test_bad_input_is_one_sentence(build, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)) as caught:
        build()
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
