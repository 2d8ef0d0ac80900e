"""veRL's engine module stays importable for those who merely have foremoe installed; on a stand-in for veRL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from broken_import import BROKEN

import foremoe

ENGINE = """
from verl.workers.engine.base import EngineRegistry


@EngineRegistry.register(model_type="language_model", backend="megatron")
class MegatronEngineWithLMHead:
    pass


if __name__ == "__main__":
    print("ran as a program")
"""
# As strict as veRL's: a key is registered once.
REGISTRY = """
class EngineRegistry:
    _engines = {}

    @classmethod
    def register(cls, model_type, backend, device="cuda", vendor=None):
        def enter(engine):
            engines = cls._engines.setdefault(model_type, {}).setdefault(backend, {})
            key = (device, vendor) if vendor else device
            assert key not in engines, f"The key(device-vendor: {key}) has been already registered!"
            engines[key] = engine
            return engine

        return enter
"""
ENGINES = """
def names(registry):
    return {key: engine.__name__ for key, engine in registry._engines["language_model"]["megatron"].items()}

THEIRS = {"cuda": "MegatronEngineWithLMHead"}
OURS = THEIRS | {("cuda", "nvidia"): "ForeMoEEngine"}
"""
IMPORT = (
    BROKEN
    + """
import foremoe.integrations.verl.plugin
from verl.workers.engine.megatron import transformer_impl

engines = transformer_impl.EngineRegistry._engines["language_model"]["megatron"]
print([engine.__name__ for engine in engines.values()], type(transformer_impl.__loader__).__name__)
"""
)


@pytest.fixture
def stand_in(tmp_path):
    """A folder with packages of veRL's names."""
    folder = tmp_path
    for name in ("verl", "workers", "engine", "megatron"):
        folder = folder / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (folder / "transformer_impl.py").write_text(ENGINE)
    (folder.parent / "base.py").write_text(REGISTRY)
    return tmp_path


def python(folder, *arguments, **options):
    """Output and errors of a Python that finds the stand-in."""
    environment = os.environ | {"PYTHONPATH": f"{Path(foremoe.__file__).parents[1]}{os.pathsep}{folder}"}
    command = [sys.executable, "-W", "error::RuntimeWarning", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip(), done.stderr


def run(folder, module, error):
    return python(folder, "-c", IMPORT.format(module=module, error=error))


def test_the_engine_is_registered_and_the_module_keeps_its_loader(stand_in):
    out, _ = run(stand_in, "nothing.of.that.name", "ImportError")
    assert "ForeMoEEngine" in out and out.endswith("SourceFileLoader")


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("numba", "RuntimeError"),
        ("foremoe.integrations.verl.engine", "ImportError"),
        ("foremoe.integrations.settings", "SystemExit"),
    ],
)
def test_what_fails_in_foremoe_leaves_verls_engine_alone(stand_in, module, error):
    out, said = run(stand_in, module, error)
    assert (
        out == "['MegatronEngineWithLMHead'] SourceFileLoader"
        and said.count(f"which runs without it: {error}: made to fail") == 1
    )


MODULE = "verl.workers.engine.megatron.transformer_impl"
BETWEEN = f"""
import importlib.util
import inspect
import pkgutil

import foremoe.integrations.verl.plugin

spec = importlib.util.find_spec({MODULE!r})
assert "class MegatronEngineWithLMHead" in spec.loader.get_source(spec.name)
assert spec.loader.get_code(spec.name).co_filename == spec.origin == spec.loader.get_filename(spec.name)
assert spec.loader.is_package(spec.name) is False and spec.loader.get_data(spec.origin)
assert not hasattr(spec.loader, "of_no_loader")
module = importlib.util.module_from_spec(spec)
assert "class MegatronEngineWithLMHead" in inspect.getsource(module), "before it runs"
"""


def test_a_found_module_has_all_of_its_loader_before_it_is_loaded(stand_in):
    python(stand_in, "-c", BETWEEN)


@pytest.mark.parametrize("runner", [[], ["pdb", "-c", "continue", "-c", "quit", "-m"]], ids=["python", "pdb"])
def test_the_module_runs_as_a_program(stand_in, runner):
    (stand_in / "verl" / "__init__.py").write_text("import foremoe.integrations.verl.plugin\n")
    out, _ = python(stand_in, "-m", *runner, MODULE, input="quit\n" * 9)
    assert "ran as a program" in out


RELOAD = """
import importlib
import logging
import pickle

import foremoe.integrations.verl.plugin as plugin
from verl.workers.engine import base
from verl.workers.engine.megatron import transformer_impl

assert names(base.EngineRegistry) == OURS
first = base.EngineRegistry._engines["language_model"]["megatron"]["cuda", "nvidia"]
importlib.reload(base)
importlib.reload(transformer_impl)
assert names(base.EngineRegistry) == OURS, "veRL's registry and engine, new"
second = base.EngineRegistry._engines["language_model"]["megatron"]["cuda", "nvidia"]
assert second is not first and issubclass(second, transformer_impl.MegatronEngineWithLMHead)
assert type(transformer_impl.__loader__).__name__ == "SourceFileLoader"

del base.EngineRegistry._engines["language_model"]["megatron"]["cuda"]
importlib.reload(transformer_impl)
assert names(base.EngineRegistry) == OURS, "veRL's engine, new; ours of before is still there"
engine = base.EngineRegistry._engines["language_model"]["megatron"]["cuda", "nvidia"]
assert issubclass(engine, transformer_impl.MegatronEngineWithLMHead) and pickle.loads(pickle.dumps(engine)) is engine

importlib.reload(plugin)
assert names(base.EngineRegistry) == OURS, "foremoe's plugin, new"
"""


def test_a_reload_renews_the_engine(stand_in):
    _, said = python(stand_in, "-c", ENGINES + RELOAD)
    assert said == ""


PICKLE = """
import pickle
import sys

import foremoe.integrations.verl.plugin
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import transformer_impl

engine = EngineRegistry._engines["language_model"]["megatron"]["cuda", "nvidia"]
sys.stdout.write(pickle.dumps(engine).hex())
"""
UNPICKLE = """
import pickle
import sys

{plugin}
engine = pickle.loads(bytes.fromhex(sys.stdin.read()))
from verl.workers.engine.base import EngineRegistry

assert engine.__name__ == engine.__qualname__ == "ForeMoEEngine"
found = EngineRegistry._engines["language_model"]["megatron"].get(("cuda", "nvidia"))
assert found is {found}, found
"""


def test_the_engine_s_class_pickles(stand_in):
    """By its name, in processes that find the plugin and in others."""
    sent, _ = python(stand_in, "-c", PICKLE)
    for plugin, found in (("import foremoe.integrations.verl.plugin", "engine"), ("", "None")):
        python(stand_in, "-c", UNPICKLE.format(plugin=plugin, found=found), input=sent)
