"""Derived transfers: against a slow reference, and the properties that slot policies promise."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import copying_plans

from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.problem.slots import ResidentSlots, SharedSlots
from foremoe.testing.samples import many_row_problem, plan_of, random_placement

# Letters: M micro-steps, L layers, G ranks, E experts, B base slots, R redundant slots, C copies, U uses.


def reference_transfers(plan: Plan) -> list[dict[str, int]]:
    """Copies of a plan, found by walking every use of every rank over a list of buffers."""
    head, B, R = plan.header, plan.B, plan.header.redundant
    pool = head.slots.num_buffers(R, 1)
    shared = isinstance(head.slots, SharedSlots)
    copies = []
    uses = head.schedule.uses(plan.L)
    for g in range(plan.G):
        content: list[tuple[int, int] | None] = [None] * head.slots.num_buffers(R, plan.L)
        last_read = [-1] * len(content)
        owed: list[set[int]] = [set() for _ in content]  # uses to come of micro-steps that have read it
        later = [(int(plan.order_M[x]), layer, use) for use, x, layer, _, _ in zip(*(a.tolist() for a in uses), strict=True)]
        if plan.resident_LGS is not None:
            for layer, r in np.ndindex(plan.L, R):
                if plan.resident_LGS[layer, g, B + r] >= 0:
                    content[layer * pool + r] = (layer, int(plan.resident_LGS[layer, g, B + r]))
        for use, position, layer, phase, _ in zip(*(a.tolist() for a in uses), strict=True):
            m = int(plan.order_M[position])
            mine = range(pool) if shared else range(layer * pool, (layer + 1) * pool)
            wanted = [(B + r, int(plan.expert_MLGS[m, layer, g, B + r])) for r in range(R) if plan.quota_MLGS[m, layer, g, B + r]]
            for b in mine:
                if content[b] in [(layer, e) for _, e in wanted]:
                    last_read[b] = use
                    owed[b] |= {u for n, row_layer, u in later if (n, row_layer) == (m, layer) and not shared}
            for slot, e in wanted:
                if any(content[b] == (layer, e) for b in mine):
                    continue
                # An empty buffer, else the one not read for longest, those still owed to backward last; never one that this use
                # reads.
                free = [b for b in mine if last_read[b] < use]
                b = min(free, key=lambda b: (content[b] is not None, max(owed[b], default=-1) >= use, last_read[b], b))
                home = int(plan.home_LE[layer, e]) // B
                near = head.cluster.node_of_rank_G[home] == head.cluster.node_of_rank_G[g]
                copies.append(
                    {
                        "micro_step_C": m, "layer_C": layer, "phase_C": phase, "expert_C": e, "src_C": home, "dst_C": g,
                        "slot_C": slot, "link_C": int(Link.PEER if near else Link.RDMA), "buffer_C": b, "need_C": use,
                        "after_C": last_read[b],
                    }
                )  # fmt: skip
                content[b], last_read[b] = (layer, e), use
                owed[b] = {u for n, row_layer, u in later if (n, row_layer) == (m, layer) and not shared}
    return sorted(copies, key=lambda c: (c["need_C"], c["dst_C"], c["slot_C"]))


def as_rows(transfers: TransferList) -> list[dict[str, int]]:
    return [{name: int(getattr(transfers, name)[c]) for name in TransferList.array_fields()} for c in range(len(transfers))]


@given(st.data())
def test_equals_the_slow_reference(data: st.DataObject) -> None:
    density = data.draw(st.sampled_from([1.0, 0.5]))
    _, plan = data.draw(
        copying_plans(density=density, replicas=("any", "node"), max_redundant=3, min_micro_steps=1, min_layers=1)
    )
    plan = plan.rederived()
    assert as_rows(plan.transfers) == reference_transfers(plan)


@given(st.data())
def test_with_room_for_everything_nothing_is_sent_twice(data: st.DataObject) -> None:
    _, plan = data.draw(copying_plans(slots=SharedSlots(depth=64)))
    t = plan.transfers
    sent = list(zip(t.dst_C.tolist(), t.layer_C.tolist(), t.expert_C.tolist(), strict=True))
    assert len(sent) == len(set(sent))
    assert (t.after_C == -1).all()


@given(st.data())
def test_deeper_slots_never_send_more(data: st.DataObject) -> None:
    # True of least-recently-used replacement, whose smaller cache holds a subset of the larger one's content.
    problem, plan = data.draw(copying_plans(slots=SharedSlots(depth=1), max_redundant=1))
    counts = [len(resliced(plan, SharedSlots(depth=depth)).transfers) for depth in (1, 2, 3, 8)]
    assert counts == sorted(counts, reverse=True)
    assert problem.R == 1


@given(st.data())
def test_resident_slots_with_a_copy_per_micro_step_send_nothing_for_backward(data: st.DataObject) -> None:
    _, plan = data.draw(copying_plans(stages=("update",), slots=ResidentSlots(copies=4), max_micro_steps=4))
    assert (plan.transfers.phase_C == 0).all()


@pytest.mark.parametrize(("pp", "rank"), [(2, 0), (4, 0), (4, 1), (1, 0)])
def test_as_many_copies_as_micro_steps_in_flight_send_nothing_for_backward(pp: int, rank: int) -> None:
    problem = many_row_problem(32)
    problem = dataclasses.replace(problem, schedule=Schedule.one_f_one_b(problem.M, pp, rank), slots=ResidentSlots(pp - rank))
    plan = plan_of(problem, random_placement(problem, np.random.default_rng(0), density=1.0, evenness=20.0))
    assert len(plan.transfers) > 0 and (plan.transfers.phase_C == 0).all()


@given(st.data())
def test_what_is_resident_already_is_not_sent(data: st.DataObject) -> None:
    problem, plan = data.draw(copying_plans(slots=ResidentSlots(), max_micro_steps=2))
    # The same replicas in every micro-step, and in the slots from the start.
    same = dataclasses.replace(
        plan,
        expert_MLGS=np.repeat(plan.expert_MLGS[:1], plan.M, axis=0),
        quota_MLGS=np.repeat(plan.quota_MLGS[:1], plan.M, axis=0),
        load_MLE=np.repeat(plan.load_MLE[:1], plan.M, axis=0),
        resident_LGS=plan.expert_MLGS[0],
    ).rederived()
    assert len(same.transfers) == 0
    from_nothing = dataclasses.replace(same, resident_LGS=None).rederived()
    used = (same.quota_MLGS[0, ..., problem.B :] > 0).sum()
    assert len(from_nothing.transfers) == used


@given(st.data())
def test_records_are_ordered_and_cross_ranks(data: st.DataObject) -> None:
    _, plan = data.draw(copying_plans())
    t = plan.transfers
    key = list(zip(t.need_C.tolist(), t.dst_C.tolist(), t.slot_C.tolist(), strict=True))
    assert key == sorted(key) and len(set(key)) == len(key)
    assert (t.src_C != t.dst_C).all() and {*t.src_C.tolist(), *t.dst_C.tolist()} <= set(range(plan.G))


def test_without_redundant_slots_or_replicas_there_are_no_transfers() -> None:
    problem = many_row_problem(8)
    assert len(plan_of(problem, problem.static()).transfers) == 0
    none = dataclasses.replace(problem, redundant=0)
    plan = plan_of(none, none.static())
    assert len(plan.transfers) == 0 and plan.violations(none) == []


def test_the_turn_from_forward_to_backward_sends_nothing_twice() -> None:
    # One rank's ring holds the last layers of forward, which backward reads first.
    problem = many_row_problem(4)
    problem = dataclasses.replace(problem, schedule=Schedule.accumulate(problem.M), slots=SharedSlots(depth=2))
    plan = plan_of(problem, random_placement(problem, np.random.default_rng(0), density=1.0, evenness=20.0))
    forward = (plan.transfers.phase_C == 0).sum()
    assert 0 < len(plan.transfers) < 2 * forward


def test_columns_of_different_lengths_are_refused() -> None:
    columns = {name: np.zeros(2, np.int32) for name in TransferList.array_fields()}
    assert len(TransferList(**columns)) == 2
    with pytest.raises(InputError, match="buffer_C must have shape"):
        TransferList(**{**columns, "buffer_C": np.zeros(3, np.int32)})
    with pytest.raises(InputError, match="slot_C holds values"):
        TransferList(**{**columns, "slot_C": np.full(2, 2**20)})


def resliced(plan: Plan, slots: SharedSlots) -> Plan:
    """The same placement under another slot policy."""
    return dataclasses.replace(plan, header=dataclasses.replace(plan.header, slots=slots)).rederived()


def test_shared_slots_are_one_pool_and_resident_slots_one_per_layer() -> None:
    assert SharedSlots(depth=3).num_buffers(2, 94) == 6
    assert ResidentSlots(copies=3).num_buffers(2, 94) == 6 * 94
    for bad in (0, 1025, 1.0):
        with pytest.raises(InputError, match=f"got {bad}"):
            SharedSlots(bad)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"got {bad}"):
            ResidentSlots(bad)  # type: ignore[arg-type]
    problem: Problem = many_row_problem(8)
    assert problem.slots == SharedSlots()
