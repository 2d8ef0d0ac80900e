"""docs/related.md: what runs here under a name is there under that name."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import click
import pytest

from bench.systems import systems
from foremoe.base.errors import InputError
from foremoe.cli.knowledge import views_of
from foremoe.cli.simulate import BALANCED, simulate
from foremoe.planner.strategies import resolve

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "related.md").read_text()
LINES = [[cell.strip() for cell in line[1:-1].split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
BODY = [cells for cells in LINES if cells[1] not in ("what it does", "---")]
SYSTEMS = (
    "Megatron-LM, static", "EPLB", "FlashLB", "LPLB", "LLEP", "UltraEP", "FEPLB", "LAER-MoE", "MicroMoE / FineMoE", "MoonEP",
    "ECHO", "TAOT", "virtual experts", "MoE-GPS", "ReaLB", "RollMux", "RoutePack", "open-instruct", "EPIC", "ReLibra", "ForeMoE",
    "DeepEP", "token-imbalance benchmark", "Routing replay",
)  # fmt: skip
NAMES = sorted({name for cells in BODY for name in re.findall(r"`([^`]+)`", cells[2])})


def option_resolves(words: list[str]) -> bool:
    """Whether `simulate` takes these words: its parser reads options, ours the lists in them."""
    context = click.Context(simulate)
    named = {option: param for param in simulate.params for option in param.opts}
    param = named.get(words[0])
    if param is None:
        return False
    for value in words[1:]:
        param.type_cast_value(context, (value,) if param.multiple else value)  # type: ignore[attr-defined]
        {"--foresight": views_of}.get(words[0], len)((value,))
    return True


def resolves(name: str) -> bool:
    """Whether the name stands for something that runs here."""
    if name.startswith("--"):
        return option_resolves(shlex.split(name))
    if name.startswith("python -m bench."):
        return (ROOT / "bench" / f"{name.removeprefix('python -m bench.')}.py").exists()
    if "/" in name:
        return (ROOT / name).exists()
    if name in (BALANCED, *systems(8)):
        return True
    try:
        resolve(name)
    except InputError:
        return False
    return True


def test_every_system_has_a_line() -> None:
    for system in SYSTEMS:
        assert any(system in cells[0] for cells in BODY), system
    for cells in BODY:
        assert len(cells) == 4 and cells[1] and (cells[2] or cells[3]), cells[0]


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_here_has_that_name(name: str) -> None:
    assert resolves(name), f"nothing here is called {name}"


@pytest.mark.parametrize(
    "name", ["nope", "--nope", "--regime nope", "--foresight nope=1", "python -m bench.nope", "foremoe/nope", "Search(nope=1)"]
)
def test_what_does_not_run_is_found(name: str) -> None:
    with contextlib.suppress(InputError, click.BadParameter):
        assert not resolves(name)
