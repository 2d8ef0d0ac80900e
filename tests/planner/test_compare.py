"""compare and ablate: the table's figures against slow counts of their own."""

from __future__ import annotations

import dataclasses
import time
from typing import ClassVar

import numpy as np
import pytest

import foremoe
from foremoe.base.errors import InputError
from foremoe.levels import PathSolver
from foremoe.plan.figures import FIGURES, traffic
from foremoe.plan.transfers import Link, TransferList
from foremoe.planner.ablation import ablate, left_out
from foremoe.planner.comparison import compare
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.pricing import row_objective
from foremoe.simulate import Judge
from foremoe.solvers import Anneal, Deadline, Even, Exact, ExactSplit, ExpertAware, Greedy, Quota, RankSolver, Search


@pytest.fixture(scope="module")
def problem() -> foremoe.Problem:
    rng = np.random.default_rng(0)
    load_MLGE = rng.poisson(rng.lognormal(2.0, 1.0, (3, 2, 1, 32)), (3, 2, 8, 32)).astype(np.int32)
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=4, moe_layer_L=[0, 1])
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=8, ranks_per_node=4)
    return foremoe.Problem.of(
        work, cluster, model=foremoe.Model.preset("gpt-oss-20b"), redundant=1, cost=foremoe.CostModel(objective="balance")
    )


@pytest.fixture(scope="module")
def rows(problem) -> dict[str, dict]:
    return {row["solver"]: row for row in compare(problem, STRATEGIES, exact_budget_s=6.0)}


def test_every_strategy_has_a_row_with_every_figure(problem, rows):
    assert list(rows) == list(STRATEGIES)
    for name, row in rows.items():
        assert set(FIGURES) <= set(row)
        if name != "exact":
            assert all(row[figure] is not None for figure in FIGURES), name
            assert row["n_solved"] == problem.N, "whether or not a line needs history"


def test_figures_equal_a_slow_count(problem, rows):
    plan, _ = STRATEGIES["greedy"].plan(problem)
    skews, replicas, moves, fanout = [], [], 0, 0
    for m in range(problem.M):
        for layer in range(problem.L):
            load_G = plan.quota_MLGS[m, layer].sum(axis=1)
            leaving = np.zeros(problem.G, int)
            for g in range(problem.G):
                for s in range(problem.B, problem.S):
                    if plan.quota_MLGS[m, layer, g, s] > 0:
                        moves += 1
                        leaving[problem.home_LE[layer, plan.expert_MLGS[m, layer, g, s]] // problem.B] += 1
            skews.append(load_G.max() / load_G.mean())
            replicas.append(leaving.sum())
            fanout = max(fanout, leaving.max())
    row = rows["greedy"]
    assert row["skew_mean"] == pytest.approx(np.mean(skews)) and row["skew_max"] == pytest.approx(np.max(skews))
    assert row["replicas_per_layer"] == pytest.approx(np.mean(replicas)) and row["max_fanout"] == fanout
    assert row["moves_per_layer"] == pytest.approx(moves / problem.N)
    weights = len(plan.transfers) * problem.model.expert_bytes / problem.N
    gradients = moves * problem.model.gradient_bytes / problem.N
    assert row["bytes_per_layer"] == pytest.approx(weights + gradients)
    assert row["bytes_per_layer"] == pytest.approx(sum(row["bytes_by_link"].values()))


@dataclasses.dataclass(frozen=True)
class ProvenSearch(RankSolver):
    """`Search`, which claims that all its rows are optimal."""

    exact: ClassVar[bool] = True

    def solve(self, problem: foremoe.Problem, start: Placement) -> Placement:
        placement = Search().solve(problem, start)
        return dataclasses.replace(
            placement, bound_N=row_objective(problem, placement), stop_N=np.full(problem.N, Stop.OPTIMAL, np.uint8)
        )


def test_exact_counts_copies_bytes_and_memory_as_the_other_lines(problem):
    timed = dataclasses.replace(problem, cost=foremoe.CostModel())
    ours, exact = compare(timed, {"ours": Planner(guard=False), "exact": Planner(rank=(ProvenSearch(),), guard=False)})
    assert exact["n_solved"] == problem.N
    for figure in set(FIGURES) - {"plan_us_per_layer"}:
        assert exact[figure] == pytest.approx(ours[figure]), figure


@dataclasses.dataclass(frozen=True)
class Never(RankSolver):
    """Proves nothing."""

    exact: ClassVar[bool] = True

    def solve(self, problem: foremoe.Problem, start: Placement) -> Placement:
        time.sleep(0.1)
        return dataclasses.replace(start, stop_N=np.full(problem.N, Stop.DONE, np.uint8))


def test_a_name_is_no_planner(problem):
    with pytest.raises(InputError, match=r"ours must be a Planner; got 'foremoe'; make it one with foremoe\.resolve"):
        compare(problem, {"ours": "foremoe"})


def test_levels_without_a_part_are_refused(problem):
    with pytest.raises(InputError, match="packed has a pack level, but the case is dealt already"):
        compare(problem, {"packed": Planner(pack=ExpertAware())})


def test_the_line_without_history_says_what_is_static(problem, rows):
    assert "micro-step 0 has no history and is static" in rows["eplb-history"]["note"]
    assert "static" not in rows["greedy"].get("note", "")


def test_exact_is_left_out_where_it_cannot_finish(problem):
    (row,) = compare(problem, {"exact": Planner(rank=(Never(),))}, exact_budget_s=0.05)
    assert row["n_solved"] == 0 and row["note"].startswith("left out: none of 1 sampled rows")


def test_exact_speaks_of_its_sample_and_shows_the_others_on_it(rows):
    row = rows["exact"]
    assert 0 < row["n_solved"] <= 6
    assert row["gap_mean"] <= rows["greedy"]["gap_mean"]
    for other in ("foremoe", "quota", "greedy"):
        assert row["skew_mean"] <= row["same_rows"][other] + 1e-12


def test_ours_is_never_behind(rows):
    for other in ("quota", "greedy", "least_loaded", "lplb", "eplb-history"):
        assert rows["foremoe"]["skew_mean"] <= rows[other]["skew_mean"]


def test_homes_that_never_move_cost_no_moves_after_the_first_micro_step(problem, rows):
    assert rows["static"]["moves_per_layer"] == 0
    plan, _ = STRATEGIES["eplb-step"].plan(problem)
    at_home = problem.static().expert_NGS.reshape(plan.expert_MLGS.shape)[0]
    placed = sum(len(set(map(int, a)) - set(map(int, b)) - {-1}) for la, lb in zip(plan.expert_MLGS[0], at_home, strict=True)
                 for a, b in zip(la, lb, strict=True))  # fmt: skip
    assert traffic(problem, plan)[0] == pytest.approx(placed / problem.N)
    assert rows["eplb-step"]["moves_per_layer"] == pytest.approx(placed / problem.N)


def test_history_given_counts_every_micro_step(problem):
    history_LE = problem.load_MLE.sum(axis=0)
    planners = {name: STRATEGIES[name] for name in ("static", "eplb-history")}
    assert all(row["n_solved"] == problem.N for row in compare(problem, planners, history_LE=history_LE))


def test_a_missing_dependency_is_a_row_with_the_cure(problem, monkeypatch):
    monkeypatch.setattr(Exact, "requires", ("no_such_module",))
    (row,) = compare(problem, {"exact": Planner(rank=(Exact(),))})
    assert row["n_solved"] == 0 and row["skew_mean"] is None
    assert "no_such_module" in row["note"] and "pip install" in row["note"]


def test_ablate_pairs_variants_over_slots_and_foresight(problem):
    rows = ablate(problem, Planner(rank=(Greedy(), Search())), redundant=(0, 1), foresight=("exact", "step"))
    assert len(rows) == 2 * 2 * 6
    key = lambda row: (row["levels"], row["redundant"], row["foresight"])  # noqa: E731
    by = {key(row): row for row in rows}
    assert by["all", 1, "exact"]["skew_mean"] <= by["without Search()", 1, "exact"]["skew_mean"]
    assert by["all", 0, "exact"]["replicas_per_layer"] == 0
    assert by["all", 0, "exact"]["plan"] == by["all", 0, "step"]["plan"] == by["without Greedy()", 0, "exact"]["plan"]
    assert by["all", 1, "exact"]["plan"] == by["without Deadline()", 1, "exact"]["plan"] != by["all", 0, "exact"]["plan"]


def test_ablate_leaves_out_every_level():
    planner = Planner(pack=ExpertAware(), home=Anneal(), rank=(Quota(), Search()), split=ExactSplit(), path=Deadline())
    assert list(left_out(planner)) == [
        "all", "without ExpertAware()", "without Anneal()", "without Quota()", "without Search()", "without ExactSplit()",
        "without Deadline()", "without the guard",
    ]  # fmt: skip
    assert left_out(planner)["without Quota()"].rank == (Search(),)
    assert left_out(Planner())["without split"].split == Even()
    # Where homes move, no copies travel.
    assert list(left_out(STRATEGIES["eplb-exact"])) == ["all", "without Eplb()", "without split"]


@dataclasses.dataclass(frozen=True)
class ByHost(PathSolver):
    def solve(self, problem: foremoe.Problem, transfers: TransferList) -> TransferList:
        num = len(transfers)
        return transfers.replace(link_C=np.full(num, Link.HOST), src_C=np.full(num, -1))


def test_ablate_shows_what_the_path_level_is_worth(problem):
    """From host stores copies take other ways; without the level they come from home, and replicas are the same."""
    problem = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, host_bytes_per_s=1e10))
    by = {row["levels"]: row for row in ablate(problem, Planner(path=ByHost()), redundant=(2,), foresight=("exact",))}
    assert by["without ByHost()"]["replicas_per_layer"] == by["all"]["replicas_per_layer"] > 0
    home = {row["levels"]: row for row in ablate(problem, Planner(), redundant=(2,), foresight=("exact",))}
    assert by["without ByHost()"]["plan"] == home["all"]["plan"] != by["all"]["plan"]


def test_ablate_leaves_out_the_pack_level():
    """On the batch as it came; its gain is over static placement as packed, so that seconds compare."""
    trace = foremoe.synthetic_trace("gpt-oss-20b", num_sequences=64, mean_length=60.0, num_layers=2, seed=3, regime="mid")
    planner = Planner(pack=ExpertAware())
    pose = lambda packer: foremoe.Problem.of(  # noqa: E731
        foremoe.Workload.from_trace(trace, num_ranks=4, tokens_per_rank=256, packer=packer), foremoe.Cluster.preset("8xh100", 4)
    )
    packed, given = pose(planner.pack), pose(Planner().pack)
    assert "without ExpertAware()" not in {row["levels"] for row in ablate(packed, planner, redundant=(1,), foresight=("exact",))}
    rows = ablate(packed, planner, redundant=(1,), foresight=("exact",), unpacked=given)
    by = {row["levels"]: row for row in rows}
    assert list(by)[:2] == ["all", "without ExpertAware()"]
    one, full = by["without ExpertAware()"], by["all"]
    (alone,) = compare(given, {"alone": Planner()})
    assert one["predicted_stage_s"] == alone["predicted_stage_s"] and one["plan"] != full["plan"]
    judged = ablate(packed, planner, redundant=(1,), foresight=("exact",), unpacked=given, judge=Judge.of(packed))
    products = [row["speedup_vs_static"] * row["simulated_stage_s"] for row in judged]
    assert products == pytest.approx([products[0]] * len(products))
