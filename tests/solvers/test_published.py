"""Published solvers and `Greedy`: each by its rule written plainly, and on cases worked by hand."""

import dataclasses

import numpy as np
import published_rules as rules
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import make_problem, problems, require_no_worse_than_static, require_valid, served

from bench.taot import Taot
from foremoe.base.errors import InputError
from foremoe.planner.comparison import compare
from foremoe.planner.strategies import STRATEGIES
from foremoe.simulate import System, simulate_systems
from foremoe.solvers import Echo, ExactSplit, Feplb, Greedy, LeastLoaded, Lplb, MoonEp, Quota
from foremoe.synthetic.counts import synthetic_workload

SOLVERS = {
    "Echo": st.just(Echo()),
    "Feplb": st.builds(Feplb, dyn=st.sampled_from((0, 1, 2, 4))),
    "Greedy": st.just(Greedy()),
    "LeastLoaded": st.builds(
        LeastLoaded,
        alpha=st.sampled_from((1.0, 1.1, 1.5)),
        min_pairs=st.sampled_from((0, 3, 40)),
        threshold=st.sampled_from((1.0, 1.3)),
    ),
    "Lplb": st.just(Lplb()),
    "MoonEp": st.just(MoonEp()),
    "Quota": st.builds(Quota, min_pairs=st.sampled_from((0, 1, 3, 40))),
    "Taot": st.just(Taot()),
}
RULES = {"Feplb": rules.feplb, "Greedy": rules.greedy, "LeastLoaded": rules.least_loaded, "Quota": rules.quota}


@pytest.mark.parametrize("name", SOLVERS)
@given(data=st.data())
def test_no_row_is_worse_than_homes_and_the_start_does_not_matter(name, data):
    problem, solver = data.draw(problems()), data.draw(SOLVERS[name])
    cold = solver.solve(problem, problem.static())
    require_valid(problem, cold)
    require_no_worse_than_static(problem, cold)
    assert cold.same_as(solver.solve(problem, Greedy().solve(problem, problem.static())))


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "Taot"])
@given(data=st.data(), seed=st.integers(0, 9))
def test_names_do_not_matter(name, data, seed):
    """New numbers for experts change nothing but the numbers; the order of slots decides between equal loads for most."""
    problem, solver = data.draw(problems(distinct=name not in ("Greedy", "Quota"))), data.draw(SOLVERS[name])
    name_E = np.random.default_rng(seed).permutation(problem.E)
    load_MLE, home_LE = np.empty_like(problem.load_MLE), np.empty_like(problem.home_LE)
    load_MLE[..., name_E], home_LE[:, name_E] = problem.load_MLE, problem.home_LE
    other = dataclasses.replace(problem, load_MLE=load_MLE, home_LE=home_LE)
    mine, theirs = solver.solve(problem, problem.static()), solver.solve(other, other.static())
    renamed_NGS = np.where(mine.expert_NGS < 0, -1, name_E[mine.expert_NGS])
    assert (renamed_NGS == theirs.expert_NGS).all() and (mine.quotas_NGS == theirs.quotas_NGS).all()


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
def test_equals_the_rule_written_plainly(name, data):
    problem, solver = data.draw(problems()), data.draw(SOLVERS[name])
    seen = dataclasses.replace(problem, replicas="node") if name == "Feplb" else problem
    placement = solver.solve(problem, problem.static())
    assert served(placement) == rules.rows(seen, lambda *row: RULES[name](*row, solver))


def require_best_split(problem, placement, expert_NGS):
    quota_NGS = ExactSplit().solve(problem, expert_NGS)
    expert_NGS[:, :, problem.B :][quota_NGS[:, :, problem.B :] == 0] = -1
    assert (placement.expert_NGS == expert_NGS).all() and (placement.quotas_NGS == quota_NGS).all()


@given(problem=problems(distinct=True))
def test_echo_is_the_best_split_over_the_packed_clones(problem):
    expert_NGS = problem.static().expert_NGS.copy()
    for expert_GS, clones in zip(expert_NGS, rules.rows(problem, rules.echo), strict=True):
        used_G = np.full(problem.G, problem.B)
        for g, e in clones:
            expert_GS[g, used_G[g]] = e
            used_G[g] += 1
    require_best_split(problem, Echo().solve(problem, problem.static()), expert_NGS)


@given(problem=problems())
def test_lplb_is_the_best_split_over_the_fixed_graph(problem):
    require_best_split(problem, Lplb().solve(problem, problem.static()), rules.lplb(problem))


@given(problem=problems())
def test_moon_ep_levels_every_node_with_a_second_set_of_slots(problem):
    node_G = problem.cluster.node_of_rank_G
    problem = make_problem(problem.load_MLE, node_G, problem.B, replicas=problem.replicas, home_LE=problem.home_LE)
    placement = MoonEp().solve(problem, problem.static())
    for at_home_G, load_G in zip(problem.static().load_NG(), placement.load_NG(), strict=True):
        for node in range(problem.cluster.num_nodes):
            before, after = at_home_G[node_G == node], load_G[node_G == node]
            assert after.sum() == before.sum() and after.max() - after.min() <= 1


@given(problem=problems())
def test_a_rank_of_moon_ep_receives_from_one_home_rank_of_its_node(problem):
    node_G = problem.cluster.node_of_rank_G
    for n, row in enumerate(served(MoonEp().solve(problem, problem.static()))):
        home_of = {int(e): g for g, base_B in enumerate(problem.base_NGB[n]) for e in base_B}
        for g in range(problem.G):
            sources = {home_of[e] for rank, e in row if rank == g} - {g}
            assert len(sources) <= 1 and all(node_G[home] == node_G[g] for home in sources)


def solved(solver, load_MLE, node_G, redundant, **options):
    problem = make_problem(load_MLE, node_G, redundant, **options)
    return solver.solve(problem, problem.static())


def loads_of(solver, load_E, num_ranks, redundant, node_G=None):
    """Rank loads of one row."""
    (load_G,) = solved(solver, [[load_E]], [0] * num_ranks if node_G is None else node_G, redundant).load_NG().tolist()
    return load_G


def test_a_giver_of_moon_ep_that_sinks_below_the_mean_is_filled_later():
    # Loads 13, 5 and 12 around the mean of 10: rank 0 gives 5 to rank 1 and gets 2 from rank 2.
    placement = solved(MoonEp(), [[[8, 5, 3, 2, 7, 5]]], [0, 0, 0], 2)
    row = {(0, 0): 3, (0, 1): 5, (1, 2): 3, (1, 3): 2, (1, 0): 5, (2, 4): 5, (2, 5): 5, (0, 4): 2}
    assert served(placement) == [row] and placement.load_NG().tolist() == [[10, 10, 10]]


def test_moon_ep_takes_as_many_slots_as_the_giver_has_experts():
    # Rank 1 lacks 9 pairs, of which no expert of rank 0 has more than 6.
    for redundant, expected in ((1, [12, 6]), (2, [9, 9]), (3, [9, 9])):
        assert loads_of(MoonEp(), [6, 6, 6, 0, 0, 0], 2, redundant) == expected


def test_least_loaded_as_published_on_cases_by_hand():
    """Worked from its code: capacity 1.1 x mean, chunks of 1024, off below a skew of 1.3."""
    (llep,) = STRATEGIES["llep"].rank
    assert llep == LeastLoaded(alpha=1.1, min_pairs=1024, threshold=1.3)
    for load_E, expected in (
        ([12_900, 7100], [12_900, 7100]),  # skew 1.29: off
        ([13_100, 6900], [11_000, 9000]),
        ([1400, 600], [1100, 900]),  # the last chunk may be below the least
        # Capacity 5500: 6400 leave rank 0 and rank 1 takes 5000. 900 would be less than a chunk, so rank 2 takes all 1400 that
        # are left; its own expert comes later, finds 4100 of room and spills 500.
        ([11_900, 500, *[4600] * 6], [5500, 5500, 5500, 5100, *[4600] * 4]),
    ):
        assert loads_of(llep, load_E, len(load_E), len(load_E)) == expected
    assert served(solved(llep, [[[11_900, 500, *[4600] * 6]]], [0] * 8, 8))[0][2, 0] == 1400
    # Without its hottest expert rank 0 is full, so all of that expert leaves; the next one keeps what fits.
    found = solved(llep, [[[7000, 6000, 6000, 1000, 0, 0]]], [0, 0], 2)
    assert found.load_NG().tolist() == [[11_000, 9000]]
    assert served(found)[0] == {(0, 1): 5000, (0, 2): 6000, (1, 3): 1000, (1, 0): 7000, (1, 1): 1000}


@given(problem=problems(), solver=SOLVERS["Quota"])
def test_replicas_of_quota_are_worth_the_floor(problem, solver):
    quota_NGR = solver.solve(problem, problem.static()).quotas_NGS[:, :, problem.B :]
    assert not ((quota_NGR > 0) & (quota_NGR < solver.min_pairs)).any()


def test_quota_spreads_one_hot_expert_over_all_ranks():
    for min_pairs, expected in ((Quota().min_pairs, [30, 30, 30]), (31, [28, 31, 31]), (46, [44, 46, 0])):
        assert loads_of(Quota(min_pairs=min_pairs), [90, 0, 0], 3, 1) == expected


def test_equal_rooms_go_to_the_lowest_rank_in_quota():
    # Rank 0 gives 26 to rank 2, whose room then equals rank 1's; the next piece goes to rank 1.
    load_E = [26] * 5 + [96, 0, 0, 0, 0] + [70, 0, 0, 0, 0] + [104, 0, 0, 0, 0]
    placement = solved(Quota(), [[load_E]], [0] * 4, 2)
    assert placement.load_NG().tolist() == [[100] * 4]
    assert placement.expert_NGS[0, :, 5:].tolist() == [[-1, -1], [1, -1], [0, 15], [-1, -1]]


def test_a_replica_of_greedy_that_gives_everything_away_leaves_its_slot():
    problem = make_problem([[[0, 774, 176, 374]]], [0] * 4, 1)
    placement = Greedy().solve(problem, problem.static())
    require_valid(problem, placement)
    assert served(placement) == rules.rows(problem, lambda *row: rules.greedy(*row, Greedy()))


@given(problem=problems(), solver=SOLVERS["Feplb"])
def test_experts_of_feplb_stay_whole_inside_their_node_and_few_move(problem, solver):
    node_G = problem.cluster.node_of_rank_G
    for n, row in enumerate(served(solver.solve(problem, problem.static()))):
        assert sorted(e for _, e in row) == np.flatnonzero(problem.load_NE[n]).tolist()  # each once: none is split
        home_of = {int(e): g for g, base_B in enumerate(problem.base_NGB[n]) for e in base_B}
        moved = [(g, home_of[e]) for g, e in row if g != home_of[e]]
        assert all(node_G[g] == node_G[home] for g, home in moved)
        for end in zip(*moved, strict=True):
            assert np.bincount(end).max() <= solver.dyn


def test_feplb_on_a_case_by_hand():
    # Node 0 has 15, 3 and 2: the 6 goes to rank 2, the 4 to rank 1, a 1 of rank 2 to rank 0. Node 1 is one rank.
    load_E, node_G = [6, 5, 4, 1, 1, 1, 1, 1, 0, 20, 20, 0], [0, 0, 0, 1]
    assert loads_of(Feplb(), load_E, 4, 4, node_G) == [6, 7, 7, 40]
    # One expert each, given and taken: rank 0 gives its 6 to rank 2 and is done.
    assert loads_of(Feplb(dyn=1), load_E, 4, 4, node_G) == [9, 3, 8, 40]
    # Rank 2 has room for both experts of 5 pairs, but receives one at most.
    assert loads_of(Feplb(dyn=1), [5, 10, 5, 10, 0, 0], 3, 2) == [10, 15, 5]


def large():
    work = synthetic_workload("gpt-oss-20b", num_ranks=32, tokens_per_rank=64, micro_steps=1, num_layers=1, regime="mid")
    problem = make_problem(work.load_MLE, np.repeat(np.arange(4), 8), 4)
    return dataclasses.replace(problem, load_MLGE=work.load_MLGE, tokens_MG=work.tokens_MG)


def test_feplb_refuses_more_ranks_than_published():
    problem = large()
    with pytest.raises(InputError, match="at most 16 ranks; got 32"):
        Feplb().solve(problem, problem.static())
    with pytest.raises(InputError, match="at most 16 ranks; got 32"):
        STRATEGIES["feplb"].plan(problem)
    half = make_problem(problem.load_MLE, np.repeat(np.arange(2), 8), 4)
    require_no_worse_than_static(half, Feplb().solve(half, half.static()))


def test_tables_leave_out_a_solver_that_refuses_and_say_why():
    problem = large()
    planners = {name: STRATEGIES[name] for name in ("static", "feplb", "quota")}
    systems = {name: System(planner=planner) for name, planner in planners.items()} | {"even": System(even=True)}
    for rows in (compare(problem, planners), simulate_systems([problem], systems)):
        left, other = rows[1], rows[2]
        assert left["n_solved"] == 0 and "at most 16 ranks; got 32" in left["note"]
        assert set(left) - {"note"} == set(other)
        assert {value for key, value in left.items() if key not in ("solver", "n_solved", "note")} == {None}
        assert other["n_solved"] == problem.N and other["predicted_speedup_vs_static"] > 0
    with pytest.raises(InputError, match=r"no system plans these EP groups; feplb: left out: .* at most 16 ranks"):
        simulate_systems([problem], {"feplb": systems["feplb"]})


def taot_moves(load_E, node_G, **options):
    """(rank, expert) -> pairs served away from home, of one row with one redundant slot per rank."""
    base = len(load_E) // len(node_G)
    (places,) = served(solved(Taot(), [[load_E]], node_G, 1, **options))
    return {(g, e): pairs for (g, e), pairs in places.items() if e // base != g}


def test_flows_of_taot_stay_in_the_node_where_they_can():
    """Worked by hand: ranks 0 and 2 are over an even share of 1000; their idle neighbours take what they give."""
    assert taot_moves([1600, 400, 1500, 500], [0, 0, 1, 1]) == {(1, 0): 600, (3, 2): 500}


def test_excess_that_the_node_cannot_take_crosses_in_taot():
    """Node 0 has 600 pairs more than its share: rank 1 is filled from inside, ranks 2 and 3 from outside."""
    load_E = [1800, 800, 700, 700]
    assert taot_moves(load_E, [0, 0, 1, 1]) == {(1, 0): 200, (2, 0): 300, (3, 0): 300}
    assert taot_moves(load_E, [0, 0, 1, 1], replicas="node") == {(1, 0): 200}


def test_a_flow_of_taot_is_served_by_the_smallest_expert_that_fills_it():
    assert taot_moves([900, 500, 300, 100, 100, 100], [0, 0]) == {(1, 0): 700}  # no other has 700
    assert taot_moves([500, 900, 600, 300, 300, 200], [0, 0]) == {(1, 2): 600}  # expert 2 moves whole
    assert taot_moves([500, 500, 500, 100, 100, 100], [0, 0]) == {(1, 0): 500}  # none has 600: the largest, the first of them
