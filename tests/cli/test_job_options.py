"""Tests of ``foremoe doctor --job``: options that attaching would refuse are named before a job runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_runs import good, run

from foremoe.base.errors import InputError
from foremoe.cli.job_options import judge_job
from foremoe.integrations.supported import Parallel, refusal_of

RECORD = json.loads((Path(__file__).parents[1] / "megatron" / "recipes.json").read_text())
RECIPES = {recipe: options for of in RECORD.values() for recipe, options in of["recipes"].items()}
VERL: dict[str, Any] = {
    "actor_rollout_ref": {
        "actor": {"megatron": {
            "expert_model_parallel_size": 8, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "override_transformer_config": {"delay_wgrad_compute": True}, "expert_tensor_parallel_size": 1,
        }},
        "ref": {"megatron": {"expert_model_parallel_size": 4}},
    }
}  # fmt: skip


def judged(path: Path, text: str) -> list[tuple[str, str, str]]:
    path.write_text(text)
    return judge_job(str(path))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_judged_as_at_the_start_of_a_job(recipe: str, tmp_path: Path) -> None:
    options = RECIPES[recipe]["parallel"] | RECIPES[recipe]["model"]
    refusal = refusal_of(options.get, Parallel.of(options.get))
    ((place, _, why),) = judged(tmp_path / "job.json", json.dumps(options))
    assert (place, why) == ("the job", "" if refusal is None else refusal.reason)


def test_every_part_of_nested_settings_is_judged(tmp_path: Path) -> None:
    found = {place: (sizes, why) for place, sizes, why in judged(tmp_path / "job.json", json.dumps(VERL))}
    assert found["actor_rollout_ref.ref.megatron"] == ("EP4, TP1, PP1, alltoall", "")
    sizes, why = found["actor_rollout_ref.actor.megatron"]
    assert sizes == "EP8, TP2, PP1, alltoall" and "delay_wgrad_compute=False" in why


def test_what_is_not_enabled_does_not_count(tmp_path: Path) -> None:
    part = {
        "expert_model_parallel_size": 8,
        "moe_token_dispatcher_type": "alltoall",
        "fp8_cfg": {"enabled": False, "fp8": "hybrid"},
    }
    assert judged(tmp_path / "job.json", json.dumps({"policy": {"megatron_cfg": part}}))[0][2] == ""
    part["fp8_cfg"] = {"enabled": True, "fp8": "hybrid"}
    assert "fp8" in judged(tmp_path / "job.json", json.dumps({"policy": {"megatron_cfg": part}}))[0][2]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall", ""),
        ("MOE=(--moe-token-dispatcher-type alltoall \\\n --expert-model-parallel-size=8) # --fp8-format e4m3", ""),
        ("--expert-model-parallel-size 8", "the allgather dispatcher"),
        ("--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --fp8-format hybrid", "fp8 and fp4"),
        ("--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2", "split over"),
    ],
)
def test_flags_are_read_as_on_a_command_line(flags: str, refused: str, tmp_path: Path) -> None:
    ((_, _, why),) = judged(tmp_path / "job.sh", flags)
    assert refused in why if refused else not why


def test_yaml_and_toml_are_read(tmp_path: Path) -> None:
    assert judged(tmp_path / "job.toml", "[a]\nexpert_model_parallel_size = 2\n")[0][0] == "a"
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert judged(tmp_path / "job.yaml", "a:\n  expert_model_parallel_size: 2\n")[0][0] == "a"


DEEP = '{"a":' * 40 + "{}" + "}" * 40


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("job.json", "{", "cannot be read as json"),
        ("job.json", "[1]", "holds a list"),
        ("job.json", "{}", "has no expert_model_parallel_size"),
        ("job.json", "[" * 100_000, "cannot be read as json"),
        ("job.json", DEEP, "32 levels"),
        ("job.json", json.dumps({"expert_model_parallel_size": "${ep}"}), "is '${ep}', not a number"),
        ("job.yaml", "a: [1", "cannot be read as yaml"),
        ("job.txt", "--expert-model-parallel-size $EP", "is '$EP', not a number"),
    ],
)
def test_other_files_are_refused_with_a_sentence(name: str, text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        judged(tmp_path / name, text)


def test_the_command_ends_with_1_if_an_option_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(VERL))
    done = run(["doctor", "--job", str(file)])
    assert done.exit_code == 1 and "delay_wgrad_compute=False" in done.stdout
    file.write_text(json.dumps(VERL["actor_rollout_ref"]["ref"] | {"actor_rollout_ref": {}}))
    assert "no option is refused" in good(["doctor", "--job", str(file)]).stdout
