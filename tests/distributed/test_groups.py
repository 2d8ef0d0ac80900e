"""Laws of `Group`, on threads and on processes: rows and values arrive, and nobody waits for a rank that will not come."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import TorchGroup, as_group
from foremoe.distributed.private import private_group
from foremoe.testing.ranks import get_pool, run_threads

# Letters: G ranks.

MAX_RANKS = 3
few = examples(30)


def by_threads(fn, num_ranks, *args, **options):
    return run_threads(fn, num_ranks, *args, **options)


def by_processes(fn, num_ranks, *args, **options):
    return get_pool(MAX_RANKS).run(fn, *args, num_ranks=num_ranks, **options)


both = pytest.mark.parametrize("run", [by_threads, by_processes])


def rows(g, to, num, width, dtype):
    """Rows that say who sent them to whom; all bytes are used."""
    values = (torch.arange(num * width * dtype.itemsize) * 7 + 31 * g + 101 * to) % 256
    return values.to(torch.uint8).view(dtype).view(num, *(() if width == 1 else (width,)))


def exchange(group, cases):
    wrong = []
    for num_GG, width, dtype in cases:
        g, num_out_G = group.rank, num_GG[group.rank]
        num_in_G = [num_G[g] for num_G in num_GG]
        sent = torch.cat([rows(g, to, num, width, dtype) for to, num in enumerate(num_out_G)])
        received = torch.zeros(sum(num_in_G), *sent.shape[1:], dtype=dtype)
        group.all_to_all(received, sent, num_in_G, num_out_G)
        sent.view(torch.uint8).zero_()  # it may be reused at once
        want = torch.cat([rows(src, g, num, width, dtype) for src, num in enumerate(num_in_G)])
        if not torch.equal(received.view(torch.uint8), want.view(torch.uint8)):
            wrong.append((g, num_GG, width, dtype))
    return wrong


@st.composite
def exchanges(draw, num_ranks):
    num = st.integers(0, 4)
    num_GG = draw(st.lists(st.lists(num, min_size=num_ranks, max_size=num_ranks), min_size=num_ranks, max_size=num_ranks))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64]))
    return num_GG, draw(st.integers(1, 3)), dtype


@both
@few
@given(st.data())
def test_rows_reach_the_ranks_they_are_for(run, data):
    num_ranks = data.draw(st.integers(1, MAX_RANKS))
    cases = data.draw(st.lists(exchanges(num_ranks), min_size=1, max_size=4))
    assert run(exchange, num_ranks, cases) == [[]] * num_ranks


@both
def test_nothing_at_all_can_be_exchanged(run):
    case = [([[0] * 3] * 3, 2, torch.bfloat16), ([[0] * 3] * 3, 1, torch.float8_e4m3fn)]
    assert run(exchange, 3, case) == [[]] * 3


def gather_each(group, values_G, times):
    return [group.gather(values_G[group.rank]) for _ in range(times)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=300) | st.binary(max_size=600),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@both
@few
@given(st.data())
def test_every_rank_gets_every_value(run, data):
    values_G = data.draw(st.lists(VALUES, min_size=1, max_size=MAX_RANKS))
    results = run(gather_each, len(values_G), values_G, 3)
    assert results == [[values_G] * 3] * len(values_G)


@both
@pytest.mark.parametrize("num_bytes", [1, 230, 240, 248, 256, 5000])
def test_values_of_any_length_are_gathered(run, num_bytes):
    """Up to a few hundred bytes, one message will do."""
    for longer in range(10):
        values_G = [b"x" * (num_bytes + longer), b"", b"y" * num_bytes]
        assert run(gather_each, 3, values_G, 1) == [[values_G]] * 3


def leaves_one_out(group, silent, verb):
    if group.rank == silent:
        return None
    if verb == "gather":
        return group.gather(1)
    ones = [1] * group.size
    return group.all_to_all(torch.zeros(group.size), torch.ones(group.size), ones, ones)


@both
@pytest.mark.parametrize("verb", ["gather", "all_to_all"])
def test_a_silent_rank_is_named_after_the_timeout(run, verb):
    silent = 1
    results = run(leaves_one_out, 3, silent, verb, errors=True, timeout_s=3.0)
    for g, error in enumerate(results):
        assert (error is None) if g == silent else isinstance(error, TransferError)
        if g != silent:
            # The first one to give up reports it, and the other may hear of that before its own patience ends.
            assert error.ranks and g not in error.ranks
            assert f"rank {silent}" in str(error), error
            assert "\n" not in str(error)


def reports(group, verb):
    if group.rank == 1:
        group.report("ValueError: no more tokens")
        return None
    try:
        return leaves_one_out(group, 1, verb)
    except TransferError as error:
        return error


@both
@pytest.mark.parametrize("verb", ["gather", "all_to_all"])
def test_a_report_ends_the_others_long_before_the_timeout(run, verb):
    begin = time.monotonic()
    # The others may even be in set-up still.
    for g, result in enumerate(run(reports, 3, verb, errors=True, timeout_s=1200.0)):
        if g != 1:
            assert isinstance(result, TransferError) and result.ranks == (1,)
            assert "rank 1: ValueError: no more tokens" in str(result)
    assert time.monotonic() - begin < 600


def late(group):
    if group.rank == 1:
        time.sleep(1.3)  # longer than the time between two looks for reports
    return group.gather(group.rank)


@both
def test_a_late_rank_is_waited_for(run):
    assert run(late, 2, timeout_s=20.0) == [[0, 1]] * 2


def groups_come_and_go(group, late_rank, pause):
    """Groups of the same ranks, one after the other; one rank is always behind."""
    seen = []
    for number in range(3):
        mine = TorchGroup(group.process_group, timeout_s=10.0)
        seen.append(mine.gather((number, mine.rank)))
        if number == 0:
            mine.report("nobody will read this")
        if group.rank == late_rank and pause == "before close":
            time.sleep(0.1)
        mine.close()
        mine.close()
        if group.rank == late_rank and pause == "after close":
            time.sleep(0.1)
    return seen


@pytest.mark.parametrize("pause", ["before close", "after close"])
@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_new_group_does_not_meet_an_old_one(late_rank, pause):
    for seen in get_pool(MAX_RANKS).run(groups_come_and_go, late_rank, pause, num_ranks=2):
        assert seen == [[(number, g) for g in range(2)] for number in range(3)]


def part_of_the_ranks(group):
    """Ranks 1 and 2 have groups that rank 0 knows nothing of."""
    process_group = dist.new_group([1, 2])
    if group.rank == 0:
        group.barrier()
        return None
    mine = TorchGroup(process_group, timeout_s=10.0)
    link = mine.private_gloo()
    received = torch.zeros(2)
    mine.all_to_all(received, torch.full((2,), float(group.rank)), [1, 1], [1, 1])
    values = mine.gather(group.rank), received.tolist(), mine.rank, link.size()
    mine.close()
    group.barrier()
    return values


def test_a_group_can_be_a_part_of_the_ranks():
    assert get_pool(3).run(part_of_the_ranks, num_ranks=3)[1:] == [([1, 2], [1.0, 2.0], 0, 2), ([1, 2], [1.0, 2.0], 1, 2)]


def wraps(group):
    around, whole = as_group(group.process_group), as_group(None)
    found = as_group(group) is group, isinstance(around, TorchGroup), whole.size
    group.barrier()  # nobody leaves a group that another rank still connects to
    around.close()
    whole.close()
    return found


def test_a_process_group_becomes_a_group():
    assert get_pool(MAX_RANKS).run(wraps, num_ranks=2) == [(True, True, 2)] * 2


def test_without_torch_distributed_it_says_what_to_call():
    with pytest.raises(InputError, match="there is no process group; call torch"):
        TorchGroup()


def in_two_threads(group):
    """The main thread uses the group while another one uses a private group, ranks in different order; then the latter ends."""
    mine, device = private_group(group, torch.device("cpu"))
    found, ones = {}, [1] * group.size

    def exchange(which, name):
        received = torch.zeros(group.size)
        for _ in range(50):
            which.all_to_all(received, torch.full((group.size,), float(group.rank)), ones, ones)
            found[name] = received.tolist(), which.gather(name)

    thread = threading.Thread(target=exchange, args=(mine, "private"))
    thread.start()
    exchange(group, "main")
    thread.join()
    if group.rank == 1:
        mine.report("private matters")
    else:
        with pytest.raises(TransferError, match="rank 1: private matters"):
            mine.gather(1)
    found["after"] = group.gather(2)
    mine.close()
    return device.type, found


@both
def test_a_private_group_works_beside_its_parent_in_another_thread(run):
    ranks = [0.0, 1.0, 2.0]
    names = {name: (ranks, [name] * 3) for name in ("main", "private")}
    assert run(in_two_threads, 3, timeout_s=20.0) == [("cpu", names | {"after": [2, 2, 2]})] * 3


def test_other_groups_have_no_private_one():
    with pytest.raises(InputError, match="a object has no second group for another thread"):
        private_group(object(), torch.device("cpu"))
