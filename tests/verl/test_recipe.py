"""The published recipe composes, by its own arguments, to a config that veRL takes."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import os
import subprocess
import sys
from pathlib import Path

from foremoe.integrations.settings import Settings

RECIPE = Path(__file__).parents[2] / "examples" / "verl_qwen3_30b_a3b.sh"


def test_the_recipe_composes(tmp_path):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    here = os.environ | {"DATA": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
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
    assert (actor.strategy, actor.megatron.expert_model_parallel_size, actor.megatron.router_replay.mode) == ("megatron", 8, "R3")
    assert actor.megatron.foremoe == Settings(packing=True, dump=str(tmp_path / "foremoe-workloads"))
