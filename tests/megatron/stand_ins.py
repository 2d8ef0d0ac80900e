"""Modules of trainers that are not installed here: parts of a checkout where one is named, stand-ins for the rest."""

import contextlib
import importlib
import logging
import os
import sys
import types
from pathlib import Path

import pytest
from logged import logged


def checkouts(variable, repository):
    """Parameters of a test: without a checkout, and with the one that an environment variable names."""
    path = os.environ.get(variable, "")
    reason = f"set {variable} to a checkout of {repository} to run its own code"
    return [
        pytest.param("", id="stand-in"),
        pytest.param(path, id="checkout", marks=pytest.mark.skipif(not path or not Path(path).is_dir(), reason=reason)),
    ]


@contextlib.contextmanager
def modules(**contents):
    """Modules by name, ``__`` for a dot, of these contents; parents that do not exist are empty packages."""
    made = {}
    for name, content in contents.items():
        parts = name.split("__")
        for i in range(1, len(parts) + 1):
            full = ".".join(parts[:i])
            module = made.setdefault(full, types.ModuleType(full))
            module.__path__ = []
        vars(module).update(content)
        for i in range(1, len(parts)):
            setattr(made[".".join(parts[:i])], parts[i], made[".".join(parts[: i + 1])])
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:  # what others have imported meanwhile stays
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def own_file(checkout, path):
    """Runs one file of a checkout as a module of its own name; what it imports must be there."""
    name = path.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, Path(checkout, path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def figures():
    """What foremoe logs of the stages within, on rank 0: (stage, metrics). Warnings are errors."""
    found = []
    with logged(logging.INFO) as records:
        yield found
    assert [record.getMessage() for record in records if record.levelno >= logging.WARNING] == []
    found += [record.args for record in records if record.name == "foremoe.integrations.megatron.forward_backward"]
