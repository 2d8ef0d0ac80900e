"""veRL's engine module stays importable for those who merely have foremoe installed; on a stand-in for veRL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from broken_import import BROKEN

import foremoe

ENGINE = """
class EngineRegistry:
    engines = {}

    @classmethod
    def register(cls, **key):
        return lambda engine: cls.engines.setdefault("now", engine)


class MegatronEngineWithLMHead:
    pass
"""
IMPORT = (
    BROKEN
    + """
import foremoe.integrations.verl.plugin
from verl.workers.engine.megatron import transformer_impl

print(transformer_impl.EngineRegistry.engines, type(transformer_impl.__loader__).__name__)
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
    return tmp_path


def run(folder, module, error):
    environment = os.environ | {"PYTHONPATH": f"{Path(foremoe.__file__).parents[1]}{os.pathsep}{folder}"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", IMPORT.format(module=module, error=error)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip(), done.stderr


def test_the_engine_is_registered_and_the_module_keeps_its_loader(stand_in):
    out, _ = run(stand_in, "nothing.of.that.name", "ImportError")
    assert "ForeMoEEngine" in out and out.endswith("SourceFileLoader")


@pytest.mark.parametrize("module", ["numba", "foremoe.integrations.verl.engine", "foremoe.integrations.settings"])
@pytest.mark.parametrize("error", ["RuntimeError", "ImportError", "SystemExit"])
def test_what_fails_in_foremoe_leaves_verls_engine_alone(stand_in, module, error):
    out, said = run(stand_in, module, error)
    assert out == "{} SourceFileLoader" and said.count(f"which runs without it: {error}: made to fail") == 1
