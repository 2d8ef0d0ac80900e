"""`BestPack`: the packing whose planned stage is predicted to be fastest."""

import dataclasses
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe import Cluster, Placement, Planner, Problem, Workload, price
from foremoe.base.errors import InputError
from foremoe.solvers import Anneal, AsGiven, BalancedTokens, BestPack, ExpertAware, Greedy, Permute
from foremoe.solvers.home.price import price_L
from foremoe.synthetic.tokens import synthetic_trace
from foremoe.testing import PackSolverTests
from foremoe.testing.level_tests import batches

WAYS = (Permute(passes=2), ExpertAware(sweeps=5, ranks_per_node=2), BalancedTokens(), AsGiven())


class TestBestPackLaws(PackSolverTests):
    solver = BestPack(packers=WAYS, ranks_per_node=2)


class TestBestPackWithHomesLaws(PackSolverTests):
    solver = BestPack(packers=WAYS[2:], ranks_per_node=2, home=Anneal(sweeps=5), redundant=2)


@given(batch=batches(max_sequences=12), redundant=st.integers(0, 2))
@examples(30)
def test_no_way_is_predicted_to_be_faster(batch, redundant):
    packer, trace = BestPack(packers=WAYS, ranks_per_node=2, redundant=redundant), batch.trace()
    tried = [batch.pack(way, trace) for way in packer.ways()]
    seconds = packer.seconds(trace, tried, num_ranks=batch.num_ranks)
    first = tried[seconds.index(min(seconds))]
    for mine, theirs in zip(batch.pack(packer, trace), first, strict=True):
        assert (mine == theirs).all()


def trace_of(num_layers):
    return synthetic_trace("qwen3-30b-a3b", num_sequences=40, mean_length=60.0, num_layers=num_layers, regime="skew", seed=2)


@pytest.mark.parametrize("home", [None, Anneal(sweeps=50, min_gain=0.0, state_bytes=0.0)], ids=["homes stay", "homes move"])
@pytest.mark.parametrize("redundant", [0, 1])
@pytest.mark.parametrize("first_layer", [0, 3])
def test_seconds_are_those_of_the_plan(home, redundant, first_layer):
    trace = dataclasses.replace(trace_of(3), moe_layer_L=np.arange(3) + first_layer, id="")  # a seed of the home level
    cluster = Cluster.preset("8xh100", num_ranks=4, ranks_per_node=2)
    packer = BestPack(home=home, redundant=redundant, ranks_per_node=2)
    packings = [way.solve(trace, num_ranks=4, tokens_per_rank=200) for way in (AsGiven(), BalancedTokens())]
    for packing, seconds in zip(packings, packer.seconds(trace, packings, num_ranks=4), strict=True):
        assign = tuple(np.repeat(array, trace.seq_len_Q) for array in packing)
        problem = Problem.of(Workload.from_trace(trace, num_ranks=4, assign=assign), cluster, redundant=redundant)
        moves_s = 0.0
        if home is not None:
            home_LE = home.solve(problem)
            moves_s = price_L(problem, home_LE, home.state_bytes).sum()
            assert redundant or (home_LE != problem.home_LE).any()
            problem = dataclasses.replace(problem, home_LE=home_LE)
        plan, _ = Planner(rank=packer.rank).plan(problem)
        placement = Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS)
        assert seconds == pytest.approx(float(price(problem, placement).total_s.sum()) + moves_s, rel=1e-12)


def test_a_sample_of_layers_stands_for_all():
    trace, packings = trace_of(6), [AsGiven().solve(trace_of(6), num_ranks=4, tokens_per_rank=200)]
    whole = BestPack().seconds(trace, packings, num_ranks=4)
    sampled = BestPack(layers=2).seconds(trace, packings, num_ranks=4)
    assert sampled != whole and sampled == pytest.approx(whole, rel=0.3)


def test_the_rank_solvers_decide_with():
    trace, packings = trace_of(2), [AsGiven().solve(trace_of(2), num_ranks=4, tokens_per_rank=200)]
    slow = BestPack(cluster="8xh20")  # copies pay for micro-steps as small as these
    greedy_s = dataclasses.replace(slow, rank=(Greedy(),)).seconds(trace, packings, num_ranks=4)
    assert greedy_s > slow.seconds(trace, packings, num_ranks=4)


def test_ways_unless_told():
    assert [type(way) for way in BestPack().ways()] == [ExpertAware, ExpertAware, BalancedTokens, AsGiven]
    alone = BestPack(redundant=0, ranks_per_node=4).ways()
    assert alone[0] == ExpertAware(skew_weight=1.0, redundant=0, ranks_per_node=4) and len(alone) == 3


def test_it_is_a_value_and_works_where_packers_go():
    packer = BestPack(packers=(AsGiven(), BalancedTokens()), home=Anneal(sweeps=10))
    assert foremoe.parse(repr(packer)) == packer
    work = Planner(pack=packer).workload(trace_of(2), num_ranks=4, tokens_per_rank=200)
    assert work.tokens_MG.sum() == trace_of(2).T and work.dealt.packer == repr(packer)


@dataclass(frozen=True)
class Meets(AsGiven):
    """Waits until as many packers are at work."""

    def solve(self, trace, **limits):
        MEETING.wait(timeout=600.0)
        return AsGiven.solve(self, trace, **limits)


MEETING = threading.Barrier(2)


def test_packers_run_side_by_side_and_the_result_is_the_same():
    sizes = {"num_ranks": 4, "tokens_per_rank": 200}
    planner = Planner(pack=BestPack(packers=WAYS, ranks_per_node=2))
    one, two = (planner.workload(trace_of(2), num_threads=num, **sizes) for num in (1, 2))
    assert (one.load_MLGE == two.load_MLGE).all() and (one.rank_Q == two.rank_Q).all()
    planner = Planner(pack=BestPack(packers=(Meets(), Meets())))
    planner.workload(trace_of(1), num_threads=2, **sizes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"packers": (Greedy(),)}, "packers"),
        ({"packers": AsGiven()}, "packers"),
        ({"rank": (AsGiven(),)}, "rank"),
        ({"home": AsGiven()}, "home"),
        ({"redundant": -1}, "redundant"),
        ({"layers": 0}, "layers"),
        ({"cluster": "nothing"}, "nothing"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        BestPack(**options)
