"""Pages name files and functions that exist."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

import foremoe

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# What a page shows as an output, a placeholder or a file of a trainer, not as a file of the tree.
NOT_FILES = re.compile(r"mine\.py|wire\.py|run_grpo\.py|HARDWARE_DATE")
# It lists old names beside the new ones.
EXEMPT = {"CHANGELOG.md"}
ENTRY_POINTS = {"foremoe.solvers", "foremoe.backends"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"\b(?:foremoe|tests|bench|docs|examples)/[\w/.-]*\w\.(?:py|md|toml|json|sh)\b", text))
    linked = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = [name for name in named if not NOT_FILES.search(name) and not (ROOT / name).exists()]
    missing += [link for link in linked if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in EXEMPT], ids=lambda path: path.name)
def test_names_of_the_package_that_a_page_names_exist(page: Path) -> None:
    for name in sorted(set(re.findall(r"(?<![\w.])foremoe(?:\.[A-Za-z_]\w*)+", page.read_text())) - ENTRY_POINTS):
        parts = name.split(".")
        if parts[-1] in ("mine", "wire"):
            continue
        if parts[1] == "integrations":  # needs the trainer
            module = ROOT / Path(*parts[:3])
            source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            assert source.exists() and (not parts[3:] or parts[3] in source.read_text()), name
            continue
        value = foremoe
        for at, part in enumerate(parts[1:], 2):
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(".".join(parts[:at]))


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == foremoe.__version__
    assert f"\nversion: {foremoe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
