"""The config that veRL makes of a command, as its own program prints it, without a process that imports veRL for each."""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from omegaconf import OmegaConf

TELLS = '#!/bin/bash\nprintf "%s\\0" "$@" > "$(dirname "$0")/told"\n'


def python_that_tells(folder):
    """A search path whose python does no more than to keep its arguments for `config_of`."""
    (folder / "python").write_text(TELLS)
    (folder / "python").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def config_of(folder):
    """Returns the config that ``python -m MODULE ... --cfg job`` prints for the arguments that were kept."""
    module, *arguments = Path(folder, "told").read_text().removesuffix("\0").split("\0")[1:]
    assert module == "verl.trainer.main_ppo"
    said = io.StringIO()
    with patch.object(sys, "argv", [module, *arguments, "--cfg", "job"]), contextlib.redirect_stdout(said):
        runpy.run_module(module, run_name="__main__")
    return OmegaConf.create(said.getvalue())
