"""Every command and setting of docs/verl.md is run, or composed, as it is printed."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from composed import config_of, python_that_tells

from foremoe.integrations.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verl.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


def run(command, **environment):
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def path(tmp_path):
    """A search path with the python that runs this."""
    modules = [(name, f'set -- -m {name} "$@"') for name in ("pip", "foremoe")]
    for name, more in (("python", ""), *modules):
        script = tmp_path / name
        script.write_text(f'#!/bin/bash\n{more}\nexec {sys.executable} -W ignore "$@"\n')
        script.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def test_the_commands_to_begin_with(path, tmp_path):
    from verl.utils.config import omega_conf_to_dataclass

    install, warm_up, program = BLOCKS[0].split("\n", 2)
    assert install.startswith("pip install '.[verl]'") and warm_up.startswith("foremoe warm-up ")
    said = run(install, PATH=path, PIP_DRY_RUN="1", PIP_NO_DEPS="1", PIP_NO_BUILD_ISOLATION="0", PIP_NO_INDEX="1")
    assert "Would install foremoe" in said
    run(f"job=()\n{program}", PATH=python_that_tells(tmp_path))
    config = config_of(tmp_path)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor.megatron)
    assert (engine.strategy, engine.router_replay.mode, engine.foremoe) == ("megatron", "R3", Settings(redundant=0))


def test_layouts_of_a_job_are_compared_for_the_same_tokens(path):
    assert len(BLOCKS) == 2 and PAGE.count("--micro-steps 16 --") == 1
    said = run(BLOCKS[1].replace("--micro-steps 16", "--micro-steps 2 --layers 0:4 --redundant 1"), PATH=path)
    assert "64 GPUs = EP 32 x DP 1 x PP 2" in said and "EP 16 x PP 4" in said and "EP 16 x DP 2 x PP 2" in said
    # The options of the table exist.
    (table,) = re.findall(r"\| option \| value \|\n(.*?)\n\n", PAGE, re.DOTALL)
    named, told = set(re.findall(r"`(--[a-z-]+)", table)), run("foremoe simulate --help", PATH=path)
    assert len(named) == 8 and all(name in told for name in named)


def test_inline_commands(path):
    found = set(re.findall(r"`((?:make|python|pip|bash) [^`]+)`", PAGE))
    # The first runs this test, the next is that of test_verl_smoke.
    assert found == {"make test-verl", "make smoke-verl", "python -m bench.verl_planning"}
    assert "examples/verl_cpu_smoke.py" in run("make --dry-run smoke-verl")
    small = "python -m bench.verl_planning --micro-steps 2 --tokens 512"
    assert run(small, PATH=path).startswith("# Planning before a stage")


def test_the_settings_and_their_defaults():
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    table = re.search(r"\n\| key \|.*?\n\n", PAGE, re.DOTALL)[0]
    overrides = []
    for line in table.strip().splitlines()[2:]:
        keys, values, *_ = (cell.strip(" `") for cell in line.strip("|").split("|"))
        names, defaults = re.findall(r"\w+", keys), values.split(", ")
        if len(defaults) == 1:
            defaults *= len(names)
        overrides += [f"{name}={value or 'null'}" for name, value in zip(names, defaults, strict=True)]
    assert {item.split("=")[0] for item in overrides} == {field.name for field in dataclasses.fields(Settings)}
    place = "actor_rollout_ref.actor.megatron"
    target = f"{place}._target_=foremoe.integrations.verl.EngineConfig"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", ["model_engine=megatron", target, *(f"+{place}.foremoe.{item}" for item in overrides)])
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor.megatron).foremoe == Settings()
