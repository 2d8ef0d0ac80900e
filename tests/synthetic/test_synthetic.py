"""Generated load: seeded, skewed as the regimes say, and as skewed as recorded routing."""

import dataclasses
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem import load_bound
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.synthetic.counts import REGIMES, Regime, bent, capped, synthetic_workload
from foremoe.synthetic.tokens import synthetic_trace, systematic_topk
from foremoe.workload.skew import skew, skew_statistics
from foremoe.workload.workload import Workload

DATA = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "data"
SMALL = dataclasses.replace(Model.preset("mixtral-8x7b"), name="small", num_layers=4, num_experts=12, num_topk=3)

# Statistics of the recorded traces in file order, micro-steps of 4096 tokens; test_recorded_statistics recomputes them.
KEYS = ("skew_mean", "skew_p99", "step_correlation", "log_spread", "source_distance")
RECORDED = {
    ("gpt-oss-like", 8): (1.618, 2.447, 0.807, 1.147, 0.222),
    ("gpt-oss-like", 16): (2.311, 4.015, 0.807, 1.147, 0.251),
    ("esft-like", 8): (1.470, 2.239, 0.719, 0.510, 0.092),
    ("esft-like", 16): (1.898, 3.085, 0.719, 0.510, 0.104),
}
RELATIVE = {"skew_mean": 0.08, "skew_p99": 0.12, "log_spread": 0.10, "source_distance": 0.30}
LIKE = {
    "gpt-oss-like": {"model": "gpt-oss-20b", "num_sequences": 703, "mean_length": 306},
    "esft-like": {"model": "deepseek-v2-lite", "num_sequences": 213, "mean_length": 156},
}


def assert_like_recorded(found, recorded):
    for key, want in zip(KEYS, recorded, strict=True):
        tolerance = RELATIVE[key] * want if key in RELATIVE else 0.05
        assert abs(found[key] - want) <= tolerance, f"{key} is {found[key]:.3f}, recorded {want}"


def mean_of(statistics):
    return {key: float(np.mean([s[key] for s in statistics])) for key in KEYS}


# The counts of synthetic_workload


def counts(seed=0, **options):
    return synthetic_workload(SMALL, **{"num_ranks": 4, "tokens_per_rank": 50, "micro_steps": 3, "seed": seed, **options})


def test_counts_are_a_function_of_the_seed_and_complete():
    work = counts()
    assert work.same_as(counts()) and not work.same_as(counts(seed=1))
    assert (work.load_MLGE.sum(axis=3) == 150).all() and (work.tokens_MG == 50).all()
    assert (work.M, work.L, work.G, work.E) == (3, 4, 4, 12) and not work.unknown_ML.any()
    assert counts(stage="recompute").stage == "recompute" and work.trace_id != counts(seed=1).trace_id


def test_a_layer_does_not_depend_on_how_many_there_are():
    assert (counts(num_layers=2).load_MLGE == counts().load_MLGE[:, :2]).all()
    assert counts(num_layers=2).moe_layer_L.tolist() == [0, 1]
    whole, part = (synthetic_trace(SMALL, num_sequences=9, mean_length=8, num_layers=n, regime="mid") for n in (4, 2))
    assert (part.topk_TLK == whole.topk_TLK[:, :2]).all()


@pytest.mark.parametrize(
    ("model", "regime", "ranks", "skew", "tolerance"),
    [
        ("qwen3-30b-a3b", "mid", 8, 1.485, 0.08),
        ("qwen3-30b-a3b", "mid", 16, 1.882, 0.08),
        ("qwen3-30b-a3b", "mid", 32, 2.681, 0.08),
        ("qwen3-30b-a3b", "mid", 64, 4.210, 0.08),
        ("deepseek-v3", "mid", 32, 2.167, 0.08),
        ("deepseek-v3", "mid", 64, 3.294, 0.08),
        ("qwen3-30b-a3b", "mild", 32, 1.56, 0.08),
        ("qwen3-30b-a3b", "skew", 32, 3.99, 0.08),
        ("deepseek-v3", "mild", 64, 1.68, 0.08),
        ("deepseek-v3", "skew", 64, 5.30, 0.15),
    ],
)
def test_static_skew_of_the_named_regimes(model, regime, ranks, skew, tolerance):
    # 24 layers, 4 micro-steps and 8192 tokens per rank; one seed moves these figures by 2 to 6 %.
    options = {"num_ranks": ranks, "tokens_per_rank": 8192, "micro_steps": 4, "regime": regime, "num_layers": 24}
    found = [skew_statistics(synthetic_workload(model, seed=s, **options))["skew_mean"] for s in range(2)]
    assert abs(np.mean(found) / skew - 1) < tolerance


# Of recorded DeepSeek-R1 (three files of expert counts, 58 layers; pairs drawn by the recorded shares): mean skew with experts in
# order, hottest expert over the mean expert, and least possible load with one redundant slot over the mean load.
R1 = {8: (1.835, 6.40, 1.214), 16: (2.175, 6.40, 1.062), 32: (2.574, 6.39, 1.001)}


def skew_hottest_bound(work: Workload) -> np.ndarray:
    problem = Problem.of(work, Cluster.preset("8xh100", num_ranks=work.G), redundant=1)
    mean_N = problem.load_NE.sum(axis=1) / work.G
    hottest_N = problem.load_NE.max(axis=1) / problem.load_NE.mean(axis=1)
    return np.mean([skew(problem.static().load_NG()), hottest_N, load_bound(problem) / mean_N], axis=1)


@pytest.mark.parametrize("ranks", R1)
def test_the_r1_like_regime_has_the_skew_hottest_expert_and_bound_of_recorded_r1(ranks):
    options = {"num_ranks": ranks, "tokens_per_rank": 8192, "micro_steps": 1, "regime": "r1-like"}
    found = [skew_hottest_bound(synthetic_workload("deepseek-v3", seed=s, **options)) for s in range(3)]
    assert np.mean(found, axis=0) == pytest.approx(R1[ranks], rel=0.1)


@pytest.mark.parametrize("ranks", R1)
def test_recorded_r1_has_these_figures(ranks):
    if not (DATA / "deepseek_r1_counts.npz").exists():
        pytest.skip("recorded counts are not here")
    found = []
    for counts_LE in np.load(DATA / "deepseek_r1_counts.npz").values():
        share_LE, rng = counts_LE / counts_LE.sum(axis=1, keepdims=True), np.random.default_rng(0)
        load_LGE = np.stack([rng.multinomial(8 * 8192, share_E, size=ranks) for share_E in share_LE])
        found.append(skew_hottest_bound(Workload.from_counts(load_LGE[None].astype(np.int32), num_topk=8, model="deepseek-v3")))
    assert np.mean(found, axis=0) == pytest.approx(R1[ranks], rel=0.01)


@pytest.mark.parametrize(
    ("regime", "model", "ranks", "low", "high"),
    [("gpt-oss-math-like", "gpt-oss-20b", 8, 2.4, 2.8), ("qwen3-like", "qwen3-235b-a22b", 64, 2.23, 2.86)],
)
def test_regimes_of_a_published_skew(regime, model, ranks, low, high):
    options = {"num_ranks": ranks, "tokens_per_rank": 8192, "micro_steps": 2, "regime": regime, "num_layers": 24}
    found = [skew_statistics(synthetic_workload(model, seed=s, **options))["skew_mean"] for s in range(3)]
    assert low < np.mean(found) < high


def test_experts_of_a_group_share_their_heat():
    regime = dataclasses.replace(
        Regime.preset("mild"), sigma=0.0, walk_std=0.0, kappa=1e6, source_kappa=1e6, groups=4, group_std=1.0
    )
    regime = dataclasses.replace(regime, burst_chance=0.0, domain_std=0.0, sequence_std=0.0)
    heat_LGE = counts(regime=regime, tokens_per_rank=100_000).load_MLE[0].reshape(4, 4, 3)
    assert np.ptp(heat_LGE, axis=2).max() < 0.05 * heat_LGE.mean() < np.ptp(heat_LGE[:, :, 0], axis=1).min()
    work = Workload.from_trace(
        synthetic_trace(SMALL, num_sequences=40, mean_length=400, regime=regime), num_ranks=2, tokens_per_rank=4096
    )
    heat_LGE = work.load_MLE.sum(axis=0).reshape(4, 4, 3)
    assert np.ptp(heat_LGE, axis=2).max() < 0.1 * heat_LGE.mean() < np.ptp(heat_LGE[:, :, 0], axis=1).min()


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(1, 12), st.floats(0.01, 1.0), st.floats(0.1, 6.0))
def test_capped_probabilities(seed, E, cap, sigma):
    weight = np.exp(sigma * np.random.default_rng(seed).standard_normal((4, E)))
    weight[0] = 0.0
    p = capped(weight, cap)
    limit = max(cap, 1 / E)
    assert (p >= 0).all() and (p <= limit * (1 + 1e-12)).all() and np.allclose(p.sum(axis=1), 1)
    below = p[1] < limit * (1 - 1e-9)
    # The others keep their proportions.
    assert np.ptp(p[1][below] / weight[1][below]) < 1e-9 * (p[1] / weight[1]).max() if below.any() else True
    assert np.allclose(capped(p, 1.0), p)


def test_bent_deviates_keep_mean_and_spread():
    z = np.random.default_rng(0).standard_normal(200_000)
    for bend in (0.0, 0.25, 1.0):
        y = bent(z, bend)
        assert abs(y.mean()) < 0.02 and abs(y.std() - 1) < 0.02
    assert (bent(z, 0.0) == z).all() and np.quantile(bent(z, 0.25), 0.999) < 1.8 < np.quantile(z, 0.999)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be"),
        ({"tokens_per_rank": 0}, "tokens_per_rank must be"),
        ({"micro_steps": 0}, "micro_steps must be"),
        ({"micro_steps": 1.5}, "micro_steps must be"),
        ({"seed": -1}, "seed must be"),
        ({"num_layers": 5}, "small has 4 MoE layers; got num_layers=5"),
        ({"num_layers": 0}, "num_layers must be"),
        ({"regime": "wild"}, "no regime 'wild'; choose one of mild, mid, skew"),
        ({"regime": 3}, "no regime 3"),
        ({"stage": "rollout"}, "stage must be"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        counts(**options)


def test_bad_trace_options_are_refused():
    for options, message in (
        ({"num_sequences": 0}, "num_sequences must be"),
        ({"mean_length": 0}, "mean_length must"),
        ({"mean_length": float("nan")}, "mean_length must"),
        ({"domains": 0}, "domains must"),
        ({"model": "gpt-9"}, "no model preset"),
    ):
        with pytest.raises(InputError, match=message):
            synthetic_trace(**{"model": SMALL, **options})


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Regime)])
def test_regimes_refuse_bad_figures(field):
    for bad in (-1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(InputError, match=field):
            dataclasses.replace(REGIMES["mid"], **{field: bad})
    assert Regime.preset(" Mid ") == REGIMES["mid"]


def test_extreme_regimes_still_make_valid_routing():
    flat = Regime(sigma=0.0, kappa=1e9, walk_std=0.0, source_kappa=1e9, domain_std=0.0, sequence_std=0.0, length_std=0.0)
    wild = Regime(sigma=20.0, kappa=1e-6, walk_std=20.0, burst_chance=1.0, domain_std=20.0, sequence_std=20.0, source_kappa=1e-6)
    for regime in (flat, wild):
        assert (counts(regime=regime).load_MLGE.sum(axis=3) == 150).all()
        assert synthetic_trace(SMALL, num_sequences=5, mean_length=20, regime=regime).K == 3
    assert skew_statistics(counts(regime=flat, tokens_per_rank=20_000))["skew_mean"] < 1.02
    one = dataclasses.replace(SMALL, num_experts=3)
    assert synthetic_trace(one, num_sequences=2, mean_length=5, regime="mid").topk_TLK.max() == 2
    assert synthetic_workload(one, num_ranks=1, tokens_per_rank=9, micro_steps=1, regime="mid").load_MLE.sum() == 27 * 4


# The tokens of synthetic_trace


def test_traces_are_a_function_of_the_seed():
    make = lambda seed: synthetic_trace(SMALL, num_sequences=9, mean_length=8, seed=seed, regime="mid")  # noqa: E731
    assert make(0).same_as(make(0)) and make(0).id != make(1).id
    assert make(0).Q == 9 and make(0).model == "small" and make(0).known_T is None
    wide = dataclasses.replace(SMALL, num_experts=300, num_layers=1)
    assert synthetic_trace(wide, num_sequences=2, mean_length=5, regime="mid").topk_TLK.dtype == np.int16


def reference_topk(chance_E, order_E, u, K):
    """Lay the chances end to end and look which interval each of u, u+1, .. falls in."""
    picked, edge = [], 0.0
    for column, chance in enumerate(chance_E):
        picked += [int(order_E[column]) for k in range(K) if edge <= u + k < edge + chance]
        edge += chance
    return picked


@settings(deadline=None)
@given(st.integers(0, 9999), st.integers(1, 9))
def test_systematic_sampling_against_its_definition(seed, E):
    rng = np.random.default_rng(seed)
    K = int(rng.integers(1, E + 1))
    # Sixty-fourths add without rounding, so that both sides see the same edges.
    chance = np.full((2, E), K * 64 // E)
    for row in chance:
        while row.sum() < K * 64:
            row[rng.choice(np.flatnonzero(row < 64))] += 1
        for _ in range(20):
            a, b = rng.integers(E, size=2)
            move = min(row[a], 64 - row[b])
            if a != b and move:
                step = rng.integers(move + 1)
                row[a], row[b] = row[a] - step, row[b] + step
    order = rng.permuted(np.tile(np.arange(E), (2, 1)), axis=1)
    uniform = rng.integers(128, size=6) / 128
    topk = np.zeros((6, 2, K), np.uint8)
    systematic_topk(np.cumsum(chance / 64, axis=1), order, np.array([0, 4, 6]), uniform, 1, topk)
    for t in range(6):
        q = int(t >= 4)
        assert topk[t, 1].tolist() == reference_topk(chance[q] / 64, order[q], uniform[t], K)
    assert not topk[:, 0].any()


def test_every_expert_is_drawn_with_its_chance():
    rng = np.random.default_rng(0)
    K, T = 3, 60_000
    chance = K * capped(np.exp(rng.standard_normal((1, 12))), 0.95 / K)
    topk = np.zeros((T, 1, K), np.uint8)
    systematic_topk(np.cumsum(chance, axis=1), np.arange(12)[None], np.array([0, T]), rng.random(T), 0, topk)
    found = np.bincount(topk.reshape(-1), minlength=12) / T
    assert np.abs(found - chance[0]).max() < 5 * 0.5 / np.sqrt(T)


def test_the_readme_trace():
    trace = synthetic_trace("qwen3-30b-a3b", seed=0, regime="mid")
    work = Workload.from_trace(trace, num_ranks=16, tokens_per_rank=1024)
    assert (trace.L, trace.K, trace.num_experts, trace.Q) == (48, 8, 128, 192)
    assert 4 <= work.M <= 6 and work.dealt.over_budget == () and work.model == "qwen3-30b-a3b"


def test_tokens_and_counts_of_a_regime_agree():
    for regime in ("mild", "mid", "skew"):
        trace = synthetic_trace("qwen3-30b-a3b", regime=regime, num_layers=12)
        tokens = skew_statistics(Workload.from_trace(trace, num_ranks=16, tokens_per_rank=1024))["skew_mean"]
        work = synthetic_workload(
            "qwen3-30b-a3b", num_ranks=16, tokens_per_rank=1024, micro_steps=5, regime=regime, num_layers=12
        )
        assert abs(tokens / skew_statistics(work)["skew_mean"] - 1) < 0.12


def test_domains_make_load_move_and_one_domain_does_not():
    def correlation(domains):
        trace = synthetic_trace("qwen3-30b-a3b", num_layers=12, domains=domains, num_sequences=256, regime="mid")
        return skew_statistics(Workload.from_trace(trace, num_ranks=8, tokens_per_rank=1024))["step_correlation"]

    assert correlation(1) > 0.9 and correlation(1) > correlation(None) + 0.1


def test_domains_take_turns_with_lengths_of_their_own():
    regime = dataclasses.replace(REGIMES["esft-like"], length_std=0.0, domain_length_std=1.0, domain_run=3000.0)
    lengths = synthetic_trace(SMALL, num_sequences=200, mean_length=150, regime=regime, num_layers=1).seq_len_Q
    assert len(set(lengths.tolist())) == 4
    runs = np.split(lengths, np.flatnonzero(np.diff(lengths)) + 1)
    assert len({run[0] for run in runs[:4]}) == 4


@pytest.mark.parametrize("regime", LIKE)
def test_generated_routing_is_like_recorded_routing(regime):
    traces = [synthetic_trace(**LIKE[regime], regime=regime, seed=s) for s in range(10, 14)]
    for ranks in (8, 16):
        works = [Workload.from_trace(t, num_ranks=ranks, tokens_per_rank=4096 // ranks) for t in traces]
        assert_like_recorded(mean_of([skew_statistics(w) for w in works]), RECORDED[regime, ranks])


@pytest.mark.shared
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no recorded traces at {DATA}")
@pytest.mark.parametrize("regime", LIKE)
def test_recorded_statistics(regime):
    names = (
        ["gpt_oss_20b_decode"] if regime == "gpt-oss-like" else [f"esft_{n}" for n in ("intent", "law", "summary", "translation")]
    )
    parts = [RoutingTrace.load(DATA / f"{name}.npz", model=LIKE[regime]["model"]) for name in names]
    trace = RoutingTrace.concat(parts)
    assert LIKE[regime]["num_sequences"] == trace.Q and abs(trace.T / trace.Q - LIKE[regime]["mean_length"]) < 1
    for ranks in (8, 16):
        found = skew_statistics(Workload.from_trace(trace, num_ranks=ranks, tokens_per_rank=4096 // ranks))
        assert [round(found[key], 3) for key in KEYS] == list(RECORDED[regime, ranks])


# The statistics themselves


def test_statistics_by_hand():
    work = Workload.from_counts([[[[6, 0, 2, 0], [0, 2, 0, 6]]], [[[2, 2, 2, 2], [6, 0, 2, 0]]]], num_topk=1)
    found = skew_statistics(work)
    assert found["skew_mean"] == (1.0 + 10 / 8) / 2
    # Loads [6, 2, 2, 6] and [8, 2, 4, 2] around their mean 4.
    assert np.isclose(found["step_correlation"], np.dot([2, -2, -2, 2], [4, -2, 0, -2]) / (4 * np.sqrt(24)))
    assert np.isclose(found["log_spread"], np.log(np.array([14, 4, 6, 8]) + 0.5).std())
    assert np.isclose(found["source_distance"], np.mean([0.5, 0.5, 0.25, 0.25]))
    assert np.isnan(skew_statistics(work[:1])["step_correlation"])
    empty = skew_statistics(Workload.from_counts(np.zeros((2, 1, 2, 4)), num_topk=1))
    assert empty["skew_mean"] == 1.0 and np.isnan(empty["source_distance"])
    with pytest.raises(InputError, match="4 experts do not divide over 3 ranks"):
        skew_statistics(Workload.from_counts(np.ones((1, 1, 3, 4)), num_topk=1))
