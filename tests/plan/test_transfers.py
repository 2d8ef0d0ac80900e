"""Derived transfers, against a slow reference."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import copying_plans

from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList
from foremoe.testing.samples import many_row_problem, plan_of

# Letters: M micro-steps, L layers, G ranks, E experts, B base slots, R redundant slots, C copies, U uses.


def reference_transfers(plan: Plan) -> list[dict[str, int]]:
    """Copies of a plan, found by walking every use of every rank over a list of buffers."""
    head, B, R = plan.header, plan.B, plan.header.redundant
    copies = []
    uses = head.schedule.uses(plan.L)
    for g in range(plan.G):
        content: list[tuple[int, int] | None] = [None] * head.num_buffers
        last_read = [-1] * len(content)
        for use, m, layer, phase, _ in zip(*(a.tolist() for a in uses), strict=True):
            wanted = [(B + r, int(plan.expert_MLGS[m, layer, g, B + r])) for r in range(R) if plan.quota_MLGS[m, layer, g, B + r]]
            for b in range(len(content)):
                if content[b] in [(layer, e) for _, e in wanted]:
                    last_read[b] = use
            for slot, e in wanted:
                if (layer, e) in content:
                    continue
                # An empty buffer, else the one not read for longest; never one that this use reads.
                free = [b for b in range(len(content)) if last_read[b] < use]
                b = min(free, key=lambda b: (content[b] is not None, last_read[b], b))
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


def test_without_redundant_slots_or_replicas_there_are_no_transfers() -> None:
    problem = many_row_problem(8)
    assert len(plan_of(problem, problem.static()).transfers) == 0
    none = dataclasses.replace(problem, redundant=0)
    plan = plan_of(none, none.static())
    assert len(plan.transfers) == 0 and plan.violations(none) == []


def test_columns_of_different_lengths_are_refused() -> None:
    columns = {name: np.zeros(2, np.int32) for name in TransferList.array_fields()}
    assert len(TransferList(**columns)) == 2
    with pytest.raises(InputError, match="buffer_C must have shape"):
        TransferList(**{**columns, "buffer_C": np.zeros(3, np.int32)})
    with pytest.raises(InputError, match="slot_C holds values"):
        TransferList(**{**columns, "slot_C": np.full(2, 2**20)})
