"""Bounds against brute force on tiny cases, and their kernels against plain versions."""

import dataclasses
import itertools

import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st

from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.planner.planner import Planner
from foremoe.problem.bounds import load_bound, row_bound, settled_load_bound
from foremoe.problem.cost import CostModel
from foremoe.problem.kernels.least_max import MOST_RANKS, WITHIN, reachable
from foremoe.problem.kernels.load_bound import bound_row, least_load
from foremoe.problem.placement import Stop
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.solvers import Greedy, LeastLoaded, Quota, Search
from foremoe.synthetic.counts import synthetic_workload
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import many_row_problem, random_placement, with_quotas
from foremoe.testing.strategies import problems

# Letters: G ranks, B base slots, E experts.

TINY = {"max_ranks": 3, "max_base": 2, "max_redundant": 2, "max_micro_steps": 1, "max_layers": 1, "max_pairs": 9}


def best_load(problem: Problem, n: int) -> int:
    """The smallest possible largest rank load of one row: every choice of replicas, and for each the split's closed form.

    A split with maximum T exists iff no set of ranks must serve more than T each: the experts that live only inside it.
    """
    G, node_G = problem.G, problem.cluster.node_of_rank_G
    home_E = problem.home_LE[n % problem.L] // problem.B
    choices_G = []
    for g in range(G):
        allowed = [
            e for e in range(problem.E) if home_E[e] != g and (problem.replicas == "any" or node_G[home_E[e]] == node_G[g])
        ]
        # More replicas never hurt, so every slot that can be filled is.
        choices_G.append(list(itertools.combinations(allowed, min(problem.R, len(allowed)))))
    sets = [s for size in range(1, G + 1) for s in itertools.combinations(range(G), size)]
    best = None
    for replicas_G in itertools.product(*choices_G):
        ranks_E = [{int(home_E[e])} | {g for g in range(G) if e in replicas_G[g]} for e in range(problem.E)]
        worst = 0
        for members in sets:
            confined = sum(int(problem.load_NE[n, e]) for e in range(problem.E) if ranks_E[e] <= set(members))
            worst = max(worst, -(-confined // len(members)))
        best = worst if best is None else min(best, worst)
    assert best is not None
    return best


@given(st.data())
def test_the_load_bound_is_below_the_best_of_all_placements(data: st.DataObject) -> None:
    problem = data.draw(problems(**TINY))
    note(describe(problem))
    bound_N = load_bound(problem)
    for n in range(problem.N):
        assert bound_N[n] <= best_load(problem, n)
        assert bound_N[n] >= -(-problem.load_NE[n].sum() // problem.G)


def least_load_by_hand(load_GB: Array, redundant: int) -> int:
    """`least_load` of all ranks, from its docstrings: every set of ranks, every number of receiving ranks."""
    load_G, num = load_GB.sum(axis=1), len(load_GB)
    order = sorted(range(num), key=lambda g: -load_G[g])
    largest = lambda ranks, k: sum(sorted((int(v) for g in ranks for v in load_GB[g]), reverse=True)[:k])  # noqa: E731
    bound = -(-int(load_G.sum()) // num)
    if redundant == 0:
        return int(load_G.max())
    if redundant > 1:
        return max([bound, *(
            -(-(int(load_G[order[:k]].sum()) - largest(order[:k], redundant * (num - k))) // k) for k in range(1, num + 1)
        )])  # fmt: skip
    while True:  # the first T that no set H of ranks above it rules out

        def ruled_out(target: int) -> bool:
            above = [g for g in order if load_G[g] > target]
            below = [g for g in order if load_G[g] <= target]
            for k in range(1, len(above) + 1):
                over = int(load_G[above[:k]].sum()) - k * target
                for j in range(len(below) + 1):
                    lacking = sum(target - int(load_G[g]) for g in below[: len(below) - j])
                    if over > largest(above[:k], j) + lacking:
                        return True
            return False

        if not ruled_out(bound):
            return bound
        bound += 1


@given(st.data(), st.sampled_from([0, 1, 1, 2, 3]))
def test_least_load_is_what_it_says(data: st.DataObject, redundant: int) -> None:
    G, B = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    top = data.draw(st.sampled_from([3, 12, 60]))
    loads = data.draw(st.lists(st.integers(0, top), min_size=G * B, max_size=G * B))
    hot = data.draw(st.integers(0, G - 1))
    load_GB = np.array(loads, np.int64).reshape(G, B)
    load_GB[hot] *= data.draw(st.sampled_from([1, 2]))
    bound = least_load(np.int64(0), np.ones(G, bool), redundant, load_GB)
    assert bound == least_load_by_hand(load_GB, redundant)
    assert least_load(bound + 3, np.ones(G, bool), redundant, load_GB) == bound + 3
    # Ranks outside take no part.
    padded_GB, member_G = np.concatenate([load_GB, 99 * load_GB + 7]), np.arange(2 * G) < G
    assert least_load(np.int64(0), member_G, redundant, padded_GB) == bound
    quota_GS = np.concatenate([load_GB, np.zeros((G, redundant), np.int64)], axis=1).astype(np.int32)
    assert bound_row(0, np.ones(G, bool), B, quota_GS) == bound


def test_small_experts_leave_hot_ranks_hot() -> None:
    # Two ranks of four small experts each; the two cold ranks have one slot each and lack more than an expert has.
    load_GB = np.array([[10, 10, 10, 10], [10, 10, 10, 9], [1, 1, 1, 1], [1, 1, 1, 1]], np.int64)
    assert least_load(np.int64(0), np.ones(4, bool), 1, load_GB) == 30
    # The cold rank takes 20 and the warm one, which is below the maximum, only fills up: giving its 30 away would not help.
    load_GB = np.array([[20, 20, 20, 20], [30, 18, 1, 1], [1, 1, 1, 1]], np.int64)
    assert least_load(np.int64(0), np.ones(3, bool), 1, load_GB) == 55


def test_a_rank_just_above_the_bound_may_take_some_where_the_maximum_lies_higher() -> None:
    # Two ranks lie between the mean and the least maximum: once it is above their load, they, too, take what others give.
    load_E = [
        3201, 20011, 1341, 1724, 2317, 1294, 3269, 5907, 1000, 66, 917, 3655, 799, 3931, 4778, 9547, 3936, 6216, 982, 1509, 3848,
        12020, 1151, 3145, 6742, 9043, 8168, 11595, 16994, 5391, 60, 2318, 2972, 2322, 2169, 1270, 1985, 147, 11273, 4063, 1494,
        448, 3453, 13702, 1218, 1604, 6387, 158, 3968, 1681, 6398, 1144, 4188, 2381, 1302, 60, 1277, 4046, 2983, 2067, 2638, 132,
        3730, 5190, 1567, 2834, 1294, 2192, 2858, 3761, 4891, 10159, 2510, 2719, 5957, 3700, 1382, 6514, 396, 13425, 8177, 7399,
        712, 694, 0, 3522, 15173, 1947, 2661, 522, 2780, 344, 6033, 8427, 9, 11843, 18792, 14182, 973, 1639, 3006, 945, 1811,
        4491, 832, 399, 2837, 5388, 7582, 0, 1333, 2359, 2427, 2734, 894, 2644, 2290, 4, 3338, 3941, 736, 680, 878, 5911, 18610,
        3808, 12882, 4815,
    ]  # fmt: skip
    problem = Problem(
        model=Model.preset("qwen3-30b-a3b"), cluster=Cluster.preset("8xh100", num_ranks=8), load_MLE=[[load_E]],
        home_LE=[list(range(128))], schedule=Schedule.accumulate(1), cost=CostModel(objective="balance"), moe_layer_L=[0],
    )  # fmt: skip
    plan, _ = Planner().plan(problem)
    plan.check(problem)
    assert plan.load_NG.max() == plan.load_bound_ML[0, 0] == 66190


def test_the_load_bound_is_often_tight() -> None:
    rng = np.random.default_rng(0)
    problem = many_row_problem(32)
    load_MLE = (30 * rng.random(problem.load_MLE.shape) ** 3).astype(np.int32)
    problem = dataclasses.replace(problem, load_MLE=load_MLE)[:2]
    met = [load_bound(problem)[n] == best_load(problem, n) for n in range(problem.N)]
    assert sum(met) > len(met) / 2


@given(st.data())
def test_a_maximum_is_reachable_from_the_best_of_all_placements_on(data: st.DataObject) -> None:
    problem = data.draw(problems(**TINY | {"max_ranks": 4, "max_redundant": 1, "max_pairs": 40}, min_redundant=1))
    note(describe(problem))
    node_G = problem.cluster.node_of_rank_G
    domains = [node_G == v for v in set(node_G)] if problem.replicas == "node" else [node_G >= 0]
    best_N = np.array([best_load(problem, n) for n in range(problem.N)])
    for n in range(problem.N):
        load_GB = -np.sort(-problem.load_NE[n][problem.base_NGB[n]].astype(np.int64), axis=1)
        for target in range(load_GB.sum(axis=1).max() + 1):
            found = all(reachable(np.int64(target), load_GB[members_G]) for members_G in domains)
            assert found == (target >= best_N[n]), target
    for reached_N in (best_N, best_N + 1.0, best_N * 1.04):
        bound_N = settled_load_bound(problem, reached_N)
        assert (load_bound(problem) <= bound_N).all() and (bound_N <= best_N).all()
    close_N = best_N <= WITHIN * load_bound(problem)
    assert (settled_load_bound(problem, best_N.astype(np.float64))[close_N] == best_N[close_N]).all()


def test_loads_that_the_quick_bound_leaves_open_are_settled() -> None:
    work = synthetic_workload(
        "deepseek-v2-lite", num_ranks=MOST_RANKS, tokens_per_rank=256, micro_steps=8, num_layers=4, regime="skew", seed=11
    )
    cluster, cost = Cluster.preset("8xh100", num_ranks=MOST_RANKS), CostModel(objective="balance")
    problem = Problem.of(work, cluster, cost=cost)
    plan, _ = Planner().plan(problem)
    plan.check(problem)
    quick_N, reached_N, bound_N = load_bound(problem), plan.load_NG.max(axis=1), plan.load_bound_ML.ravel()
    proven_N = reached_N == bound_N
    assert (proven_N & (quick_N < reached_N)).sum() > 1 and (bound_N >= quick_N).all()
    assert ((plan.stop_ML.ravel() == Stop.OPTIMAL) == proven_N).all()
    # From a worse placement the bound comes close to the best; from one far off, nowhere.
    near_N = settled_load_bound(problem, np.floor(1.01 * reached_N))
    assert (near_N <= reached_N).all() and (near_N >= bound_N / 1.0051).all()
    assert (settled_load_bound(problem, 2.0 * reached_N) == quick_N).all()
    # More ranks than are settled, or more slots: the quick bound stays.
    for more in (dataclasses.replace(problem, redundant=2), dataclasses.replace(problem, redundant=0)):
        assert (settled_load_bound(more, load_bound(more) + 1.0) == load_bound(more)).all()


@given(st.data())
def test_no_placement_goes_below_the_bound(data: st.DataObject) -> None:
    problem = data.draw(problems(max_micro_steps=2, max_layers=2))
    slot_s = data.draw(st.sampled_from([0.0, 1e-6, 1e-4]))
    problem = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, slot_overhead_s=slot_s))
    note(describe(problem))
    bound_N = row_bound(problem)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    made = [random_placement(problem, rng, density=d, evenness=e) for d in (0.1, 0.4, 1.0) for e in (0.1, 50.0)]
    solvers = (Search(effort=50), Greedy(), Quota(), LeastLoaded(min_pairs=0, threshold=1.0))
    if problem.G > 1 and problem.R:
        made += [with_quotas(problem, solver.solve(problem, problem.static())) for solver in solvers]
    for placement in (problem.static(), *made):
        assert (bound_N <= row_objective(problem, placement) * (1 + 1e-9)).all()
        assert (load_bound(problem) <= placement.load_NG().max(axis=1)).all()
