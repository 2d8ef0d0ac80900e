"""Tests of ``foremoe doctor --job``: options that attaching would refuse are named before a job runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_runs import good, run

from foremoe.base.errors import InputError
from foremoe.cli.job_options import Judged, judge_job
from foremoe.integrations.supported import Parallel, refusal_of

RECORD = json.loads((Path(__file__).parents[1] / "megatron" / "recipes.json").read_text())
RECIPES = {recipe: options for of in RECORD.values() for recipe, options in of["recipes"].items()}
ACTOR = {
    "expert_model_parallel_size": 8, "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1,
}  # fmt: skip
EP = {"expert_model_parallel_size": 8}


def judged(path: Path, text: str) -> Judged:
    path.write_text(text)
    return judge_job(str(path))


def of_json(path: Path, settings: Any) -> Judged:
    return judged(path / "job.json", json.dumps(settings))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_judged_as_at_the_start_of_a_job(recipe: str, tmp_path: Path) -> None:
    options = RECIPES[recipe]["parallel"] | RECIPES[recipe]["model"]
    refusal = refusal_of(options.get, Parallel.of(options.get))
    found = of_json(tmp_path, options)
    assert (found.place, found.refused) == ("the job", "" if refusal is None else refusal.reason)


def test_of_verl_the_actor_is_judged_with_its_overrides(tmp_path: Path) -> None:
    def of(**overrides: Any) -> Judged:
        actor = {"megatron": ACTOR | {"override_transformer_config": overrides}}
        other = {"megatron": {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2}}
        return of_json(tmp_path, {"actor_rollout_ref": {"actor": actor, "ref": other}, "critic": other})

    assert of() == ("actor_rollout_ref.actor.megatron", "EP8, TP2, PP1, dispatcher not set here", "")
    assert "delay_wgrad_compute=False" in of(delay_wgrad_compute=True).refused
    assert "sequence_parallel=True" in of(sequence_parallel=False).refused


@pytest.mark.parametrize(
    "megatron",
    [
        {}, {"fp8_cfg": {"enabled": False, "fp8": "hybrid"}}, {"fp8_cfg": {"enabled": True, "fp8": "hybrid"}},
        {"peft": {"enabled": True}}, {"model_overrides": {"moe_token_dispatcher_type": "allgather"}},
        {"moe_token_dispatcher_type": "alltoall", "cuda_graph_impl": "local", "cuda_graph_scope": "attn,moe_router"},
    ],
)  # fmt: skip
def test_nemo_rl_is_judged_by_its_adapter(megatron: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the adapter needs torch")
    from foremoe.integrations import nemo_rl

    policy = {"foremoe": {}, "megatron_cfg": EP | megatron}
    found = of_json(tmp_path, {"policy": policy})
    try:
        nemo_rl.settings_of(policy)
        assert found == ("policy.megatron_cfg", found.sizes, "")
    except InputError as error:
        assert found.refused and found.refused in str(error)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall", ""),
        ("MOE=(--moe-token-dispatcher-type alltoall \\\n --expert-model-parallel-size=8) # --fp8-format e4m3", ""),
        ("--expert-model-parallel-size='8';", ""),
        ("--sglang-expert-parallel-size ${N} --expert-model-parallel-size 8", ""),
        ("--expert-model-parallel-size 8 --moe-token-dispatcher-type allgather", "the allgather dispatcher"),
        ("--expert-model-parallel-size 8 --cuda-graph-impl local --cuda-graph-scope attn moe", "CUDA graph"),
        ("--expert-model-parallel-size 8 --cuda-graph-impl local --cuda-graph-scope", "CUDA graph"),
        ("--expert-model-parallel-size 8 --cuda-graph-impl local --cuda-graph-scope attn", ""),
        ("--expert-model-parallel-size 8 --enable-cuda-graph", "CUDA graph"),
        (
            "--expert-model-parallel-size 8 --pipeline-model-parallel-size 2 --num-layers 8"
            " --num-layers-per-virtual-pipeline-stage 2 --microbatch-group-size-per-virtual-pipeline-stage 4",
            "set it to 2",
        ),
        ("--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --fp8-format hybrid", "fp8 and fp4"),
        ("--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2", "split over"),
    ],
)
def test_flags_are_read_as_on_a_command_line(flags: str, refused: str, tmp_path: Path) -> None:
    found = judged(tmp_path / "job.sh", flags).refused
    assert refused in found if refused else not found


def test_yaml_and_toml_are_read(tmp_path: Path) -> None:
    assert judged(tmp_path / "job.toml", "expert_model_parallel_size = 2\n").sizes.startswith("EP2")
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert judged(tmp_path / "job.yaml", "expert_model_parallel_size: 2\n").sizes.startswith("EP2")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("job.json", "{", "cannot be read as JSON"),
        ("job.json", "[1]", "holds a list"),
        ("job.json", "{}", "has no expert_model_parallel_size above 1"),
        ("job.json", '{"expert_model_parallel_size": null}', "has no expert_model_parallel_size above 1"),
        ("job.json", "[" * 100_000, "cannot be read as JSON"),
        ("job.json", '{"expert_model_parallel_size": {"a": 1}}', "a parallel size is a whole number"),
        ("job.json", '{"expert_model_parallel_size": 8, "fp8": "${x}"}', "without references"),
        ("job.yaml", "a: [1", "cannot be read as YAML"),
        (
            "job.json",
            '{"expert_model_parallel_size": 8, "cuda_graph_scope": 3, "fp8": {}, "virtual_pipeline_model_parallel_size": []}',
            "a parallel size is a whole number",
        ),
        ("job.txt", "--expert-model-parallel-size $EP", "without references"),
        ("job", "x" * 300_000, "files of this kind have at most"),
    ],
)
def test_other_files_are_refused_with_a_sentence(name: str, text: str, told: str, tmp_path: Path) -> None:
    if name == "job.yaml":
        pytest.importorskip("yaml", reason="PyYAML is not installed")
    with pytest.raises(InputError, match=re.escape(told)):
        judged(tmp_path / name, text)


def test_the_command_ends_with_1_if_an_option_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(EP | {"fp8": "hybrid"}))
    done = run(["doctor", "--job", str(file)])
    assert done.exit_code == 1 and "fp8 and fp4 experts are not supported" in done.stdout
    file.write_text(json.dumps(EP))
    assert "no option is refused" in good(["doctor", "--job", str(file)]).stdout
    assert json.loads(good(["doctor", "--job", str(file), "--json"]).stdout)["job"]["refused"] == ""
