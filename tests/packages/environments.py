"""Environments of their own, in ignored folders of the checkout, for what the one of `make test` cannot show."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOWEST = re.compile(r"([A-Za-z0-9._-]+)(>=|==)([0-9][0-9.]*)")


def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(group: str) -> list[str]:
    """Requirements of a group: ``build``, ``core`` or an extra, without the package's own extras."""
    its = project()
    groups = {"build": its["build-system"]["requires"], "core": its["project"]["dependencies"]}
    return [text for text in (groups | its["project"]["optional-dependencies"])[group] if not text.startswith("foremoe[")]


def lowest(texts: Iterable[str]) -> list[str]:
    """The requirements with the lowest version that each allows, and no other."""
    found = []
    for text in texts:
        match = LOWEST.fullmatch(text.replace(" ", ""))
        if match is None:
            raise SystemExit(f"{text!r} names no lowest version; write NAME>=VERSION.")
        found.append(f"{match[1]}=={match[3]}")
    return found


def environment(stage: str, folder: Path, wanted: list[str]) -> Path | None:
    """Python of the environment in `folder` that has what is wanted, kept from one run to the next.

    Where no registry can be reached, a line says that the stage is skipped, and there is none.
    """
    python, installed, log = folder / "bin" / "python", folder / "installed.txt", folder / "pip.log"
    if installed.exists() and installed.read_text().splitlines() == wanted:
        return python
    say(stage, f"installing {', '.join(wanted)}")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True, with_pip=True)
    command = [python, "-m", "pip", "install", "-qqq", "--disable-pip-version-check", "--no-input", "--log", log, *wanted]
    if subprocess.run(command, capture_output=True).returncode == 0:
        installed.write_text("\n".join(wanted))
        return python
    faults = re.findall("ERROR: (.*)", log.read_text())
    if not unreachable(log.read_text()):
        raise SystemExit(f"{stage}: " + " ".join(fault[:300] for fault in faults if not fault.startswith("Ignored")))
    say(stage, "skipped, no package registry can be reached")
    return None


def unreachable(log: str) -> bool:
    """Whether pip's log says that a registry did not answer; else what was asked for is at fault."""
    return re.search("after connection broken|from versions: none|ConnectionError|TimeoutError|IncompleteRead", log) is not None


def say(stage: str, text: str) -> None:
    """Prints at once, also into a pipe."""
    print(f"{stage}: {text}", flush=True)


def require_oldest_python(stage: str) -> bool:
    """Whether this is the lowest Python that the package allows, for which the lowest versions of the others were built."""
    wanted = project()["project"]["requires-python"].removeprefix(">=")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != wanted:
        say(stage, f"skipped, the oldest versions are tested with Python {wanted}, and this is {here}; set PYTHON=python{wanted}")
    return here == wanted
