"""``foremoe import``, and other commands on the same files: from what an engine or a recorder wrote to a gain."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from cli_runs import EXPERTS, LAYERS, TOPK, bad, good, random_ids, write_trace

from foremoe.machine.model import Model
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.workload import Workload

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
ANSWERS = json.loads((Path(__file__).parents[1] / "routing" / "engine_answers.json").read_text())


@pytest.fixture
def answers(tmp_path: Path) -> str:
    """Lines that vLLM's own protocol classes wrote, each of a sequence of 9 tokens."""
    found = [c["answer"] for c in ANSWERS if c["engine"] == "vllm" and c["what"].endswith("Response with token ids")]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, found * 24)))
    return str(path)


@pytest.fixture
def two_layers(model: str, tmp_path: Path) -> str:
    """The model of those lines."""
    path = tmp_path / "own.toml"
    dataclasses.replace(Model.from_toml(model), name="own", num_layers=2).to_toml(path)
    return str(path)


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """Counts as SGLang's recorder has them, dense layer and empty steps included."""
    counts = np.zeros((9, LAYERS + 1, EXPERTS), int)
    for step in range(6):
        counts[step, 1:] = [np.bincount(layer.ravel(), minlength=EXPERTS) for layer in random_ids(step, 100).swapaxes(0, 1)]
    path = tmp_path / "logical_count.json"
    path.write_text(json.dumps({"logical_count": counts.tolist()}))
    return str(path)


def test_from_lines_of_answers_to_a_gain_in_two_commands(answers: str, two_layers: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "rollout.npz")
    shown = good(["import", answers, "--model", two_layers, "-o", trace]).stdout
    assert "648 tokens (72 with unknown routing) in 72 sequences, 2 layers, top-2 of 8 experts" in shown
    dealing = ["--model", two_layers, "--ranks", "4", "--tokens-per-rank", "81"]
    assert "simulated stage" in good(["plan", trace, *dealing]).stdout
    # The lines themselves give the same plan.
    good(["plan", answers, *dealing, "-o", str(tmp_path / "plan.safetensors")])
    assert "valid" in good(["check", str(tmp_path / "plan.safetensors"), "--trace", trace]).stdout


def test_every_command_takes_counts_as_a_recorder_wrote_them(recorded: str, model: str, tmp_path: Path) -> None:
    dealing = ["--model", model, "--ranks", "4", "--tokens-per-rank", "50", "--redundant", "1"]
    plan, work = str(tmp_path / "plan.safetensors"), str(tmp_path / "work.safetensors")
    made = good(["plan", recorded, *dealing, "-o", plan])
    assert "the counts do not name source ranks" in made.stderr and "3 micro-steps x 3 layers" in made.stdout
    assert "valid" in good(["check", plan, "--trace", recorded]).stdout
    spread = ["--ranks", "4", "--tokens-per-rank", "50"]
    good(["import", recorded, "--model", model, *spread, "-o", work])
    assert "valid" in good(["check", plan, "--workload", work]).stdout
    imported = Workload.load(work)
    assert imported.model == "tiny" and imported.moe_layer_L.tolist() == [1, 2, 3] and imported.num_topk == TOPK
    shown = [good(["inspect", *words]).stdout.partition(": ")[2] for words in ([recorded, "--model", model, *spread], [work])]
    assert shown[0] == shown[1] and "spread evenly over ranks" in shown[0]
    page = str(tmp_path / "report.html")
    good(["report", recorded, *dealing, "--plan", plan, "-o", page])
    rows = good(["compare", recorded, *dealing, "--planners", "static,greedy", "--history", recorded]).stdout
    assert "greedy" in rows and Path(page).stat().st_size


def test_import_marks_what_other_commands_refuse(tmp_path: Path, model: str) -> None:
    ids = random_ids(0, 256)
    ids[5, 1, 1] = ids[5, 1, 0]
    path, out = write_trace(tmp_path / "twice.npz", topk_ids=ids, seq_len=np.array([256])), str(tmp_path / "out.npz")
    assert "twice" in bad(["inspect", path]) and "`foremoe import` marks such tokens unknown" in bad(["inspect", path])
    assert "256 tokens (1 with unknown routing)" in good(["import", path, "-o", out]).stdout
    assert RoutingTrace.load(out).known_T.sum() == 255


def test_cures_are_those_of_the_command(answers: str, recorded: str, model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.npz")
    assert "give --model NAME or config.json" in bad(["import", answers, "-o", out])
    assert "give --model NAME or config.json" in bad(["plan", recorded, "--ranks", "4"])
    assert "written as .safetensors" in bad(["import", recorded, "--model", model, "-o", out])
    assert "overwrite" in bad(["import", answers, "--model", model, "-o", answers])
    assert "there is no file" in bad(["import", "none.jsonl", "--model", model, "-o", out])
    untold = next(c["answer"] for c in ANSWERS if c["what"] == "ChatCompletionResponse of two choices without ids")
    (tmp_path / "untold.jsonl").write_text(json.dumps(untold))
    said = bad(["import", str(tmp_path / "untold.jsonl"), "--model", "mixtral-8x7b", "-o", out])
    assert 'request "return_token_ids": true' in said
    assert not Path(out).exists()


@pytest.mark.shared
def test_recorded_routing_of_real_models_is_imported_as_it_lies(tmp_path: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data")
    good(["import", str(SHARED / "esft_law.npz"), "-o", str(tmp_path / "law.npz")])
    assert RoutingTrace.load(tmp_path / "law.npz").topk_TLK.shape == (8327, 26, 6)
    counts = [str(SHARED / "deepseek_r1_counts.npz"), "--model", "deepseek-v3"]
    good(["import", *counts, "-o", str(tmp_path / "r1.safetensors")])
    work = Workload.load(tmp_path / "r1.safetensors")
    assert (work.M, work.L, work.G, work.E) == (3, 58, 16, 256)


def test_a_model_that_is_guessed_is_said(tmp_path: Path) -> None:
    """Another model of the same shape may take twice the time."""
    ids = np.argsort(np.random.default_rng(0).random((64, 32, EXPERTS)), axis=2)[..., :2]
    path = write_trace(tmp_path / "same.npz", topk_ids=ids, seq_len=np.array([64]))
    dealing = ["--ranks", "4", "--tokens-per-rank", "16", "--layers", "0:1", "--redundant", "0"]
    said = "does not name its model and has the shape of mixtral-8x7b; give --model if it is another one"
    assert said in good(["plan", path, *dealing]).stderr
    assert "has the shape of" not in good(["plan", path, *dealing, "--model", "mixtral-8x7b"]).stderr
    named = str(tmp_path / "named.npz")
    RoutingTrace.load(path, model="mixtral-8x7b").save(named)
    dataclasses.replace(Model.preset("mixtral-8x7b"), name="wide", ffn_size=28672).to_toml(tmp_path / "wide.toml")
    said = "the routing was recorded with mixtral-8x7b, whose experts have 352.3 MB each; experts of wide have 704.6 MB"
    assert said in good(["plan", named, *dealing, "--model", str(tmp_path / "wide.toml")]).stderr
    assert "mixtral" not in good(["plan", named, *dealing]).stderr


def test_a_trace_of_foremoe_is_imported_as_it_is(tmp_path: Path) -> None:
    """What the header and the other arrays say is kept: which tokens are known, layers, model."""
    for suffix in (".npz", ".safetensors"):
        kept = RoutingTrace(
            topk_TLK=random_ids(0, 12), num_experts=EXPERTS, seq_len_Q=[7, 5], known_T=np.arange(12) % 3 > 0, model="own",
            moe_layer_L=[2, 5, 7], id="mine",
        )  # fmt: skip
        kept.save(tmp_path / f"kept{suffix}")
        good(["import", str(tmp_path / f"kept{suffix}"), "-o", str(tmp_path / f"out{suffix}")])
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"kept{suffix}").read_bytes()
