"""The recipes for slime and NeMo-RL, by the arguments that they run their trainer with."""

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import stand_ins
from logged import logged

from foremoe.integrations import nemo_rl, slime
from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import Settings

EXAMPLES = Path(__file__).parents[2] / "examples"
# Arguments that concern foremoe, as THUDM/slime has them at 624b824a in slime/utils/arguments.py.
SLIME_ARGUMENTS = ("--use-rollout-routing-replay", "--custom-megatron-init-path", "--custom-config-path")


def arguments_of(recipe, tmp_path, **variables):
    """What a recipe gives to Python, in which an own program takes it down."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor argument in "$@"; do echo "$argument"; done\n')
    python.chmod(0o755)
    environ = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", EXAMPLES / recipe, "--more"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *arguments, last = done.stdout.splitlines()
    assert last == "--more"
    return arguments


@pytest.mark.parametrize("checkout", stand_ins.checkouts("FOREMOE_SLIME", "THUDM/slime"))
def test_slime(tmp_path, checkout):
    if not checkout:
        models = tmp_path / "scripts" / "models"
        models.mkdir(parents=True)
        (models / "qwen3-30B-A3B.sh").write_text("MODEL_ARGS=(--num-experts 128)\n")
    folders = dict.fromkeys(("MODEL", "CHECKPOINT", "DATA"), str(tmp_path))
    script, *arguments = arguments_of("slime_qwen3_30b_a3b.sh", tmp_path, SLIME=checkout or str(tmp_path), **folders)
    assert script == "train.py" and "--num-experts" in arguments and set(SLIME_ARGUMENTS) <= set(arguments)
    value = dict(itertools.pairwise(arguments))
    module, _, name = value["--custom-megatron-init-path"].rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    assert Settings.of(json.loads(Path(value["--custom-config-path"]).read_text())["foremoe"]) == Settings(redundant=1)
    if checkout:
        known = Path(checkout, "slime/utils/arguments.py").read_text()
        assert [name for name in SLIME_ARGUMENTS if f'"{name}"' not in known] == []


@pytest.mark.parametrize("checkout", stand_ins.checkouts("FOREMOE_NEMO_RL", "NVIDIA-NeMo/RL"))
def test_nemo_rl(tmp_path, checkout):
    arguments = arguments_of("nemo_rl_qwen3_30b_a3b.sh", tmp_path, NEMO_RL=checkout or str(tmp_path))
    assert arguments[:3] == ["-m", "foremoe.integrations.nemo_rl", "examples/run_grpo.py"] and arguments[3] == "--config"
    settings = dict(argument.split("=") for argument in arguments[5:])
    assert settings.pop("policy.router_replay.enabled") == "true"
    prefix = "+policy.foremoe."
    assert all(name.startswith(prefix) for name in settings)
    assert Settings.of({name.removeprefix(prefix): int(value) for name, value in settings.items()}) == Settings(redundant=1)
    if checkout:
        assert Path(checkout, arguments[2]).exists() and Path(checkout, arguments[4]).exists()


def test_foremoe_without_replay_says_that_it_does_nothing():
    warn_once.cache_clear()
    with logged() as said:
        for _ in range(2):
            slime.install(SimpleNamespace(use_routing_replay=False))
            nemo_rl.install({"foremoe": {"redundant": 1}, "router_replay": {"enabled": False}})
    assert [record.name for record in said] == [slime.__name__, nemo_rl.__name__], "once"
    assert "add --use-rollout-routing-replay" in said[0].getMessage()
    assert "set policy.router_replay.enabled=true" in said[1].getMessage()


def test_a_stage_that_is_switched_off_runs_as_ever():
    from foremoe.integrations.megatron import forward_backward  # noqa: F401 (its module is of the same name)

    wrapper, trainer = sys.modules["foremoe.integrations.megatron.forward_backward"], SimpleNamespace()
    with patch.object(wrapper, "get_forward_backward_func", lambda: lambda **call: call):
        wrapper.plan_calls_of(trainer, lambda call: pytest.fail("asked for routing"), Settings(recompute=False))
        assert trainer.get_forward_backward_func()(forward_only=True) == {"forward_only": True}
