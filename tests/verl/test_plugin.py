"""veRL finds foremoe by itself, in workers of a real Ray too; it acts only where the config says so."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import sys

import pytest
from broken_import import BROKEN
from forked import forks

from foremoe.base.errors import InputError
from foremoe.integrations.settings import Settings


def look():
    """What a process that does no more than import veRL finds."""
    import sys

    import verl  # noqa: F401

    waiting = any(type(finder).__name__ == "_Waiting" for finder in sys.meta_path)
    light = "megatron" not in sys.modules and "torch.distributed.elastic" not in sys.modules
    from verl.workers.engine import EngineRegistry

    return waiting, light, EngineRegistry.get_engine_cls("language_model", "megatron").__name__


@pytest.fixture(scope="module")
def cluster():
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_ray_workers_find_the_plugin(cluster):
    assert cluster.get(cluster.remote(look).remote(), timeout=300) == (True, True, "ForeMoEEngine")


def test_the_environment_switches_it_off(cluster):
    off = cluster.remote(look).options(runtime_env={"env_vars": {"FOREMOE": "0"}})
    assert cluster.get(off.remote(), timeout=300) == (False, True, "MegatronEngineWithLMHead")


@pytest.fixture(scope="module")
def run():
    with forks() as run:
        yield run


BREAK = (
    BROKEN
    + """
from verl.workers.engine import EngineRegistry, MegatronEngineWithLMHead

assert EngineRegistry.get_engine_cls("language_model", "megatron") is MegatronEngineWithLMHead, "veRL's own"
"""
)


def test_what_fails_here_leaves_verls_modules_as_they_are(run):
    """Whatever it is: `tests/integrations/test_verl_plugin.py` breaks one thing after the other on a stand-in."""
    code, said = run(BREAK.format(module="foremoe.problem.cost", error="ImportError"))
    assert code == 0, said[-2000:]
    assert said.count("which runs without it: ImportError: made to fail") == 1


RELOAD = """
import importlib
import importlib.util
import pickle

import verl
name = "verl.workers.engine.megatron.transformer_impl"
assert importlib.util.find_spec(name) is not None  # imports its package, and with it the module
from verl.workers.engine import base
from verl.workers.engine.megatron import transformer_impl

for _ in range(2):
    engine = base.EngineRegistry.get_engine_cls("language_model", "megatron")
    assert engine.__name__ == "ForeMoEEngine" and issubclass(engine, transformer_impl.MegatronEngineWithLMHead)
    assert pickle.loads(pickle.dumps(engine)) is engine
    importlib.reload(base)
    importlib.reload(transformer_impl)
"""


def test_a_reload_of_verls_modules_renews_the_engine_and_its_class_pickles(run):
    """Of both: veRL refuses a second engine in the same registry."""
    code, said = run(RELOAD)
    assert code == 0, said[-2000:]


@pytest.mark.parametrize(
    ("environment", "causes"),
    [
        ({}, []),
        ({"VERL_PLATFORM": "amd"}, ["veRL's platform is cuda/amd"]),
        ({"VERL_PLATFORM": "amd", "VERL_ENGINE_VENDOR": "nvidia"}, []),
        ({"VERL_ENGINE_DEVICE": "npu"}, ["veRL's platform is npu/nvidia"]),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, ["has not loaded foremoe's plugin"]),
    ],
    ids=str,
)
def test_settings_that_reach_no_engine_say_why(run, environment, causes):
    program = "from foremoe.integrations.verl import EngineConfig\nfor _ in range(2): EngineConfig(foremoe={})\nEngineConfig()"
    code, said = run(program, environment)
    assert code == 0, said[-2000:]
    warned = [line for line in said.splitlines() if "megatron.foremoe is set and has no effect" in line]
    assert len(warned) == len(causes) and all(what in line for what, line in zip(causes, warned, strict=True))


def test_the_config_takes_one_more_key():
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    overrides = [
        "actor_rollout_ref.actor.megatron._target_=foremoe.integrations.verl.EngineConfig",
        "+actor_rollout_ref.actor.megatron.foremoe.redundant=2",
        '+actor_rollout_ref.actor.megatron.foremoe.planner="Planner(rank=(Quota(min_pairs=64),))"',
        "+actor_rollout_ref.actor.megatron.foremoe.backends=[pinned_host,collective]",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_megatron_trainer", overrides)
        plain = compose("ppo_megatron_trainer", overrides[:1])
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor.megatron)
    assert engine.foremoe == Settings(
        redundant=2, planner="Planner(rank=(Quota(min_pairs=64),))", backends=("pinned_host", "collective")
    )
    assert omega_conf_to_dataclass(plain.actor_rollout_ref.actor.megatron).foremoe is None


@pytest.mark.parametrize(("given", "said"), [({"redundent": 1}, "no setting 'redundent'"), (3, "mapping of settings")])
def test_settings_that_make_no_sense_are_refused_when_the_job_starts(given, said):
    from foremoe.integrations.verl import EngineConfig

    with pytest.raises(InputError, match=said):
        EngineConfig(foremoe=given)
