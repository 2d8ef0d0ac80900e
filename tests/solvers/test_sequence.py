"""Rows of resident slots: searched in order, paid for as they are sent, their gradients home once."""

import dataclasses

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from profiles import examples

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.kept import kept_slots, price_as_sent, transfers_of
from foremoe.plan.replicas import Lives
from foremoe.planner.planner import Planner
from foremoe.problem.placement import Placement
from foremoe.problem.pricing import price, row_objective
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase, Schedule
from foremoe.problem.slots import ResidentSlots, SharedSlots
from foremoe.solvers import Search
from foremoe.solvers.search.sequence import Buffers, use_buffers
from foremoe.testing.reference import dense_reference, run_reference
from foremoe.testing.samples import plan_of, random_sources
from foremoe.testing.strategies import placements, problems
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, N rows, G ranks, E experts, B base slots, S slots, P buffers, Z replicas.

CLOSE = 1.0 + 1e-9  # costs are sums of floats
some = settings(max_examples=max(10, settings.default.max_examples // 2))


@st.composite
def sequences(draw: st.DrawFn, *, plain: bool = False) -> Problem:
    """Problems where what is resident matters; `plain`: passes of a micro-step stay together, one buffer a slot."""
    problem = draw(
        problems(
            min_ranks=2, max_ranks=4, max_base=2, min_redundant=1, max_redundant=2, min_micro_steps=2, max_micro_steps=6,
            max_layers=2, max_pairs=400, objectives=("time",), slots=ResidentSlots(1 if plain else draw(st.integers(1, 3))),
            row_kinds=("skewed", "skewed", "one", "sparse"),
        )
    )  # fmt: skip
    if not plain and problem.stage == "update":
        # Backward passes after later forward passes, so that few copies of a slot are overwritten in between.
        return dataclasses.replace(problem, schedule=Schedule.one_f_one_b(problem.M, 4, draw(st.integers(0, 2))))
    make = Schedule.accumulate if problem.stage == "update" else Schedule.forward_only
    return dataclasses.replace(problem, schedule=make(problem.M))


@some
@given(problem=sequences(), effort=st.sampled_from([0, 50, None]))
def test_plans_hold_and_no_layer_costs_more_than_its_experts_at_home(problem: Problem, effort: int | None) -> None:
    plan, _ = Planner(rank=(Search(effort),)).plan(problem, num_threads=1)
    plan.check(problem)
    assert plan.same_as(Planner(rank=(Search(effort),)).plan(problem, num_threads=2)[0])
    static_L = row_objective(problem, problem.static()).reshape(problem.M, problem.L).sum(axis=0)
    assert (plan.objective_ML.sum(axis=0) <= static_L * CLOSE).all()


@some
@given(problem=sequences(plain=True))
def test_no_row_costs_more_than_its_experts_at_home(problem: Problem) -> None:
    plan, _ = Planner(guard=False).plan(problem, num_threads=1)
    assert (plan.objective_ML.ravel() <= row_objective(problem, problem.static()) * CLOSE).all()


@given(data=st.data())
def test_buffers_of_the_search_hold_what_the_copies_leave_there(data: st.DataObject) -> None:
    problem = data.draw(sequences(plain=True))
    given_ = data.draw(placements(problem))
    kept_NGS = kept_slots(problem, given_, transfers_of(problem, given_))
    num_buffers = problem.slots.num_buffers(problem.R, 1)
    for layer in range(problem.L):
        buffers = Buffers(*np.full((2, problem.G, num_buffers), -1, np.int64))
        if problem.resident_LGS is not None:
            buffers.expert_GP[:, : problem.R] = problem.resident_LGS[layer, :, problem.B :]
        for m in range(problem.M):
            n = m * problem.L + layer
            expert_GS, quota_GS = given_.expert_NGS[n], given_.quotas_NGS[n]
            for g in range(problem.G):
                for s in range(problem.B, problem.S):
                    if quota_GS[g, s] > 0:
                        assert kept_NGS[n, g, s] == (expert_GS[g, s] in buffers.expert_GP[g])
            use_buffers(m, problem.B, expert_GS, quota_GS, buffers)


@given(data=st.data())
def test_a_row_pays_for_what_is_sent_for_it(data: st.DataObject) -> None:
    """What stays costs no copy and no gradient; nothing else of a row changes."""
    problem = data.draw(sequences())
    given_ = data.draw(placements(problem))
    sent, alone = price_as_sent(problem, given_), price(problem, given_)
    kept_NGS = kept_slots(problem, given_, transfers_of(problem, given_))
    busy_NGS = given_.quotas_NGS > 0
    busy_NGS[:, :, : problem.B] = False
    for name, part_N in sent.parts().items():
        if name in ("transfer_s", "gradient_s"):
            assert (part_N <= alone.parts()[name] + 1e-18).all()
            assert (part_N[(kept_NGS == busy_NGS).all(axis=(1, 2))] == 0.0).all()
        else:
            np.testing.assert_array_equal(part_N, alone.parts()[name])
    none_kept_N = ~kept_NGS.any(axis=(1, 2))
    np.testing.assert_array_equal(sent.total_s[none_kept_N], alone.total_s[none_kept_N])
    shared = dataclasses.replace(problem, slots=SharedSlots(), resident_LGS=None)
    np.testing.assert_array_equal(price_as_sent(shared, given_).total_s, price(shared, given_).total_s)


@given(data=st.data())
def test_every_backward_adds_to_one_gradient_that_goes_home_once(data: st.DataObject) -> None:
    """Against a walk over the uses of every rank, copy by copy."""
    problem = data.draw(sequences())
    assume(problem.stage == "update")
    plan = plan_of(problem, data.draw(placements(problem)))
    lives = Lives.of(plan)
    number = {
        (int(row), int(rank), int(e)): z
        for z, (row, rank, e) in enumerate(zip(lives.replicas.row_Z, lives.replicas.rank_Z, lives.replicas.expert_Z, strict=True))
    }
    uses, t = plan.header.schedule.uses(plan.L), plan.transfers
    for g in range(plan.G):
        open_: dict[tuple[int, int], list[int]] = {}  # (layer, expert) -> replicas whose gradients lie in its buffer
        done = list[list[int]]()
        for u in range(len(uses.use_U)):
            for c in np.flatnonzero((t.need_C == u) & (t.dst_C == g)):
                done.append(open_.pop((int(t.layer_C[c]), int(t.expert_C[c])), []))
            if uses.phase_U[u] == Phase.BACKWARD:
                layer = int(uses.layer_U[u])
                n = int(plan.order_M[uses.micro_step_U[u]]) * plan.L + layer
                for s in range(plan.B, plan.S):
                    e = int(plan.expert_NGS[n, g, s])
                    if plan.quota_NGS[n, g, s] > 0:
                        assert lives.at_Z[number[n, g, e]] == u
                        open_.setdefault((layer, e), []).append(number[n, g, e])
        for members in [*done, *open_.values()]:
            assert all(lives.end_Z[z] == members[-1] for z in members)
    assert len(lives.returned().row_Z) == len(np.unique(lives.end_Z))


@examples(10)
@given(data=st.data())
def test_a_plan_of_resident_slots_computes_what_the_dense_model_does(data: st.DataObject) -> None:
    problem = data.draw(sequences())
    load_MLGE = random_sources(problem, np.random.default_rng(0))
    assume(load_MLGE.sum() < 2000)
    plan = dataclasses.replace(Planner().plan(problem, num_threads=1)[0], resident_LGS=None).rederived()
    dense = dense_reference(load_MLGE, backward=problem.schedule.trains)
    assert run_reference(plan, load_MLGE).difference(dense) < 1e-9


def test_replicas_stay_where_loads_repeat() -> None:
    """The same load in every micro-step: what the first brings serves all."""
    load_MLGE = np.full((6, 2, 4, 8), 200, np.int32)
    load_MLGE[..., 0] = 2000
    model = dataclasses.replace(Model.preset("qwen3-30b-a3b"), num_experts=8, num_topk=2, num_layers=2)
    work = Workload.from_counts(load_MLGE, num_topk=2, stage="update")
    problem = Problem.of(work, Cluster.preset("8xh100", 4), model=model, slots=ResidentSlots())
    plan, _ = Planner().plan(problem)
    assert len(plan.transfers) < plan.num_replicas / 3
    assert (Lives.of(plan).returned().row_Z // plan.L == plan.M - 1).mean() > 0.5
    placement = Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS)
    assert price_as_sent(problem, placement).total_s.sum() < price(problem, placement).total_s.sum()
