"""What a calibration refuses before it measures: places to write, environments, machines and sizes; and nodes of one rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from click.testing import CliRunner

from examples.grpo.given import given_samples
from examples.grpo.settings import Settings
from foremoe.base.errors import InputError, TransferError
from foremoe.calibrate import Case
from foremoe.calibrate.case import least_seconds, require_time
from foremoe.calibrate.launch import default_ranks, join_started, launch
from foremoe.cli.calibrate import under_torchrun
from foremoe.cli.main import main
from foremoe.machine.model import Model
from foremoe.testing.ranks import get_pool

SIZE_OPTIONS = ["--hidden", "64", "--ffn", "32", "--experts", "4", "--topk", "2", "--dtype", "float32", "--tokens", "64"]
STARTED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def tiny(num_experts: int = 6) -> Model:
    sizes = {"num_experts": num_experts, "hidden_size": 32, "ffn_size": 16, "attention_params": 4096, "num_heads": 2}
    return Model.from_dict(Model.preset("mixtral-8x7b").to_dict() | sizes | {"qk_head_dim": 16, "v_head_dim": 16})


def a_case(**changes) -> Case:
    return Case(**{"model": tiny(), "num_ranks": 3, "tokens": 32, "sequence_length": 8, "seconds": 0.2} | changes)


@pytest.mark.parametrize("output", [".", "", "/", "-", "folder.toml"])
def test_places_that_are_no_file_end_in_one_sentence(output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    result = CliRunner().invoke(main, ["calibrate", *SIZE_OPTIONS, "-o", output])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_only_the_first_rank_needs_the_folder(monkeypatch):
    words = ["calibrate", *SIZE_OPTIONS, "--ranks", "3", "-o", "nowhere/x.toml"]
    for rank, part in (("0", "no directory"), ("1", "torchrun has started 2 ranks")):
        for name, value in (STARTED | {"RANK": rank}).items():
            monkeypatch.setenv(name, value)
        assert part in CliRunner().invoke(main, words).stderr


@pytest.mark.parametrize(
    ("changes", "started"),
    [
        ({}, True),
        ({"WORLD_SIZE": "abc"}, False),
        ({"WORLD_SIZE": "1"}, False),
        ({"RANK": "2"}, False),
        ({"RANK": "-1"}, False),
        *(({name: ""}, False) for name in STARTED),
    ],
)
def test_half_an_environment_is_no_torchrun(changes, started, monkeypatch):
    for name, value in (STARTED | changes).items():
        monkeypatch.setenv(name, value)
    assert under_torchrun() == started


def test_what_fails_on_a_started_rank_is_one_sentence(monkeypatch):
    for name, value in (STARTED | {"MASTER_PORT": "99999999"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TransferError, match=r"^rank 0 failed and the calibration was stopped \(.*\)\.$"):
        join_started(a_case(), lambda: None)


def test_every_rank_needs_a_gpu_of_its_own(monkeypatch):
    assert default_ranks() == 2 or torch.cuda.device_count() == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert default_ranks() == 1
    with pytest.raises(InputError, match=r"there is 1 GPU for 3 ranks; .* or set CUDA_VISIBLE_DEVICES= \(empty\)"):
        launch(a_case(), lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert default_ranks() == 2
    with pytest.raises(InputError, match="give --ranks of at most 2"):
        launch(a_case(), lambda: None)


def test_sizes_that_outlast_the_seconds_are_refused_with_tokens_that_do_not():
    case = a_case(model=Model.preset("deepseek-v3"), num_ranks=2, tokens=2048, sequence_length=512, seconds=90.0)
    with pytest.raises(InputError, match="or a smaller model") as refused:
        require_time(case, 5e10)
    words = str(refused.value)
    tokens, seconds = (int(words.split(option)[1].split()[0].rstrip(",")) for option in ("--tokens", "--seconds"))
    assert 8 <= tokens < 2048
    require_time(dataclasses.replace(case, tokens=tokens, sequence_length=min(tokens, 512)), 5e10)
    require_time(dataclasses.replace(case, seconds=float(seconds)), 5e10)
    require_time(case, 5e13)
    with pytest.raises(InputError, match="give --seconds"):
        require_time(case, 1e8)
    assert sum(least_seconds(case, 1e12)) == pytest.approx(2 * sum(least_seconds(case, 2e12)))


def slow(group, case):
    from foremoe.calibrate.computing import ExpertCompute
    from foremoe.calibrate.measure import measure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertCompute, "flops_per_s", lambda self, watch: 1.0)
        try:
            measure(group, case, torch.device("cpu"), lambda *_: None)
        except InputError as error:
            return str(error)


def test_all_ranks_refuse_alike():
    said = get_pool(2).run(slow, a_case(num_ranks=2))
    assert "give --seconds" in said[0] and said[0] == said[1]


def on_uneven_nodes(group, case):
    from foremoe.calibrate.measure import measure

    return measure(group, case, torch.device("cpu"), lambda *_: None, node_of_rank=[0, 0, 1])


@pytest.mark.heavy
def test_a_rank_alone_in_its_node():
    measured = get_pool(3).run(on_uneven_nodes, a_case())[0]
    assert {"exchange", "exchange across nodes"} <= {p.kind for p in measured.points}
    assert list(measured.node_of_rank) == [0, 0, 1]


def test_a_skew_between_two_draws_is_refused():
    few = Settings(
        num_layers=1, num_experts=8, num_topk=1, hidden_size=32, ffn_size=32, num_heads=2, num_prompts=2, group_size=1,
        recompute_tokens=100, update_tokens=100,
    )  # fmt: skip
    refused = 0
    for skew in (1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8):
        try:
            given_samples(few, skew, 2)
        except InputError as error:
            refused += "no draw of these sizes" in str(error)
    assert refused
