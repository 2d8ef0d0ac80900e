"""Changed files either load and can be used, or are refused in one sentence, within little memory and time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from fuzz_loaders import LOADERS, judge
from fuzz_run import input_of, report, run, warm
from hypothesis import given
from hypothesis import strategies as st
from limits import limited

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """Imports and compiles before memory is limited; every valid input loads."""
    warm(tmp_path_factory.mktemp("warm"))


@pytest.mark.parametrize("name", LOADERS)
@given(rng=st.randoms(use_true_random=False))
def test_changed_files_load_or_are_refused(name, rng):
    data = LOADERS[name].change(rng)
    with tempfile.TemporaryDirectory() as folder, limited(256 + 4 * len(data) / 2**20):
        judge(name, Path(folder, f"changed{LOADERS[name].suffix}"), data)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_once_crashed_is_refused(path, tmp_path):
    name = path.name.partition("-")[0].replace("_", " ")
    with limited():
        assert judge(name, tmp_path / f"corpus{LOADERS[name].suffix}", path.read_bytes()) == "refused"


def test_the_long_run_counts_what_is_foreign_and_passes_over_kills(monkeypatch):
    figures = run(3000, seed=3, batch=1000)
    assert figures["inputs"] == 3000 and not figures["foreign"] and not figures["kills"], report(figures)

    def use(path: str) -> None:
        number = int(Path(path).read_bytes())
        if number == 7:
            os.kill(os.getpid(), 9)
        if number == 8:
            raise ZeroDivisionError
        if number == 9:
            bytearray(2**29)
        if number == 10:
            while True:
                pass

    monkeypatch.setattr("fuzz_run.warm", lambda folder: None)
    monkeypatch.setattr("fuzz_run.SECONDS", 0.2)
    monkeypatch.setitem(LOADERS, "model", LOADERS["model"]._replace(use=use))
    monkeypatch.setattr("fuzz_run.input_of", lambda seed, number, only: ("model", str(number).encode()))
    figures = run(20, only="model")
    assert [number for number, _ in figures["kills"]] == [7]
    assert sorted((number, what.split()[0]) for number, _, what in figures["foreign"]) == [
        (8, "ZeroDivisionError"), (9, "MemoryError"), (10, "TooLong"),
    ]  # fmt: skip
    assert figures["counts"]["model", "loaded"] == 16 and "3 foreign exceptions, 1 kills" in report(figures)


def test_an_input_is_a_function_of_its_numbers():
    assert all(input_of(1, number) == input_of(1, number) for number in range(40))
    assert len({input_of(1, number)[1] for number in range(40)}) > 30
