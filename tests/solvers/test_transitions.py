"""Transitions: never dearer than rows planned alone, priced as weights are sent, and against slow references."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from profiles import examples

from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.cost_in_order import sequence_bound, sequence_cost, transfers_in_order
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import resolve
from foremoe.problem.bounds import load_bound
from foremoe.problem.cost import CostModel
from foremoe.problem.estimate import estimate_rows, problem_rates, row_times
from foremoe.problem.placement import Stop
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase, Schedule
from foremoe.problem.slots import ResidentSlots, SharedSlots
from foremoe.solvers import Even, Exact, Search, Transitions
from foremoe.solvers.order.keep import Buffers, price_kept, use_buffers
from foremoe.solvers.order.transitions import walk_of
from foremoe.solvers.order.walk import distances, row_keeping, shortest_path
from foremoe.solvers.rows import Placed
from foremoe.testing.reference import dense_reference, run_reference
from foremoe.testing.samples import many_row_problem, plan_of, random_placement, random_sources
from foremoe.testing.strategies import placements, problems

# Letters: M micro-steps, L layers, N rows, G ranks, E experts, B base slots, R redundant slots, S slots, P buffers.

CLOSE = 1.0 + 1e-9  # costs are sums of floats
COUNTED = Transitions(reorder=False, replan=False)
LEVELS = (Transitions(), Transitions(reorder=False), Transitions(replan=False), Transitions(invest=True))
some = settings(max_examples=max(10, settings.default.max_examples // 2))


@st.composite
def sequences(draw: st.DrawFn, *, plain: bool = False) -> Problem:
    """Problems where what is resident matters; `plain`: no pass of another micro-step between those of one."""
    # Enough micro-steps, load and work per pair that replicas pay and are worth keeping.
    problem = draw(
        problems(
            min_ranks=2, max_ranks=4, max_base=2, min_redundant=1, max_redundant=2, min_micro_steps=2, max_micro_steps=6,
            max_layers=2, max_pairs=400, objectives=("time",), slots=ResidentSlots(draw(st.sampled_from([1, 1, 1, 2, 3]))),
            row_kinds=("skewed", "skewed", "one", "sparse"),
        )
    )  # fmt: skip
    if not plain and problem.stage == "update":
        # Backward passes after later forward passes, so that few copies of a slot are overwritten in between.
        problem = dataclasses.replace(problem, schedule=Schedule.one_f_one_b(problem.M, 4, draw(st.integers(0, 2))))
    if plain:
        make = Schedule.accumulate if problem.stage == "update" else Schedule.forward_only
        problem = dataclasses.replace(problem, schedule=make(problem.M))
    return problem


def total_s(plan: Plan) -> float:
    return float(plan.cost_ML.sum().total_s)


def made(problem: Problem, level: Transitions | None, num_threads: int = 1) -> Plan:
    plan, report = Planner(order=level).plan(problem, num_threads=num_threads)
    assert report.warnings == ()
    return plan


@pytest.mark.parametrize("level", LEVELS, ids=repr)
@some
@given(problem=sequences())
def test_a_sequence_never_costs_more_than_rows_planned_alone(level: Transitions, problem: Problem) -> None:
    plan = made(problem, level)
    plan.check(problem)
    assert total_s(plan) <= total_s(made(problem, COUNTED)) * CLOSE
    assert sorted(plan.order_M.tolist()) == list(range(problem.M))
    if not level.reorder:
        assert plan.order_M.tolist() == list(range(problem.M))


@pytest.mark.parametrize("level", [COUNTED, *LEVELS], ids=repr)
@some
@given(problem=sequences(plain=True))
def test_rows_keep_law_4_where_passes_of_a_micro_step_stay_together(level: Transitions, problem: Problem) -> None:
    plan, alone = made(problem, level), made(problem, None)
    static_N = row_objective(problem, problem.static())
    assert total_s(plan) <= total_s(alone) * CLOSE
    if not level.invest:
        assert (plan.objective_ML.ravel() <= static_N * CLOSE).all()
    if level == COUNTED:
        assert (plan.objective_ML <= alone.objective_ML * CLOSE).all()
        assert plan.expert_MLGS.tobytes() == alone.expert_MLGS.tobytes()


@some
@given(data=st.data())
def test_law_7_a_start_is_never_made_worse(data: st.DataObject) -> None:
    problem = data.draw(sequences(plain=True))
    start = data.draw(placements(problem))
    plan, _ = Planner(order=Transitions()).plan(problem, start, num_threads=1)
    assert (plan.objective_ML.ravel() <= row_objective(problem, start) * CLOSE).all()


@some
@given(problem=sequences(), level=st.sampled_from(LEVELS))
def test_any_number_of_threads_gives_the_same_bytes(problem: Problem, level: Transitions) -> None:
    assert made(problem, level).same_as(made(problem, level, num_threads=2))


@examples(10)
@given(data=st.data())
def test_a_reordered_plan_computes_what_the_dense_model_does(data: st.DataObject) -> None:
    problem = data.draw(sequences())
    load_MLGE = random_sources(problem, np.random.default_rng(0))
    assume(load_MLGE.sum() < 2000)
    plan = dataclasses.replace(made(problem, Transitions(invest=True)), resident_LGS=None).rederived()
    dense = dense_reference(load_MLGE, backward=problem.schedule.trains)
    assert run_reference(plan, load_MLGE).difference(dense) < 1e-9


def slow_parts(problem: Problem, plan: Plan, n: int) -> tuple[float, float]:
    """`transfer_s` and `gradient_s` of one row, copy by copy."""
    r, times, t = problem_rates(problem), row_times(problem), plan.transfers
    price = problem.cluster.copy_contention / problem.G
    node_G, m, layer = problem.cluster.node_of_rank_G, n // problem.L, n % problem.L
    seconds, returned = 0.0, dict[tuple[str, bool, int], float]()
    for g in range(problem.G):
        for s in range(problem.B, problem.S):
            if plan.quota_NGS[n, g, s] > 0:
                home = problem.home_LE[layer, plan.expert_NGS[n, g, s]] // problem.B
                near = bool(node_G[home] == node_G[g])
                for end in (("in", near, int(home)), ("out", near, g)):
                    gradient_s = (r.gradient_peer_s if near else r.gradient_rdma_s) * r.returns_gradients
                    returned[end] = returned.get(end, 0.0) + gradient_s
                seconds += r.replica_peer_s - price * r.copy_peer_s if near else r.replica_rdma_s - price * r.copy_rdma_s
    for forward, hide_N in ((True, times.hide_forward_N), (False, times.hide_backward_N)):
        busy: dict[tuple[str, bool, int], float] = {}
        for c in range(len(t)):
            if (t.micro_step_C[c], t.layer_C[c], t.phase_C[c] == Phase.FORWARD) != (m, layer, forward):
                continue
            home, dst = problem.home_LE[layer, t.expert_C[c]] // problem.B, t.dst_C[c]
            near = bool(node_G[home] == node_G[dst])
            copy_s = r.copy_peer_s if near else r.copy_rdma_s
            seconds += price * copy_s
            for end in (("out", near, int(home)), ("in", near, int(dst))):
                busy[end] = busy.get(end, 0.0) + copy_s
        exposed_s = max(0.0, max(busy.values(), default=0.0) - hide_N[n])
        seconds += exposed_s
    both_s = max([0.0, *(busy.get(end, 0.0) + returned.get(end, 0.0) for end in {*busy, *returned})])
    return seconds, max(0.0, both_s - times.hide_backward_N[n]) - exposed_s


@given(data=st.data())
def test_the_sequence_cost_equals_the_slow_reference_and_bounds_hold(data: st.DataObject) -> None:
    problem = data.draw(sequences())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    placement = random_placement(problem, rng, density=data.draw(st.sampled_from([1.0, 0.4])), evenness=20.0)
    plan = plan_of(problem, placement, order_M=rng.permutation(problem.M))
    cost, full = sequence_cost(problem, placement, plan.transfers), estimate_rows(problem, placement)
    parts_N2 = [slow_parts(problem, plan, n) for n in range(problem.N)]
    np.testing.assert_allclose(np.stack([cost.transfer_s, cost.gradient_s], axis=1), parts_N2, rtol=1e-9, atol=1e-15)
    for name, part in full.parts().items():
        assert name in ("transfer_s", "gradient_s") or np.array_equal(part, cost.parts()[name])
    assert (sequence_bound(problem, load_bound(problem)) <= cost.total_s * CLOSE).all()


@given(data=st.data())
def test_kernels_hold_and_price_what_transfers_say(data: st.DataObject) -> None:
    problem = data.draw(sequences(plain=True))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    placement, other = (random_placement(problem, rng, density=density, evenness=20.0) for density in (1.0, 0.5))
    order_M = np.array(data.draw(st.permutations(range(problem.M))), np.int32)
    transfers = transfers_in_order(problem, placement, order_M)
    sent = {
        tuple(c)
        for c in zip(
            *(a.tolist() for a in (transfers.micro_step_C, transfers.layer_C, transfers.dst_C, transfers.expert_C)), strict=True
        )
    }
    cost_N = sequence_cost(problem, placement, transfers).total_s
    B, none_XNGR = problem.B, np.empty((0, problem.N, problem.G, problem.R), np.int16)
    walk = walk_of(problem, placement, none_XNGR, False)
    for layer in range(problem.L):
        buffer_GP = np.full((problem.G, problem.slots.num_buffers(problem.R, 1)), -1, np.int64)
        buffers = Buffers(buffer_GP, np.full_like(buffer_GP, -1))
        if problem.resident_LGS is not None:
            buffer_GP[:, : problem.R] = problem.resident_LGS[layer, :, B:]
        for t, m in enumerate(order_M):
            n = m * problem.L + layer
            keeping = row_keeping(walk, n)
            prices = []
            for at, held_GP in ((placement, buffer_GP), (other, np.empty((problem.G, 0), np.int64))):
                placed = Placed(at.expert_NGS[n].copy(), at.quotas_NGS[n].copy(), at.load_NG()[n].copy())
                prices.append(price_kept(keeping, held_GP, placed))
            want = cost_N[n] - row_objective(problem, other)[n]
            assert prices[0] - prices[1] == pytest.approx(want, rel=1e-6, abs=1e-9 * cost_N[n])
            for g, s in itertools.product(range(problem.G), range(B, problem.S)):
                e = int(placement.expert_NGS[n, g, s])
                if placement.quotas_NGS[n, g, s] > 0:
                    assert ((m, layer, g, e) in sent) == (e not in buffer_GP[g])
            use_buffers(t, B, placement.expert_NGS[n], placement.quotas_NGS[n], buffers)


def two_kinds(**options: object) -> Problem:
    """Micro-steps of two kinds of text in turn: each kind has a hot expert of its own, and copies are dear."""
    load_MLE = np.full((6, 2, 8), 8000, np.int32)
    load_MLE[::2, :, 0] = 40000
    load_MLE[1::2, :, 7] = 40000
    fields: dict[str, object] = {
        "model": dataclasses.replace(Model.preset("qwen3-30b-a3b"), num_experts=8, num_topk=2),
        "cluster": dataclasses.replace(
            Cluster.preset("8xh100", num_ranks=4), peer_bytes_per_s=2e10, compute_efficiency=0.5, pair_overhead_s=2.1e-8,
            element_overhead_s=0.0, score_flops_per_s=None, layer_overhead_s=2.6e-4, plain_bytes_per_s=None,
        ),
        "cost": CostModel(objective="time"), "schedule": Schedule.forward_only(6), "stage": "recompute",
        "home_LE": np.tile(np.arange(8), (2, 1)), "load_MLE": load_MLE, "moe_layer_L": np.arange(2), "slots": ResidentSlots(),
    }  # fmt: skip
    return Problem(**{**fields, **options})  # type: ignore[arg-type]


def test_like_micro_steps_follow_each_other_and_keep_their_replicas() -> None:
    problem = two_kinds()
    counted, plan = made(problem, COUNTED), made(problem, Transitions())
    kinds = [int(m) % 2 for m in plan.order_M]
    assert kinds == sorted(kinds) or kinds == sorted(kinds, reverse=True)
    assert 0 < len(plan.transfers) < len(counted.transfers)
    assert total_s(plan) < total_s(made(problem, Transitions(reorder=False))) < total_s(counted)


def test_what_is_resident_at_the_start_is_used() -> None:
    problem = two_kinds()
    problem = dataclasses.replace(problem, load_MLE=problem.load_MLE[:1], schedule=Schedule.forward_only(1))
    alone = made(problem, COUNTED)
    assert len(alone.transfers) > 0
    again = made(dataclasses.replace(problem, resident_LGS=alone.expert_MLGS[0]), Transitions())
    assert len(again.transfers) < again.num_replicas and total_s(again) < total_s(alone)


def test_an_investment_stays_where_later_micro_steps_pay_it_back() -> None:
    # One kind of text, copies that take so long to start that no micro-step alone pays for one.
    load_MLE = two_kinds().load_MLE[::2].repeat(10, axis=0)
    cluster = dataclasses.replace(two_kinds().cluster, peer_latency_s=1e-2)
    problem = two_kinds(load_MLE=load_MLE, schedule=Schedule.forward_only(30), cluster=cluster)
    careful, bold = made(problem, Transitions()), made(problem, Transitions(invest=True))
    assert len(careful.transfers) == 0 < len(bold.transfers)
    assert total_s(bold) < 0.99 * total_s(careful)
    first = int(bold.order_M[0])
    assert (bold.objective_ML[first] > careful.objective_ML[first]).all()
    # Without replanning nothing may be invested either.
    placement = problem.static()
    assert Transitions(replan=False, invest=True).solve(problem, placement)[1] is placement


@given(seed=st.integers(0, 2**32 - 1), num=st.integers(1, 7))
def test_the_path_is_a_permutation_and_no_longer_than_nearest_neighbours(seed: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    load_MLE = rng.integers(0, 9, (num, 2, 5)).astype(np.int32)
    apart_MM = np.zeros((num, num))
    distances(load_MLE, apart_MM)
    share_MLE = load_MLE / np.maximum(1, load_MLE.sum(axis=2, keepdims=True))
    np.testing.assert_allclose(apart_MM, np.abs(share_MLE[:, None] - share_MLE[None]).sum(axis=(2, 3)))
    path = shortest_path(apart_MM).tolist()
    assert sorted(path) == list(range(num))

    def length(order: list[int]) -> float:
        return sum(apart_MM[a, b] for a, b in itertools.pairwise(order))

    nearest = []
    for start in range(num):
        order = [start]
        while len(order) < num:
            order.append(min(set(range(num)) - set(order), key=lambda m: (apart_MM[order[-1], m], m)))
        nearest.append(length(order))
    assert length(path) <= min(nearest) + 1e-9
    for i, j in itertools.combinations(range(num), 2):
        assert length(path) <= length(path[:i] + path[i : j + 1][::-1] + path[j + 1 :]) + 1e-6


def test_the_level_is_left_out_with_a_sentence_where_nothing_stays() -> None:
    base = two_kinds()
    for change, sentence in (
        ({"slots": SharedSlots()}, "shared slots keep nothing"),
        ({"cost": CostModel(objective="balance")}, "does not count"),
        ({"redundant": 0}, "hold no replicas"),
    ):
        problem = dataclasses.replace(base, **change)
        plan, report = Planner(order=Transitions()).plan(problem)
        assert len(report.warnings) == 1 and sentence in report.warnings[0]
        alone, _ = Planner().plan(problem)
        assert dataclasses.replace(plan, header=alone.header).same_as(alone)
    plan, report = Planner(order=Transitions()).plan(base)
    assert [level.solver for level in report.levels] == ["start", repr(Search()), repr(Transitions())]
    assert report.levels[-1].objective_sum == pytest.approx(total_s(plan))


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InputError, match="plans ahead"):
        Planner(order=Transitions(), foresight="previous")
    with pytest.raises(InputError, match="leave out split=Even"):
        Planner(order=Transitions(), split=Even())
    with pytest.raises(InputError, match="order must be"):
        Planner(order=Search())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="invest of Transitions must be true or false"):
        Transitions(invest=1)  # type: ignore[arg-type]
    planner = Planner().using(Transitions(reorder=False))
    assert planner.order == Transitions(reorder=False) and resolve(repr(planner)) == planner


def test_nothing_is_called_optimal_in_a_sequence() -> None:
    pytest.importorskip("pyscipopt", reason="Exact needs pyscipopt; foremoe[exact] installs it")
    problem = two_kinds()
    problem = dataclasses.replace(problem, load_MLE=problem.load_MLE // 500)
    assert (Planner(rank=(Exact(),)).plan(problem)[0].stop_ML == Stop.OPTIMAL).any()
    plan, _ = Planner(rank=(Exact(),), order=Transitions()).plan(problem)
    assert not (plan.stop_ML == Stop.OPTIMAL).any() and plan.violations(problem) == []


def test_many_rows_and_a_file(tmp_path: object) -> None:
    problem = dataclasses.replace(many_row_problem(300), slots=ResidentSlots(), cost=CostModel())
    plan = made(problem, Transitions())
    plan.check(problem)
    assert plan.same_as(made(problem, Transitions(), num_threads=2))
    plan.save(f"{tmp_path}/plan.safetensors")
    assert Plan.load(f"{tmp_path}/plan.safetensors").same_as(plan)
