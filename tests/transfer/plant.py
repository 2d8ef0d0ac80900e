"""Runs tests on code with a planted fault: ``python plant.py < FAULTS.json`` prints for each fault pytest's exit code and output.

Every fault has a process of its own, forked after torch was imported; the file on disk stays as it is.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import sys
import tempfile
from pathlib import Path

import hypothesis  # noqa: F401 (here, so that no child has to)
import pytest
import torch.distributed  # noqa: F401

import foremoe.planner
import foremoe.solvers  # noqa: F401 (these rooms import none in which faults are planted)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Planted(importlib.machinery.SourceFileLoader):
    """Loads a module from text instead of its file."""

    def __init__(self, name, path, source):
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname):
        # Triton takes a kernel's text from this cache; without the entry it would read the sound file.
        linecache.cache[self.path] = len(self.source), None, self.source.splitlines(keepends=True), self.path
        return compile(self.source, self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name, source):
        self.name, self.path, self.source = name, str(ROOT / f"{name.replace('.', '/')}.py"), source

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=Planted(fullname, self.path, self.source))


def run(fault):
    """pytest's exit code: 0 if the test passes, 1 if it fails."""
    source = (ROOT / fault["file"]).read_text()
    assert source.count(fault["text"]) == 1, f"{fault['name']}: the text is not there once"
    name = fault["file"].removesuffix(".py").replace("/", ".")
    assert name not in sys.modules, f"{name} was imported before the fault was planted"
    sys.meta_path.insert(0, Finder(name, source.replace(fault["text"], fault["fault"])))
    file, _, test = fault["test"].partition("::")
    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", test, str((HERE / file).resolve())])


def in_child(fault):
    with tempfile.TemporaryFile() as out:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                code = int(run(fault))
                sys.stdout.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        return code, out.read().decode()


if __name__ == "__main__":
    print(json.dumps([in_child(fault) for fault in json.load(sys.stdin)]))
