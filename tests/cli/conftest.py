"""A tiny model, and files made from it, for all tests of the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cli_runs import EXPERTS, LAYERS, TOPK, good, write_trace

from foremoe.machine.model import Model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="session")
def model(folder: Path) -> str:
    """A TOML file of a model small enough for plans in milliseconds."""
    path = folder / "tiny.toml"
    tiny = dataclasses.replace(
        Model.preset("mixtral-8x7b"), name="tiny", num_layers=LAYERS, first_moe_layer=1, num_experts=EXPERTS, num_topk=TOPK
    )
    tiny.to_toml(path)
    return str(path)


@pytest.fixture(scope="session")
def trace(folder: Path) -> str:
    return write_trace(folder / "first.npz", seed=1)


@pytest.fixture(scope="session")
def other_trace(folder: Path) -> str:
    return write_trace(folder / "second.npz", seed=2)


@pytest.fixture(scope="session")
def dealing(model: str) -> list[str]:
    """Options under which the traces fill three micro-steps of four ranks on two nodes."""
    return ["--model", model, "--ranks", "4", "--ranks-per-node", "2", "--tokens-per-rank", "25", "--redundant", "1"]


@pytest.fixture(scope="session")
def plan_and_workload(folder: Path, trace: str, dealing: list[str]) -> tuple[str, str]:
    """A plan file, and the counts it was made from."""
    plan, work = str(folder / "plan.safetensors"), str(folder / "work.safetensors")
    good(["plan", trace, *dealing, "-o", plan, "--save-workload", work])
    return plan, work
