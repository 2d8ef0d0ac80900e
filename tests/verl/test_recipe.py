"""The published recipe composes, by its own arguments, to a config that veRL takes, for one node and for several."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foremoe.integrations.settings import Settings

RECIPE = Path(__file__).parents[2] / "examples" / "verl_qwen3_30b_a3b.sh"


LARGE = {"NODES": "8", "EP": "32", "TP": "4", "PP": "2", "SLOTS": "6", "MODEL": "Qwen/Qwen3-235B-A22B"}


@pytest.mark.parametrize(("sizes", "ep", "dispatcher"), [({}, 8, None), ({"NODES": "2"}, 16, "flex"), (LARGE, 32, "flex")])
def test_the_recipe_composes(tmp_path, sizes, ep, dispatcher):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    here = os.environ | sizes | {"DATA": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    optional = [
        line.split()[1].replace("$PWD", str(tmp_path)).replace('"', "")
        for line in RECIPE.read_text().splitlines()
        if line.strip().startswith("# +")
    ]
    done = subprocess.run(
        ["bash", RECIPE, *optional, "--cfg", "job"], env=here, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    config = OmegaConf.create(done.stdout)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.strategy, actor.megatron.expert_model_parallel_size, actor.megatron.router_replay.mode) == (
        "megatron",
        ep,
        "R3",
    )
    assert actor.megatron.override_transformer_config.get("moe_token_dispatcher_type") == dispatcher
    assert 8 * config.trainer.nnodes % (ep * actor.megatron.pipeline_model_parallel_size) == 0
    slots = int(sizes.get("SLOTS", 1))
    assert actor.megatron.foremoe == Settings(redundant=slots, packing=True, dump=str(tmp_path / "foremoe-workloads"))
