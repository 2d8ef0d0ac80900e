"""The published recipe composes, by its own arguments, to a config that veRL takes, for one node and for several."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import os
import subprocess
from pathlib import Path

import pytest
from composed import config_of, python_that_tells

from foremoe.integrations.settings import Settings

RECIPE = Path(__file__).parents[2] / "examples" / "verl_qwen3_30b_a3b.sh"


LARGE = {
    "NODES": "8", "EP": "8", "TP": "4", "PP": "8", "ENDS": "11", "RECOMPUTE": "full", "ROLLOUT_TP": "8", "SLOTS": "2",
}  # fmt: skip
WIDE = {"NODES": "8", "EP": "32", "TP": "4", "PP": "2", "RECOMPUTE": "full", "SLOTS": "4"}


@pytest.mark.parametrize(
    ("sizes", "ep", "dispatcher"), [({}, 8, None), ({"NODES": "2"}, 16, "flex"), (LARGE, 8, None), (WIDE, 32, "flex")]
)
def test_the_recipe_composes(tmp_path, sizes, ep, dispatcher):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    here = os.environ | sizes | {"DATA": str(tmp_path), "PATH": python_that_tells(tmp_path)}
    optional = [
        line.split()[1].replace("$PWD", str(tmp_path)).replace('"', "")
        for line in RECIPE.read_text().splitlines()
        if line.strip().startswith("# +")
    ]
    done = subprocess.run(["bash", RECIPE, *optional], env=here, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    config = config_of(tmp_path)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    engine, overridden = actor.megatron, actor.megatron.override_transformer_config
    assert (actor.strategy, engine.router_replay.mode, engine.expert_model_parallel_size) == ("megatron", "R3", ep)
    tp, pp = int(sizes.get("TP", 2)), int(sizes.get("PP", 1))
    assert (engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size) == (tp, pp)
    assert config.trainer.nnodes == int(sizes.get("NODES", 1))
    assert 8 * config.trainer.nnodes % (ep * pp) == 8 * config.trainer.nnodes % (tp * pp) == 0
    assert overridden.get("moe_token_dispatcher_type") == dispatcher
    if dispatcher:
        assert overridden["moe_enable_deepep"] is True and overridden["moe_router_dtype"] == "fp32"
    assert overridden.get("recompute_granularity") == sizes.get("RECOMPUTE")
    if "ENDS" in sizes:
        first, last = (overridden[f"num_layers_in_{end}_pipeline_stage"] for end in ("first", "last"))
        assert pp > 2 and first == last == 11 and (94 - first - last) % (pp - 2) == 0
    slots = int(sizes.get("SLOTS", 1))
    assert actor.megatron.foremoe == Settings(redundant=slots, packing=True, dump=str(tmp_path / "foremoe-workloads"))


@pytest.mark.parametrize("sizes", [{"NODES": "3"}, {"NODES": "2", "PP": "3"}, {"NODES": "2", "TP": "32"}])
def test_sizes_that_megatron_would_refuse_are_refused_at_once(tmp_path, sizes):
    here = os.environ | sizes | {"DATA": str(tmp_path)}
    done = subprocess.run(["bash", RECIPE, "--cfg", "job"], env=here, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "must divide" in done.stderr and len(done.stderr.splitlines()) == 1
