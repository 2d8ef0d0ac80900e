"""Runs of the command line, and small recordings to run it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from foremoe.cli.main import main

LAYERS, EXPERTS, TOPK = 3, 8, 2


def random_ids(seed: int, num_tokens: int) -> np.ndarray:
    """Distinct experts per token, the low ones more popular."""
    rng = np.random.default_rng(seed)
    score_TLE = rng.gumbel(size=(num_tokens, LAYERS, EXPERTS)) - 0.4 * np.arange(EXPERTS)
    return np.argsort(-score_TLE, axis=2)[:, :, :TOPK].astype(np.uint8)


def write_trace(path: Path, seed: int = 0, lengths: tuple[int, ...] = (40, 25, 60, 33, 50, 48), **arrays: Any) -> str:
    """A recording as others write them: no model, no layer numbers."""
    given = {"topk_ids": random_ids(seed, sum(lengths)), "seq_len": np.array(lengths), "num_experts": EXPERTS} | arrays
    np.savez(path, **{name: value for name, value in given.items() if value is not None})
    return str(path)


def run(arguments: list[str]) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(main, arguments)


def good(arguments: list[str]) -> Result:
    """A run that must succeed."""
    result = run(arguments)
    assert result.exit_code == 0, (result.exit_code, result.stderr, result.exception)
    return result


def bad(arguments: list[str]) -> str:
    """A run that must end as one sentence on stderr; returns the sentence."""
    result = run(arguments)
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("planning: ", "warning: "))]
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) > len("error: ")
    assert result.stdout == ""
    return lines[0]
