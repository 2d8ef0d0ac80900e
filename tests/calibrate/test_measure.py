"""Measuring: a small real run on two ranks, its routing, and the demo's stages with routing of a chosen skew."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from examples.grpo.given import given_samples
from examples.grpo.grpo import Batch, log_probs
from examples.grpo.planning import cluster_of, plan_stages, static_skew, trace_of
from examples.grpo.policy import Policy
from examples.grpo.settings import SIZES, Settings
from foremoe.base.errors import InputError
from foremoe.calibrate import Case, Point
from foremoe.calibrate.copies import next_rank
from foremoe.calibrate.routing import Routing
from foremoe.cli.main import main
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.testing.ranks import get_pool

THIRD_PARTY = Path(__file__).parents[1] / "testing" / "third_party"
FILES = "file_backend:FileBackend"
SIZE_OPTIONS = ["--hidden", "128", "--ffn", "256", "--experts", "4", "--topk", "2"]


@given(
    tokens=st.integers(8, 200),
    ranks=st.sampled_from([2, 4]),
    topk=st.integers(1, 4),
    heavy=st.booleans(),
    seed=st.integers(0, 99),
)
@examples(30)
def test_drawn_routing_has_distinct_experts_and_adds_up(tokens, ranks, topk, heavy, seed):
    routing = Routing.draw(tokens, ranks, 8, topk, heavy=heavy, seed=seed)
    assert all(len(set(experts)) == topk for experts in routing.topk_GTK.reshape(-1, topk).tolist())
    assert routing.load_GE.sum() == routing.sent_GG.sum() == ranks * tokens * topk
    assert [sum(routing.busy(g)) for g in range(ranks)] == routing.sent_GG.sum(axis=0).tolist()
    assert routing.largest == routing.sent_GG.sum(axis=0).max()
    assert routing.off_rank((0,) * ranks, across=True) == 0
    assert routing.off_rank(tuple(range(ranks)), across=True) == routing.off_rank((0,) * ranks, across=False)


def test_heavy_routing_loads_the_first_rank():
    even, heavy = (Routing.draw(500, 2, 8, 2, heavy=heavy, seed=0) for heavy in (False, True))
    assert heavy.sent_GG[:, 0].sum() > 1.2 * even.sent_GG[:, 0].sum() and heavy.largest == heavy.sent_GG[:, 0].sum()


TINY = Model.from_dict(
    Model.preset("mixtral-8x7b").to_dict()
    | {"num_experts": 4, "hidden_size": 32, "ffn_size": 16, "attention_params": 4096, "num_heads": 2, "qk_head_dim": 16}
    | {"v_head_dim": 16}
)  # fmt: skip


def measured_on(group, case, node_of_rank):
    """Also with a backend of another package, and with one that does not open on the last rank."""
    from foremoe.calibrate import measure as measuring
    from foremoe.transfer import backends

    # A busy machine is no reason to stop here.
    said, others = [], {"files": FILES, "half_there": "half_there:HalfThere"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(THIRD_PARTY))
        from file_backend import FileBackend

        class HalfThere(FileBackend):
            def open(self, rank, group, buffers):
                if rank == group.size - 1:
                    raise OSError("no folder on this rank.")

            def publish(self, entries, version):
                pass

        patch.setitem(sys.modules, "half_there", types.SimpleNamespace(HalfThere=HalfThere))
        patch.setattr(measuring, "require_time", lambda *_: None)
        patch.setattr(backends, "BACKENDS", backends.BACKENDS | others)
        measured = measuring.measure(group, case, torch.device("cpu"), lambda *what: said.append(what), node_of_rank=node_of_rank)
    return measured, said


def by_backend(measured):
    """The kinds of copies that each backend was measured on."""
    return {p.backend: {q.kind for q in measured.points if q.backend == p.backend} for p in measured.points if p.backend}


@pytest.mark.heavy
def test_ranks_of_two_nodes_measure_the_links_between_them_over_every_backend():
    case = Case(model=TINY, num_ranks=2, tokens=32, sequence_length=8, seconds=0.3)
    (measured, said), (again, _) = get_pool(2).run(measured_on, case, [0, 1])
    # Every rank knows the slowest rank's seconds, so all can fit alike.
    assert measured.points == again.points and measured.node_of_rank == (0, 1)
    kinds = {p.kind for p in measured.points}
    assert {"exchange across nodes", "copy across nodes", "beside copy across nodes"} <= kinds and "exchange" not in kinds
    assert all(isinstance(p, Point) and (p.seconds >= 0 or p.kind.startswith("beside")) for p in measured.points)
    from_host = {"copy from host", "beside copy from host"}
    across = {"copy across nodes", "beside copy across nodes"}
    assert by_backend(measured) == {"collective": across, "pinned_host": from_host, "files": from_host}
    assert measured.unavailable["half_there"] == "no folder on this rank"
    assert "threads" in measured.unavailable["local"] and set(measured.unavailable) >= {"cupy_peer", "local", "half_there"}
    assert said[0][1:] == (0, 100) and said[-1][1:] == (100, 100)
    assert [what[1] for what in said] == sorted(what[1] for what in said)


def test_one_rank_measures_all_but_links():
    case = Case(model=TINY, num_ranks=1, tokens=32, sequence_length=8, seconds=0.3)
    ((measured, _),) = get_pool(1).run(measured_on, case, None)
    assert {p.kind for p in measured.points if not p.backend} == {"experts", "layer", "planned"}
    assert set(by_backend(measured)) == {"pinned_host", "files"}
    assert "a single rank has none" in measured.unavailable["collective"]
    assert not any(p.exchanges or p.exchange_bytes for p in measured.points)


@pytest.mark.parametrize(
    ("nodes", "inside", "across"),
    [
        ((0,), (0,), (0,)),
        ((0, 0, 1), (1, 0, 2), (2, 1, 0)),
        ((0, 0, 1, 1), (1, 0, 3, 2), (2, 3, 0, 1)),
        ((0, 1, 0, 1, 2), (2, 3, 0, 1, 4), (1, 4, 3, 2, 0)),
    ],
)
def test_copies_stay_inside_nodes_or_leave_them(nodes, inside, across):
    assert (next_rank(nodes, False), next_rank(nodes, True)) == (inside, across)


@pytest.mark.heavy
def test_a_calibrated_file_serves_the_other_commands(tmp_path):
    file = tmp_path / "here.toml"
    command = [sys.executable, "-m", "foremoe", "calibrate", *SIZE_OPTIONS, "--dtype", "float32", "--tokens", "256"]
    # What a scheduler leaves behind in part joins nobody: ranks of this machine are started.
    left = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in left} | {"WORLD_SIZE": "2", "RANK": "0"}
    run = subprocess.run(
        [*command, "--seconds", "0.5", "-o", str(file)], capture_output=True, text=True, timeout=1200, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr and "measuring: experts\n" in run.stderr
    cluster = Cluster.from_toml(file)
    assert cluster.num_ranks == 2 and "foremoe calibrate" in cluster.source and cluster.residual > 0
    assert cluster.calibrated == ("not calibrated" not in cluster.source)
    assert f"constants: {cluster.standing}" in run.stdout
    assert "local not measured: local links ranks that are threads" in run.stdout
    for name in ("compute_efficiency", "backward_ratio", "peer_bytes_per_s", "copy_contention"):
        assert name in run.stdout
    found = json.loads(file.with_suffix(".fit.json").read_text())
    by_name = {c["name"]: c["value"] for c in found["constants"]}
    assert by_name["peer_latency_s"] == cluster.peer_latency_s and len(found["points"]) > 30
    words = ["plan", "--synthetic", "mixtral-8x7b", "--layers", "0:1", "--micro-steps", "1", "--tokens-per-rank", "16"]
    result = CliRunner().invoke(
        main, [*words, "--ranks", "2", "--cluster", str(file), "--accept-fit", "-o", str(tmp_path / "plan.safetensors")]
    )
    assert result.exit_code == 0, result.stderr
    assert f"with even routing; {cluster.standing})" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ([], "'-o'"),
        (["-o", "x.toml"], "give --model, or --hidden"),
        (["-o", "x.toml", "--hidden", "64", "--ffn", "64"], "--experts, --topk are missing"),
        (["-o", "x.toml", "--model", "mixtral-8x7b", "--hidden", "64"], "already gives the sizes"),
        (["-o", "x.toml", "--model", "nope"], "there is no model preset"),
        (["-o", "x.toml", *SIZE_OPTIONS, "--ranks", "0"], "not in the range 1<=x<=1024"),
        (["-o", "x.toml", *SIZE_OPTIONS, "--cluster", "nope"], "there is no cluster preset"),
        (["-o", "x.toml", *SIZE_OPTIONS, "--ranks", "3"], "4 experts do not divide over 3 ranks"),
        (["-o", "x.toml", *SIZE_OPTIONS, "--tokens", "4"], "--tokens"),
        (["-o", "x.toml", *SIZE_OPTIONS, "--seconds", "nan"], "--seconds"),
        (["-o", "x.toml", "--hidden", "64", "--ffn", "64", "--experts", "4", "--topk", "8"], "num_topk 8 exceeds"),
        (["-o", "nowhere/x.toml", *SIZE_OPTIONS], "no directory"),
        (["-o", "x.json", *SIZE_OPTIONS], "must end in .toml"),
    ],
)
def test_bad_options_end_in_one_sentence(options, part):
    result = CliRunner().invoke(main, ["calibrate", *options])
    assert result.exit_code == 2 and result.stdout == ""
    assert part in result.stderr and result.stderr.count("\n") == 1


def test_without_torch_calibrate_says_how_to_get_it(tmp_path):
    words = ["calibrate", *SIZE_OPTIONS, "-o", str(tmp_path / "x.toml")]
    code = f"import sys; sys.modules['torch'] = None; from foremoe.cli.main import main; main({words})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == "error: calibrate needs torch; pip install 'foremoe[torch]'.\n"


SMALL = Settings(
    num_layers=2, num_experts=8, num_topk=2, hidden_size=32, ffn_size=32, num_heads=2, num_prompts=12, group_size=8,
    recompute_tokens=400, update_tokens=400,
)  # fmt: skip


@pytest.mark.parametrize("skew", [1.15, 1.3, 1.5])
def test_given_routing_has_the_skew_that_was_asked_for(skew):
    samples = given_samples(SMALL, skew, 2)
    plans = plan_stages(trace_of(samples, SMALL), SMALL, cluster_of(2), 2, 1)
    assert set(plans) == {"recompute", "update"}
    for planned in plans.values():
        assert float(static_skew(planned.workload).mean()) == pytest.approx(skew, abs=0.02)
        assert float(planned.plan.skew_ML.mean()) <= skew + 1e-9
        assert not planned.plan.violations(planned.problem)
    again = given_samples(SMALL, skew, 2)
    assert np.array_equal(samples.topk_QNLK, again.topk_QNLK)
    distinct = np.sort(samples.topk_QNLK, axis=3)
    assert (np.diff(distinct.astype(int), axis=3) > 0).all()


def test_a_skew_out_of_reach_is_refused():
    with pytest.raises(InputError, match="out of reach"):
        given_samples(SMALL, 3.0, 2)


def test_a_policy_without_experts_is_what_lies_outside_the_layers():
    samples = given_samples(SMALL, 1.4, 2)
    policy = Policy(Settings(**{name: getattr(SMALL, name) for name in SMALL.__slots__} | {"num_layers": 0}))
    batch = Batch.of(samples, np.arange(4))
    log_prob_A = log_probs(policy, batch, lambda *_: pytest.fail("no experts"), batch.topk_TLK)
    assert log_prob_A.shape == batch.place_A.shape and bool((log_prob_A <= 0).all())
    assert SIZES["tiny"].num_layers > 0
