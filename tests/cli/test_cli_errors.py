"""Bad input: every fault ends as one sentence on stderr with exit code 2."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import bad, good, random_ids, write_trace

OPTIONS = {
    "ranks zero": (["--ranks", "0"], "--ranks"),
    "ranks no number": (["--ranks", "four"], "--ranks"),
    "more ranks than experts": (["--ranks", "16"], "8 experts do not divide over 16 ranks"),
    "ranks per node": (["--ranks-per-node", "0"], "--ranks-per-node"),
    "redundant": (["--redundant", "-1"], "--redundant"),
    "tokens per rank": (["--tokens-per-rank", "0"], "--tokens-per-rank"),
    "micro-steps": (["--micro-steps", "0"], "--micro-steps"),
    "seed": (["--seed", "-1"], "--seed"),
    "layers": (["--layers", "0:9"], "--layers"),
    "synthetic as well": (["--synthetic", "mixtral-8x7b"], "exclude each other"),
    "regime without synthetic": (["--regime", "mid"], "--regime"),
    "unknown solver": (["--planners", "nope"], "there is no strategy 'nope'"),
    "solver bracket": (["--planners", "Quota(min_pairs=1"], "bracket"),
    "solver gap": (["--planners", "static,,quota"], "empty item"),
    "unknown model": (["--model", "nope"], "there is no model preset 'nope'"),
    "model file": (["--model", "nope.toml"], "there is no file 'nope.toml'"),
    "other model": (["--model", "gpt-oss-20b"], "experts"),
    "unknown cluster": (["--cluster", "nope"], "there is no cluster preset 'nope'"),
    "cluster file": (["--cluster", "./nope.toml"], "nope.toml"),
    "missing history": (["--history", "nope.npz"], "there is no file 'nope.npz'"),
    "schedule against stage": (["--schedule", "forward"], "backward"),
    "stage against schedule": (["--stage", "recompute", "--schedule", "accumulate"], "backward"),
    "slot_depth": (["--slot-depth", "0"], "--slot-depth"),
    "slot depth": (["--slots", "shared:0"], "depth"),
    "replicas": (["--replicas", "some"], "--replicas"),
    "exact seconds": (["--exact-seconds", "nan"], "--exact-seconds"),
    "json directory": (["--json=nowhere/rows.json"], "there is no directory 'nowhere'"),
    "json is a directory": (["--json=."], "is a directory"),
    "json name": (["--json="], "empty"),
}


def test_an_option_of_other_commands() -> None:
    assert "`foremoe compare` has no option --vpp; report, simulate have it." in bad(["compare", "--vpp", "2"])
    assert "`foremoe plan` has no option --exact-seconds; ablate, compare have it." in bad(["plan", "--exact-seconds", "2"])
    # Click says these, with quotes or without them from version to version.
    assert re.search("No such option:? '?--rank", bad(["plan", "--rank", "2"]))
    assert "--planners" in bad(["compare", "--planner", "static"])


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be(name: str, trace: str, dealing: list[str]) -> None:
    words, said = OPTIONS[name]
    # The case itself is good, so that only the option can be at fault.
    given = [word for i, word in enumerate(dealing) if not {word, dealing[i - i % 2]} & set(words)]
    assert said in bad(["compare", trace, *given, *words])


def test_there_must_be_one_source(model: str) -> None:
    assert "nothing to plan" in bad(["compare"])
    assert "nothing to plan" in bad(["plan", "-o", "p.safetensors"])
    assert "--model" in bad(["compare", "--synthetic", model, "--model", model])
    assert "--shuffle" in bad(["compare", "--synthetic", model, "--shuffle"])
    assert "there is no model preset" in bad(["compare", "--synthetic", "nope"])


def test_sizes_beyond_the_machine_are_refused_before_they_are_made() -> None:
    words = ["--ranks", "256", "--micro-steps", "2000000000"]
    assert "GB" in bad(["compare", "--synthetic", "deepseek-v3", *words])


def test_no_output_replaces_an_input(trace: str, dealing: list[str], tmp_path: Path) -> None:
    before = Path(trace).read_bytes()
    assert "overwrite" in bad(["compare", trace, *dealing, f"--json={trace}"])
    assert "overwrite" in bad(["plan", trace, *dealing, "-o", trace])
    target = str(tmp_path / "a.safetensors")
    assert "overwrite" in bad(["plan", trace, *dealing, "-o", target, "--save-workload", target])
    assert Path(trace).read_bytes() == before and not Path(target).exists()


@pytest.mark.parametrize(
    ("words", "endings"),
    [
        (["report", "-o", "r.pdf"], ".html or .htm"),
        (["plan", "-o", "p.npz"], ".safetensors"),
        (["plan", "--save-workload", "w.npz"], ".safetensors"),
        (["simulate", "--trace", "t.html"], ".json or .gz"),
    ],
)
def test_no_output_is_named_like_a_file_of_another_kind(
    words: list[str], endings: str, trace: str, dealing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{words[-1]!r} must end in {endings}; give another name." in bad([words[0], trace, *dealing, *words[1:]])


def test_a_missing_output_directory_is_found_before_planning(trace: str, dealing: list[str]) -> None:
    said = bad(["plan", trace, *dealing, "-o", "nowhere/p.safetensors", "--planner", "no_such_module:x"])
    assert "there is no directory 'nowhere'" in said


def test_some_layers_of_a_known_model_name_it(tmp_path: Path) -> None:
    ids = np.argsort(np.random.default_rng(0).random((64, 3, 32)), axis=2)[..., :4].astype(np.uint8)
    path = write_trace(tmp_path / "some.npz", topk_ids=ids, seq_len=np.array([64]), num_experts=32)
    assert "--model gpt-oss-20b if these are some of its layers" in bad(["compare", path, "--ranks", "4"])


def test_traces_of_different_models(trace: str, dealing: list[str], tmp_path: Path) -> None:
    other = write_trace(tmp_path / "other.npz", topk_ids=random_ids(0, 256)[:, :2])
    assert "layers" in bad(["compare", trace, other, *dealing])
    assert "--history" in bad(["compare", trace, *dealing, "--history", other])


FILES: dict[str, tuple[dict[str, Any], str]] = {
    "pickled": ({"topk_ids": np.array([[1], [2, 3]], object)}, "unpickled"),
    "layers first": ({"topk_ids": np.swapaxes(random_ids(0, 256), 0, 1)}, "transpose it to [tokens, layers, top-k]"),
    "experts are text": ({"num_experts": np.array("many")}, "num_experts"),
}


@pytest.mark.parametrize(("name", "command"), zip(FILES, itertools.cycle(["compare", "inspect", "plan", "ablate"])))
def test_recordings_that_are_wrong(name: str, command: str, dealing: list[str], tmp_path: Path) -> None:
    arrays, said = FILES[name]
    path = write_trace(tmp_path / "wrong.npz", **arrays)
    assert said in bad([command, path, *([] if command == "inspect" else dealing)])


NONE = ["missing", "directory", "empty", "truncated", "noise", "text"]


@pytest.mark.parametrize(("kind", "command"), zip(NONE * 2, itertools.cycle(["compare", "inspect", "check", "plan"])))
def test_files_that_are_none(kind: str, command: str, trace: str, plan_and_workload: tuple[str, str], tmp_path: Path) -> None:
    whole = {"compare": trace, "inspect": plan_and_workload[1], "check": plan_and_workload[0], "plan": trace}[command]
    path = tmp_path / Path(whole).name
    data = Path(whole).read_bytes()
    content = {
        "empty": b"", "truncated": data[: len(data) // 2], "noise": bytes(range(256)) * 8, "text": b"{}\n" * 40
    }  # fmt: skip
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(content[kind])
    bad([command, str(path)])


def test_a_plan_that_was_changed(plan_and_workload: tuple[str, str], tmp_path: Path) -> None:
    data = bytearray(Path(plan_and_workload[0]).read_bytes())
    data[-1] ^= 1
    path = tmp_path / "changed.safetensors"
    path.write_bytes(bytes(data))
    for command in ("check", "inspect"):
        assert "checksum" in bad([command, str(path)])


def test_the_wrong_kind_of_file(trace: str, plan_and_workload: tuple[str, str], dealing: list[str]) -> None:
    plan, work = plan_and_workload
    assert "plan file" in bad(["compare", plan])
    assert "not a plan" in bad(["check", work]) and "not a plan" in bad(["check", trace])
    assert "workload file" in bad(["check", plan, "--trace", work])
    assert "not a workload" in bad(["check", plan, "--workload", trace])
    assert "exclude" in bad(["check", plan, "--trace", trace, "--workload", work])
    assert "--explain" in bad(["inspect", trace, "--explain", "0,0"])
    assert "--ranks" in bad(["inspect", plan, "--ranks", "4"])
    assert "--ranks" in bad(["inspect", trace, "--tokens-per-rank", "4"])
    for text in ("0", "a,b", "0,0,0", "-1,0", "99,0"):
        bad(["inspect", plan, "--explain", text])


def test_a_workload_file_is_dealt_already(trace: str, model: str, plan_and_workload: tuple[str, str]) -> None:
    words = ["compare", plan_and_workload[1], "--model", model]
    good([*words, "--ranks", "4", "--stage", "update", "--planners", "static"])
    for more, said in (
        (["--ranks", "8"], "4 ranks"),
        (["--tokens-per-rank", "5"], "--tokens-per-rank"),
        (["--shuffle"], "--shuffle"),
        (["--stage", "recompute"], "stage update"),
        ([trace], "cannot be joined"),
    ):
        assert said in bad([*words, *more])


def test_a_config_json_or_its_folder_names_a_model(tmp_path: Path) -> None:
    ids = np.argsort(np.random.default_rng(0).random((64, 3, 12)), axis=2)[..., :5].astype(np.uint8)
    path = write_trace(tmp_path / "none.npz", topk_ids=ids, seq_len=np.array([64]), num_experts=12)
    assert "--model config.json" in bad(["compare", path, "--ranks", "4"])
    config = {
        "model_type": "olmoe", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_experts": 12, "num_experts_per_tok": 5, "vocab_size": 96,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (tmp_path / "config.json", tmp_path):
        words = ["compare", path, "--ranks", "4", "--tokens-per-rank", "16", "--planners", "static", "--model", str(model)]
        assert "static" in good(words).stdout
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 16}))
    assert "16" in bad([*words[:-1], str(tmp_path)])
