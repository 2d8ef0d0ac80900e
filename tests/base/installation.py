"""Installations of the package that cannot be written."""

from __future__ import annotations

import contextlib
import shutil


@contextlib.contextmanager
def read_only_copy(package, root, *others):
    """Copies the package into `root`, beside some empty folders, and makes all of them read-only for the block."""
    shutil.copytree(package, root / "foremoe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in others:
        (root / name).mkdir()
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        yield root
    finally:
        for folder in folders:
            folder.chmod(0o755)
